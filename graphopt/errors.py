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
    """Base of every error that graphopt raises on purpose; catch it to catch them all.

    It is raised itself where a value or a name is wrong. What to do: the message names the value and what it may be.

    Example:
        >>> graphopt.capture(model, (x,)).to("postscript")
        Traceback (most recent call last):
            ...
        graphopt.errors.GraphoptError: ...
    """


class CaptureError(GraphoptError):
    """A model, loss or optimizer cannot be turned into one program; the message says where and what to do.

    Raised by ``capture``, and at the first call of what ``optimize`` and ``optimize_step`` make. What to do: change the
    line that the message names, or keep that piece out of the model.

    Example:
        >>> graphopt.capture(nn.ReLU(), (x,))
        Traceback (most recent call last):
            ...
        graphopt.errors.CaptureError: ...
    """


class GraphBreakError(CaptureError):
    """A model is not one graph: its Python looks at the values of tensors, or does something between tensors.

    Raised by ``capture`` and by a whole step. What to do: compute with tensors in place of ``if`` and ``.item()``, or
    use ``graphopt.optimize``, which captures such a model in parts.

    Example:
        >>> class Branching(nn.Module):
        ...     def forward(self, x):
        ...         return x + 1 if x.sum() > 0 else x - 1
        >>> graphopt.capture(Branching(), (x,))
        Traceback (most recent call last):
            ...
        graphopt.errors.GraphBreakError: ...
    """


class PipelineError(GraphoptError):
    """The list of passes is wrong; all problems are reported at once.

    Raised before anything is captured. What to do: correct each line of the message; it names the passes at fault.

    Example:
        >>> graphopt.Pipeline("recompute-evenly{number=2},recompute-evenly{number=3}")
        Traceback (most recent call last):
            ...
        graphopt.errors.PipelineError: ...
    """


class PassError(GraphoptError):
    """A pass failed; the original exception is the cause (``__cause__``), and a note shows the place in the pipeline.

    What to do: change the pass's options as the message says. For a pass of your own, set ``GRAPHOPT_DUMP`` to a
    folder: it then holds the program and a script that runs the pass on it again.

    Example:
        >>> @dataclass(frozen=True)
        ... class Broken(graphopt.Pass):
        ...     name, stage, numerics = "broken", "joint", "bitwise"
        ...     def apply(self, program):
        ...         return graphopt.Changed({"halves": 1 // 0})
        >>> graphopt.optimize(model, [Broken()], example_inputs=(x,))
        Traceback (most recent call last):
            ...
        graphopt.errors.PassError: ...
    """


class VerifyError(GraphoptError):
    """A program breaks an invariant; the message names the rule and the pass that broke it.

    Raised behind each pass. What to do: where the pass is yours, insert calls with ``Program.insert`` alone, which
    keeps the rules; otherwise leave the pass out, and report it with the run directory that ``GRAPHOPT_DUMP`` names.

    Example:
        >>> from graphopt.ir.verify import verify
        >>> program = graphopt.capture(model, (x,), loss=loss)
        >>> for node in program.phase_nodes(graphopt.Phase.BACKWARD):
        ...     del node.meta["val"]
        >>> verify(program)
        Traceback (most recent call last):
            ...
        graphopt.errors.VerifyError: ...
    """


class TorchVersionError(GraphoptError, ImportError):
    """The installed torch lacks something that graphopt needs; the message says what, what for, and what to install.

    It is an ``ImportError`` as well: most of what graphopt needs is looked for when it is imported.

    Example:
        >>> from graphopt._torch.private_names import Feature, require
        >>> require(Feature("printing in colours", {"torch._C": "_colours"}))
        Traceback (most recent call last):
            ...
        graphopt.errors.TorchVersionError: ...
    """


class RankError(GraphoptError, RuntimeError):
    """An exchange failed because of other ranks; the message says which, and where each was last seen.

    The original error is its cause. It is a ``RuntimeError`` as well, as those of torch.distributed are.

    Args:
        message: for people.
        ranks: the ranks at fault, numbered as in the default process group; none where no rank could be named.

    Example:
        >>> error = graphopt.RankError("rank 1 gives no sign of life any more", ranks=(1,))
        >>> error.ranks
        (1,)
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
