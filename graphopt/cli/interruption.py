"""Ctrl-C in the command ``graphopt``: a word on stderr and the exit code 130, whatever is going on.

Between imports and at the end of the process nothing of the user's is at work, and an exception would be lost in the
middle of an import: the process ends at once. While a command runs, the first Ctrl-C is a ``KeyboardInterrupt``, so
that files and processes are put in order and ``graphopt plan`` shows what it has; the second one ends the process.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

__all__ = ["INTERRUPTED", "SAID", "end_at_once", "raised"]

INTERRUPTED = 130
"""The exit code."""

SAID = "graphopt: interrupted"


def end_at_once() -> None:
    """From now on Ctrl-C ends the process, where it has not been told to do something else about it."""
    with contextlib.suppress(ValueError):  # in a thread, for which Python takes no handlers
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _end)


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """While the block runs, the first Ctrl-C is a ``KeyboardInterrupt``."""
    if signal.getsignal(signal.SIGINT) is not _end:
        yield
        return
    signal.signal(signal.SIGINT, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, _end)


def _raise(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, _end)
    signal.default_int_handler(number, frame)


def _end(_number: int, _frame: FrameType | None) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"{SAID}\n".encode())
    os._exit(INTERRUPTED)
