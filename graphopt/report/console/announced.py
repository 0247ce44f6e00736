"""Long work where there is no terminal to show it on: one line in the log, as soon as it is long.

The line is at INFO, of the logger ``graphopt.capture``, and says what is done and what that is a part of:
``capturing LM for i64[8, 1024]: searching plans``. What is done within a second gets none.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

from graphopt.report.console.escape import visible
from graphopt.report.console.log_lines import send_log_to_stderr

__all__ = ["announced"]

_SOON = 1.0
"""Seconds after which work that goes on is worth a line."""

logger = logging.getLogger("graphopt.capture")
_work = threading.local()


@contextlib.contextmanager
def announced(message: str) -> Iterator[None]:
    """Say ``message`` in the log while the block runs, if it runs for long; the log gets somewhere to go first."""
    send_log_to_stderr()
    outer: tuple[str, ...] = getattr(_work, "now", ())
    if message in outer or not logger.isEnabledFor(logging.INFO):
        yield
        return
    _work.now = (*outer, message)
    timer = threading.Timer(_SOON, logger.info, ("%s", visible(": ".join(_work.now))))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        _work.now = outer
