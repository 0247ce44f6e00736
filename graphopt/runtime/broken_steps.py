"""What a whole step that raises in the middle leaves behind, for a note on its error."""

from __future__ import annotations

from torch import fx

from graphopt.ir.node import Phase, info
from graphopt.rewriting.memory.named_plan import ACCUMULATION
from graphopt.runtime.ranks.places import reached

__all__ = ["UNCHANGED", "left_behind"]

UNCHANGED = "the update of this step had not begun: it has changed no parameter, no gradient and no optimizer state"

_ADDED = (
    "the update of this step had not begun, but gradients of this batch have been added to those that are accumulated: "
    "begin the accumulation anew"
)
_TORN = (
    "the update of this step {0} begun, so that parameters and the optimizer's state {1} of two steps: go on from a "
    "checkpoint"
)


def left_behind(error: BaseException, module: fx.GraphModule) -> str:
    """What is so behind a step's program that has raised.

    Args:
        error: as it left the program.
        module: of the program.
    """
    if error.__cause__ is not None and reached(error, module, Phase.UPDATE) is None:
        error = error.__cause__  # of a failed exchange, which another error names the rank of
    torn = reached(error, module, Phase.UPDATE)
    if torn is None:  # from code of a compiler's
        return _TORN.format("may have", "may be")
    if torn:
        return _TORN.format("had", "are")
    return _ADDED if reached(error, module, lambda node: info(node).origin == ACCUMULATION) else UNCHANGED
