"""How far a long piece of work is, on a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from graphopt.ir.ops.values import format_bytes
from graphopt.ir.program import Program
from graphopt.report.console.escape import visible
from graphopt.report.console.terminal import displayed, first_rank, is_terminal

if TYPE_CHECKING:
    from graphopt.planning.frontier import Frontier
    from graphopt.rewriting.pipeline import Pass, PassRecord

__all__ = ["ShowPasses", "measuring", "progress_bar", "searching"]


@contextlib.contextmanager
def progress_bar(message: str) -> Iterator[Callable[[float, str], None]]:
    """A bar with ``message`` on stderr while the block runs, where stderr is a terminal and this is rank 0.

    Gives a function to be called with the share that is done, from 0 to 1, and a remark to show beside the bar. The bar
    never goes back. Nothing is shown elsewhere.
    """
    if not (is_terminal(sys.stderr) and first_rank()):
        yield lambda share, remark: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    said = TextColumn("{task.description}", markup=False)
    remarks = TextColumn("{task.fields[remark]}", markup=False)
    bar = Progress(said, BarColumn(), TimeElapsedColumn(), remarks, console=Console(stderr=True), transient=True)
    task = bar.add_task(visible(message), total=1.0, remark="")
    reached = 0.0

    def show(share: float, remark: str) -> None:
        nonlocal reached
        reached = max(reached, min(share, 1.0))
        bar.update(task, completed=reached, remark=visible(remark))

    with displayed(bar):
        yield show


@contextlib.contextmanager
def measuring() -> Iterator[Callable[[int, int], None]]:
    """A bar while the seconds of calls are measured; gives what ``cost_report`` takes as ``progress``."""
    with progress_bar("measuring the calls") as show:
        yield lambda done, total: show(done / total, f"{done} of {total}")


@contextlib.contextmanager
def searching(hint: str = "") -> Iterator[Callable[[float, Frontier], None]]:
    """A bar while plans are searched; gives what ``Fitting`` takes as ``progress``.

    Args:
        hint: what the user can do meanwhile.
    """
    with progress_bar("searching plans") as show:

        def progress(share: float, frontier: Frontier) -> None:
            show(share, f"smallest peak {format_bytes(frontier.lowest.peak)}{hint and f'; {hint}'}")

        yield progress


class ShowPasses:
    """Says which pass is running; an instrument of the pipeline.

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
