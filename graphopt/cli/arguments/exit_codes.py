"""With which code a command ends: the same one for the same kind of mistake, in every command."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from graphopt.errors import GraphoptError, PipelineError

__all__ = ["EXIT_CODES", "UsageError", "exit_code", "wrong_use"]

_FAILED, _WRONG_USE = 1, 2

EXIT_CODES = {
    0: "fine",
    _FAILED: "it failed: the target's code raises, the model cannot be captured, a pass fails, the program has no "
    "tensor of a name, no plan meets a budget, a tolerance is exceeded, a file cannot be written",
    _WRONG_USE: "wrong use: arguments that do not parse or do not go together, or that name a target, pass, device or "
    "file that is not there or not right",
    130: "interrupted from the keyboard (Ctrl-C)",
}
"""What each code means; ``graphopt help`` shows it."""


class UsageError(GraphoptError):
    """The command line is wrong, or what it names."""


@contextlib.contextmanager
def wrong_use() -> Iterator[None]:
    """While the block runs, an error is one of the command line: it reads what that names.

    Raises:
        UsageError: in the place of any other ``GraphoptError``.
    """
    try:
        yield
    except UsageError:
        raise
    except GraphoptError as error:
        failure = UsageError(str(error))
        for note in getattr(error, "__notes__", ()):
            failure.add_note(note)
        raise failure from error


def exit_code(error: GraphoptError) -> int:
    """The code of a command that ended with an error."""
    return _WRONG_USE if isinstance(error, (UsageError, PipelineError)) else _FAILED
