"""What is shown while something takes long: nothing here; the layers above say how (``show_progress``)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from graphopt.ir.provided import handed_down
from graphopt.ir.words.written_units import format_bytes
from graphopt.planning.frontier import Frontier

__all__ = ["Progress", "leave_line", "measuring", "searching", "show_progress", "working"]


class Progress(Protocol):
    """Shows how far a piece of work is, while the block of its context manager runs."""

    def working(self, message: str) -> AbstractContextManager[Callable[[str], None]]:
        """Show ``message``; gives a function to be called with a remark to show beside it."""
        ...

    def bar(self, message: str) -> AbstractContextManager[Callable[[float, str], None]]:
        """Show ``message`` and a bar; gives a function to be called with the share done, 0 to 1, and a remark."""
        ...

    def line(self, text: str) -> None:
        """Leave a line behind."""
        ...


class _Silent:
    """Shows nothing."""

    @contextlib.contextmanager
    def working(self, message: str) -> Iterator[Callable[[str], None]]:
        """Nothing."""
        yield lambda remark: None

    @contextlib.contextmanager
    def bar(self, message: str) -> Iterator[Callable[[float, str], None]]:
        """Nothing."""
        yield lambda share, remark: None

    def line(self, text: str) -> None:
        """Nothing."""


_progress: Progress = _Silent()


def show_progress(progress: Progress) -> None:
    """Let ``progress`` show all long work of this process."""
    global _progress
    _progress = progress


def _shown() -> Progress:
    handed_down.complete()
    return _progress


def working(message: str) -> AbstractContextManager[Callable[[str], None]]:
    """Show ``message`` while the block runs; gives a function to be called with a remark."""
    return _shown().working(message)


def leave_line(text: str) -> None:
    """Leave a line behind, on the terminal or in the log."""
    _shown().line(text)


@contextlib.contextmanager
def measuring() -> Iterator[Callable[[int, int], None]]:
    """A bar while the seconds of calls are measured; gives what ``cost_report`` takes as ``progress``."""
    with _shown().bar("measuring the ops") as show:
        yield lambda done, total: show(done / total, f"{done} of {total}")


@contextlib.contextmanager
def searching(hint: str = "") -> Iterator[Callable[[float, Frontier], None]]:
    """A bar while plans are searched; gives what ``Fitting`` takes as ``progress``.

    Args:
        hint: what the user can do meanwhile.
    """
    with _shown().bar("searching plans") as show:
        going_on = True

        def progress(share: float, frontier: Frontier) -> None:
            if going_on:  # a search keeps this function, and may go on when a record is read, long after the bar
                show(share, f"smallest peak {format_bytes(frontier.lowest.peak)}{hint and f'; {hint}'}")

        try:
            yield progress
        finally:
            going_on = False
