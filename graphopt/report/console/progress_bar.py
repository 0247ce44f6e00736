"""How far a long piece of work is, on a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from graphopt.report.console.escape import visible
from graphopt.report.console.log_lines import send_log_to_stderr
from graphopt.report.console.terminal import displayed, first_rank, is_terminal, working

__all__ = ["TerminalProgress", "progress_bar"]


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


class TerminalProgress:
    """Shows long work on the terminal that stderr is, of rank 0; nothing elsewhere."""

    def working(self, message: str) -> AbstractContextManager[Callable[[str], None]]:
        """A spinner with ``message``; before the first work of all, the log gets somewhere to go."""
        send_log_to_stderr()
        return working(message)

    def bar(self, message: str) -> AbstractContextManager[Callable[[float, str], None]]:
        """A bar with ``message``."""
        return progress_bar(message)
