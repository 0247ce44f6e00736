"""Why a model could not be traced: the error for its author, with the line of the model and what to do."""

from __future__ import annotations

import re
from traceback import walk_tb

from torch import nn
from torch.nn.utils import rnn

from graphopt import _torch
from graphopt.capture.call.assigned_buffers import IN_PARTS
from graphopt.capture.call.source_lines import user_frame
from graphopt.capture.dynamo.graph_part import title_of
from graphopt.errors import GraphBreakError, quoted

__all__ = ["PACKED", "depends_on_data", "explain", "first_line"]

_NEEDS_NUMBERS = re.compile(
    r"numpy|\bnp\.|tolist|\.item\(|data.?ptr|data pointer|storage|\bprint\(|\bopen\(", re.IGNORECASE
)
"""What an error, or the line that raised it, says where Python takes the numbers of tensors."""


PACKED = (
    "a packed sequence has as many rows at each step as the values of its lengths say",
    "give the recurrent layer the padded batch, and mask what it returns behind the end of each sequence",
)
"""What is wrong, and what to do."""


def depends_on_data(error: Exception) -> bool:
    """Whether a trace failed for a value that it does not have."""
    return isinstance(error, _torch.GuardOnDataDependentSymNode) or "data-dependent" in str(error)


def first_line(error: Exception) -> str:
    """The first line of an error, with its type where that is Python's or the user's, and says more than torch's."""
    torchs = type(error) is RuntimeError or type(error).__module__.startswith("torch")
    return (str(error).strip() if torchs and str(error).strip() else quoted(error)).splitlines()[0]


def explain(error: Exception, model: nn.Module) -> GraphBreakError:
    """The error for one of torch's, or of Python's, that ended a trace."""
    where = user_frame(error.__traceback__)
    text = first_line(error)
    if "saved tensor hooks" in text:
        text = "forward uses a transform of torch.func that computes gradients (grad, vjp, jacrev, hessian)"
    name = title_of(model)
    if depends_on_data(error):
        advice = (
            "control flow depends on a tensor's values, and a program has one path: use torch.where, "
            "move the decision outside of the model, or make it depend on shapes"
        )
        if text.startswith("Could not "):  # and an expression of names that only torch knows
            text = (
                "Python needs the value of a tensor here, for a decision or as a number (.item(), int(...), float(...))"
            )
        if any("torch/distributions" in frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)):
            advice = "checks of its arguments choose between values here: give validate_args=False"
    elif _NEEDS_NUMBERS.search(f"{text} {where.rpartition(': ')[2]}"):
        advice = (
            "the model must run on tensors without data (torch.export, non-strict): keep NumPy, .tolist(), printing of "
            "values and file access out of forward"
        )
    else:
        advice = (
            "the line fails where torch.export (non-strict) runs it on tensors without data: change it, or move it out "
            "of the model"
        )
    if "transform of torch.func" in text:
        advice = "take gradients by torch.autograd.grad(outputs, inputs, create_graph=True), which a program has too"
    if _is_packed(error):
        text, advice = PACKED
    explained = GraphBreakError(
        f"{name} cannot be captured: {text}\n  where: {where}\n  what to do: {advice}{IN_PARTS}"
    )
    explained.of_trace, explained.of_values = True, depends_on_data(error)
    return explained


def _is_packed(error: Exception) -> bool:
    """Whether a trace failed where a packed sequence is made, or a recurrent layer takes one."""
    for frame, _ in walk_tb(error.__traceback__):
        file, known = frame.f_code.co_filename, frame.f_locals
        if file == rnn.__file__ or (file == nn.modules.rnn.__file__ and known.get("batch_sizes") is not None):
            return True
    return False
