"""The exceptions of graphopt, and the one way they name near alternatives."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "ArgumentError",
    "CaptureError",
    "GraphBreakError",
    "GraphoptError",
    "PassError",
    "PipelineError",
    "RankError",
    "TorchVersionError",
    "VerifyError",
    "as_cause",
    "did_you_mean",
    "near_words",
]


class GraphoptError(Exception):
    """Base of every error that graphopt raises on purpose."""


class ArgumentError(GraphoptError, TypeError, ValueError):
    """An argument is not what a function takes; the message names it, what it got, and what it takes.

    It is a ``TypeError`` and a ``ValueError`` as well, as Python's own are.
    """


class CaptureError(GraphoptError):
    """A model, loss or optimizer cannot be turned into one program; the message says where and what to do."""


class GraphBreakError(CaptureError):
    """A model is not one graph: its Python looks at the values of tensors, or does something between tensors."""


class PipelineError(GraphoptError):
    """The list of passes is wrong; all problems are reported at once."""


class PassError(GraphoptError):
    """A pass failed; the original exception is the cause."""


class VerifyError(GraphoptError):
    """A program breaks an invariant; the message names the rule and the pass that broke it."""


class TorchVersionError(GraphoptError, ImportError):
    """The installed torch lacks something that graphopt needs; the message says what, what for, and what to install.

    It is an ``ImportError`` as well: most of what graphopt needs is looked for when it is imported.
    """


class RankError(GraphoptError, RuntimeError):
    """An exchange failed because of other ranks; the message says which, and where each was last seen.

    The original error is its cause. It is a ``RuntimeError`` as well, as those of torch.distributed are.

    Args:
        message: for people.
        ranks: the ranks at fault, numbered as in the default process group; none where no rank could be named.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


def as_cause(error: Exception) -> Exception:
    """An error whose message another one repeats, to be its cause: it shows the line that raised it, and no more."""
    while error.__traceback__ is not None and error.__traceback__.tb_next is not None:
        error.__traceback__ = error.__traceback__.tb_next
    error.__cause__ = error.__context__ = None
    return error


def near_words(word: str, known: Iterable[str], limit: int = 5) -> list[str]:
    """The words closest to ``word``, whatever their case and whether ``-``, ``_`` or nothing is between their parts."""
    choices = {choice: _plain(choice) for choice in known}
    plain = _plain(word)
    same = [choice for choice, letters in choices.items() if letters == plain]
    if same:
        return same[:limit]
    found = difflib.get_close_matches(plain, list(choices.values()), n=limit, cutoff=0.51)
    near = [choice for letters in dict.fromkeys(found) for choice, own in choices.items() if own == letters]
    if not near and plain:
        near = [choice for choice, letters in choices.items() if plain in letters]
    return near[:limit]


def _plain(word: str) -> str:
    return word.lower().replace("-", "").replace("_", "")


def did_you_mean(name: object, known: Iterable[str], limit: int = 5) -> str:
    """A sentence with the names closest to ``name``, or an empty string where none is close."""
    near = near_words(name, known, limit) if isinstance(name, str) else []
    return f"did you mean {', '.join(repr(choice) for choice in near)}?" if near else ""
