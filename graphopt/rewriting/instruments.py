"""Observers of a pipeline: what runs before and after each pass without being part of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from graphopt.ir.program import Program
from graphopt.rewriting.pass_ import Pass, PassRecord

__all__ = ["Instrument", "LogPasses", "ShowPasses", "Snapshots"]

logger = logging.getLogger(__name__)


class Instrument(Protocol):
    """What the pipeline calls around each pass."""

    def before_pass(self, current: Pass, program: Program) -> None:
        """``program`` is about to be rewritten by ``current``."""

    def after_pass(self, current: Pass, program: Program, record: PassRecord) -> None:
        """``program`` has been rewritten and verified."""

    def failed_pass(self, current: Pass, before: Program, error: Exception) -> None:
        """``current`` failed; ``before`` is the program as it was given to it."""


class LogPasses:
    """One line per pass on the logger of this module, at INFO; at WARNING where one has not done what it is for."""

    def before_pass(self, current: Pass, program: Program) -> None:
        """Say at DEBUG that the pass starts."""
        logger.debug("running %s on %r", current, program)

    def after_pass(self, current: Pass, program: Program, record: PassRecord) -> None:
        """Say what the pass did."""
        done = record.changed or record.changed.satisfied
        logger.log(logging.INFO if done else logging.WARNING, "%s", record)
        for line in record.changed.lines:
            logger.info("  %s", line)

    def failed_pass(self, current: Pass, before: Program, error: Exception) -> None:
        """Nothing: the error says it, and is raised."""


class Snapshots:
    """Keeps the program after each pass: ``snapshots[0]`` is what was captured, the last one what runs."""

    def __init__(self) -> None:
        self.programs: list[tuple[str, Program]] = []

    def record(self, label: str, program: Program) -> None:
        """Keep a copy of ``program`` under ``label``."""
        self.programs.append((label, program.copy()))

    def before_pass(self, current: Pass, program: Program) -> None:
        """Nothing: the program before a pass is the one after the last."""

    def after_pass(self, current: Pass, program: Program, record: PassRecord) -> None:
        """Keep the rewritten program."""
        self.record(record.spec, program)

    def failed_pass(self, current: Pass, before: Program, error: Exception) -> None:
        """Nothing: the error names the pass."""


class ShowPasses:
    """Says which pass is running.

    Args:
        show: is called with the stage and the pass.
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show

    def before_pass(self, current: Pass, program: Program) -> None:
        """Show the pass that begins."""
        self._show(f"{program.stage} stage, {current.name}")

    def after_pass(self, current: Pass, program: Program, record: PassRecord) -> None:
        """Show the stage alone."""
        self._show(f"{program.stage} stage")

    def failed_pass(self, current: Pass, before: Program, error: Exception) -> None:
        """Nothing: the error is the user's to read."""
