"""How far a long piece of work is, on a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from graphopt.report.console.announced import announced
from graphopt.report.console.escape import visible
from graphopt.report.console.log_lines import to_log
from graphopt.report.console.terminal import displayed, first_rank, is_terminal, working

__all__ = ["TerminalProgress", "progress_bar"]


@contextlib.contextmanager
def progress_bar(message: str) -> Iterator[Callable[[float, str], None]]:
    """A bar with ``message`` on stderr while the block runs, where stderr is a terminal and this is rank 0.

    Gives a function to be called with the share that is done, from 0 to 1, and a remark to show beside the bar. The bar
    never goes back. Elsewhere the log says so (``announced``).
    """
    if not (is_terminal(sys.stderr) and first_rank()):
        with announced(message):
            yield lambda share, remark: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    said = TextColumn("{task.description}", markup=False)
    remarks = TextColumn("{task.fields[remark]}", markup=False)
    times = TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()
    bar = Progress(said, BarColumn(), *times, remarks, console=Console(stderr=True), transient=True)
    task = bar.add_task(visible(message), total=1.0, remark="")
    reached = 0.0

    def show(share: float, remark: str) -> None:
        nonlocal reached
        reached = max(reached, min(share, 1.0))
        bar.update(task, completed=reached, remark=visible(remark))

    with displayed(bar):
        yield show


class TerminalProgress:
    """Shows long work on the terminal that stderr is, of rank 0; elsewhere the log says what is done."""

    @contextlib.contextmanager
    def working(self, message: str) -> Iterator[Callable[[str], None]]:
        """A spinner with ``message``, or a line in the log."""
        elsewhere = not (is_terminal(sys.stderr) and first_rank())
        with announced(message) if elsewhere else contextlib.nullcontext(), working(message) as show:
            yield show

    def bar(self, message: str) -> AbstractContextManager[Callable[[float, str], None]]:
        """A bar with ``message``."""
        return progress_bar(message)

    def line(self, text: str) -> None:
        """A line of its own, which stays; in the log where there is no terminal."""
        to_log(text)
