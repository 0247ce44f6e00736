"""What graphopt warns of while it makes something that is kept: noted, to be said again where that is read."""

from __future__ import annotations

import logging

__all__ = ["WarningsKept"]


class WarningsKept(logging.Handler):
    """Notes warnings, and handles them for nobody: where it is the only handler, they go to stderr all the same.

    Args:
        said: to which the logger and the text of each warning are added.
    """

    def __init__(self, said: list[tuple[str, str]]) -> None:
        super().__init__(logging.WARNING)
        self._said = said

    def emit(self, record: logging.LogRecord) -> None:
        """Note one."""
        if record.levelno == logging.WARNING:
            self._said.append((record.name, record.getMessage()))
