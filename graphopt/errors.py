"""The exceptions of graphopt, and the one way they name near alternatives."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "CaptureError",
    "GraphBreakError",
    "GraphoptError",
    "PassError",
    "PipelineError",
    "RankError",
    "TorchVersionError",
    "VerifyError",
    "did_you_mean",
]


class GraphoptError(Exception):
    """Base of every error that graphopt raises on purpose."""


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


def did_you_mean(name: str, known: Iterable[str], limit: int = 5) -> str:
    """A sentence with the names closest to ``name``, or an empty string where none is close."""
    choices = list(known)
    near = difflib.get_close_matches(name, choices, n=limit, cutoff=0.5)
    if not near:
        near = [choice for choice in choices if name.lower() in choice.lower()][:limit]
    return f"did you mean {', '.join(repr(choice) for choice in near)}?" if near else ""
