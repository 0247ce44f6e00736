"""How far a long piece of work is, on a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from graphopt.report.terminal import is_terminal

__all__ = ["progress_bar"]


@contextlib.contextmanager
def progress_bar(message: str) -> Iterator[Callable[[float, str], None]]:
    """A bar with ``message`` on stderr while the block runs, where stderr is a terminal; nothing elsewhere.

    Gives a function to be called with the share that is done, from 0 to 1, and a remark to show beside the bar. The bar
    never goes back.
    """
    if not is_terminal(sys.stderr):
        yield lambda share, remark: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    said = TextColumn("{task.description}", markup=False)
    remarks = TextColumn("{task.fields[remark]}", markup=False)
    with Progress(said, BarColumn(), TimeElapsedColumn(), remarks, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(message, total=1.0, remark="")
        reached = 0.0

        def show(share: float, remark: str) -> None:
            nonlocal reached
            reached = max(reached, min(share, 1.0))
            bar.update(task, completed=reached, remark=remark)

        yield show
