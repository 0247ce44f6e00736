"""One line in the log for each capture, and where it goes while nobody has set up logging.

The loggers of graphopt are called like its modules, below ``graphopt``; the line comes from ``graphopt.capture``, at
INFO. Where the program's stderr is no terminal, and neither ``graphopt`` nor the root logger has a handler, the first
capture installs one that writes to stderr: the lines of captures, and warnings. On a terminal there is the overview in
place of the line. ``GRAPHOPT_LOG`` names another level: ``off``, ``error``, ``warning`` (no line), ``info`` (the
default) or ``debug`` (everything); a level set on the logger ``graphopt`` counts as well.
"""

from __future__ import annotations

import logging
import os
import sys

from graphopt.ir.words.written_units import counted, format_bytes
from graphopt.report.console.terminal import LogFormatter, first_rank, is_terminal, write
from graphopt.rewriting.memory.fit.other_sizes import written_sizes
from graphopt.rewriting.pass_ import PassRecord
from graphopt.rewriting.warnings_kept import WarningsKept
from graphopt.runtime.programs.rewrite import Rewritten

__all__ = ["capture_line", "log_capture", "send_log_to_stderr", "to_log"]

_VARIABLE = "GRAPHOPT_LOG"
_LEVELS = {
    "off": logging.CRITICAL + 1,
    "error": logging.ERROR,
    "warning": logging.WARNING,
    "info": logging.INFO,
    "debug": logging.DEBUG,
}

logger = logging.getLogger("graphopt.capture")
_package = logging.getLogger("graphopt")


class _ToStderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to what ``sys.stderr`` is when a record comes, as ``logging.lastResort`` does."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(_Prefixed())

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record to stderr as it is now."""
        self.stream = sys.stderr
        super().emit(record)


class _Prefixed(LogFormatter):
    """``graphopt: line``, and ``graphopt: warning: line``."""

    def format(self, record: logging.LogRecord) -> str:
        """The record's line, with who says it."""
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        return f"graphopt: {level}{super().format(record)}"


def log_capture(rewritten: Rewritten, first: bool) -> None:
    """Log a capture that is about to train.

    Args:
        rewritten: what came of the passes.
        first: whether it is the first capture of a model or step.
    """
    del first
    send_log_to_stderr()
    if logger.isEnabledFor(logging.INFO):
        logger.info("%s", capture_line(rewritten))


def send_log_to_stderr() -> None:
    """Add the handler, once, where this process speaks for all and nobody else handles the records."""
    handled = logging.root.handlers or not all(isinstance(handler, WarningsKept) for handler in _package.handlers)
    if sys.stderr is None or sys.stderr.isatty() or not first_rank() or handled:
        return
    setting = os.environ.get(_VARIABLE, "").strip().lower()
    level = _LEVELS.get(setting or "info")
    _package.addHandler(_ToStderr())
    if _package.level == logging.NOTSET and setting in _LEVELS:
        _package.setLevel(_LEVELS[setting])
    elif _package.level == logging.NOTSET and logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if level is None:
        _package.warning("%s is %r, and is one of %s", _VARIABLE, setting, ", ".join(_LEVELS))


def to_log(line: str) -> None:
    """Write a line on the terminal that stderr is, where this is rank 0, or else to the log; at INFO."""
    if sys.stderr is None or not (is_terminal(sys.stderr) and first_rank()):
        send_log_to_stderr()
        logger.info("%s", line)
    elif _LEVELS.get(os.environ.get(_VARIABLE, "").strip().lower(), logging.INFO) <= logging.INFO:
        write(line, sys.stderr)


def capture_line(rewritten: Rewritten) -> str:
    """``LM: peak 17.5 -> 10.3 MB predicted, 3 passes, 2.1 s``: the program that runs, and how it was at first.

    Passes of an earlier stage change the peak of the program of that stage, which is then named.
    """
    if rewritten.loaded:
        return _loaded_line(rewritten)
    program, records = rewritten.program, rewritten.records
    counted = [record for record in records if record.peak_before is not None and record.peak_after is not None]
    own = [record for record in counted if record.stage == program.stage]
    now = own[-1].peak_after if own else program.memory().peak_bytes
    before = own[0].peak_before if own else now
    earlier = "".join(
        f" ({stage} stage {_change(found[0].peak_before or 0, found[-1].peak_after or 0)})"
        for stage, found in _by_stage(counted).items()
        if stage != program.stage and found[0].peak_before != found[-1].peak_after
    )
    passes = _passes(rewritten)
    loop = max(program.memory().loops.values(), default=now)
    alone = "" if loop == now else f" ({format_bytes(loop or 0)} where its loss alone is differentiated)"
    peak = f"peak {_change(before or 0, now or 0)} predicted{alone}{earlier}"
    sizes = written_sizes(program)
    planned = f", planned up to {sizes}" if sizes else ""
    return f"{program.title or 'program'}: {peak}{planned}, {passes}, {rewritten.seconds:.1f} s"


def _loaded_line(rewritten: Rewritten) -> str:
    """The line of a capture that was read: no program is read for it, so that the peak is that of the last pass."""
    last = list(rewritten.stages)[-1]
    own = [record for record in rewritten.records if record.peak_after is not None and record.stage == last]
    peak = f"peak {format_bytes(own[-1].peak_after or 0)} predicted, " if own else ""
    title = rewritten.session.title or "program"
    return f"{title}: loaded from the cache, {peak}{_passes(rewritten)}, {rewritten.seconds:.1f} s"


def _passes(rewritten: Rewritten) -> str:
    count = len(rewritten.pipeline.passes)
    return counted(count, "passes") if count else "no passes"


def _by_stage(records: list[PassRecord]) -> dict[str, list[PassRecord]]:
    found: dict[str, list[PassRecord]] = {}
    for record in records:
        found.setdefault(record.stage, []).append(record)
    return found


def _change(before: int, after: int) -> str:
    """Two numbers of bytes, with their unit once where they share it."""
    if before == after:
        return format_bytes(after)
    (old, unit), (new, own) = format_bytes(before).split(), format_bytes(after).split()
    return f"{old} -> {new} {own}" if unit == own else f"{old} {unit} -> {new} {own}"
