"""How far a long piece of work is, below the cell of a notebook that does it; on the terminal elsewhere.

IPython is used only where it runs this process as a notebook's kernel, and is imported then.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, cast

from graphopt.report.console.escape import safe
from graphopt.report.console.progress_bar import TerminalProgress
from graphopt.report.console.terminal import first_rank
from graphopt.report.notebook import in_notebook
from graphopt.rewriting.progress import Progress

__all__ = ["NotebookProgress"]

_INTERVAL = 0.1
"""Seconds between two updates of a display: each one is a message to the browser."""


class NotebookProgress:
    """Shows long work of rank 0 as a line below the cell that does it, and takes it away at the end.

    Args:
        elsewhere: shows it where this process is no notebook's kernel.
    """

    def __init__(self, elsewhere: Progress | None = None) -> None:
        self._elsewhere = elsewhere or TerminalProgress()

    def working(self, message: str) -> AbstractContextManager[Callable[[str], None]]:
        """A line with ``message``."""
        return _line(message) if in_notebook() else self._elsewhere.working(message)

    def bar(self, message: str) -> AbstractContextManager[Callable[[float, str], None]]:
        """A bar with ``message``, which never goes back."""
        return _bar(message) if in_notebook() else self._elsewhere.bar(message)

    def line(self, text: str) -> None:
        """A line that stays, where the log goes."""
        self._elsewhere.line(text)


@contextlib.contextmanager
def _line(message: str) -> Iterator[Callable[[str], None]]:
    with _display(_bundle(message, "", None)) as update:
        yield lambda remark: update(_bundle(message, remark, None))


@contextlib.contextmanager
def _bar(message: str) -> Iterator[Callable[[float, str], None]]:
    reached = 0.0
    with _display(_bundle(message, "", reached)) as update:

        def show(share: float, remark: str) -> None:
            nonlocal reached
            reached = max(reached, min(share, 1.0))
            update(_bundle(message, remark, reached))

        yield show


@contextlib.contextmanager
def _display(first: dict[str, str]) -> Iterator[Callable[[dict[str, str]], None]]:
    """An output of the running cell while the block runs; gives a function that replaces what it shows."""
    if not first_rank():
        yield lambda bundle: None
        return
    from IPython.display import display

    handle = cast(Any, display)(first, raw=True, display_id=True)
    shown = time.monotonic()

    def update(bundle: dict[str, str]) -> None:
        nonlocal shown
        if time.monotonic() - shown >= _INTERVAL:
            handle.update(bundle, raw=True)
            shown = time.monotonic()

    try:
        yield update
    finally:
        handle.update({"text/plain": "", "text/html": ""}, raw=True)


def _bundle(message: str, remark: str, share: float | None) -> dict[str, str]:
    """What is shown: as text, and as HTML without scripts."""
    percent = "" if share is None else f" {share:.0%}"
    bar = "" if share is None else f' <progress max="1" value="{share:.3f}" aria-label="{safe(message)}"></progress>'
    plain = f"{message}{percent}{remark and f': {remark}'}"
    return {"text/plain": plain, "text/html": f"<div>{safe(message)}{bar} {safe(remark)}</div>"}
