"""What is around a whole step in the place of a loop: lines and modes that act on nothing any more, told or refused.

What a whole step that raises in the middle leaves behind, for a note on its error.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import fx, nn

from graphopt import _torch
from graphopt.errors import CaptureError, GraphoptError
from graphopt.ir.node import Phase, info
from graphopt.ir.ops.updates.opaque_update import is_updating
from graphopt.rewriting.memory.fit.named_plan import ACCUMULATION
from graphopt.runtime.ranks.places import reached

__all__ = ["UNCHANGED", "LoopLeftovers", "left_behind", "refuse_modes"]

logger = logging.getLogger(__name__)

_ADVICE = (
    "leave out loss.backward(), clip_grad_norm_ (the pass ClipGradients does it), optimizer.step(), zero_grad() and "
    "GradScaler (MixedPrecision scales); with graphopt.optimize in place of optimize_step the loop keeps them"
)


class LoopLeftovers:
    """Says once what differs from the loop that a whole step takes the place of.

    Args:
        optimizer: of the step; a call of its ``step`` that finds no gradient is told.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._trained = False
        self._said: set[str] = set()
        optimizer.register_step_pre_hook(self._before_optimizer)

    def before(self, model: nn.Module) -> None:
        """To be called before a step trains ``model``."""
        if mode := _torch.callers_modes()[1]:
            self._say(
                f"{mode} (a TorchDispatchMode) sees the ops of the program in this step, in place and into memory that "
                "is there already: what it changes of the ops that the model calls in eager mode is not changed here"
            )
        if not model.training:
            self._say(
                f"{type(model).__name__} is in eval mode, and this step trains it all the same, with dropout off and "
                "statistics frozen: call model.train() to train as usual, and step.evaluate(*batch) to validate"
            )

    def after(self, loss: torch.Tensor) -> None:
        """To be called with the loss that a step returns: its ``backward`` says that there is none."""
        self._trained = True
        loss.backward = _refuse_backward  # type: ignore[method-assign]

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        if self._trained and not is_updating(optimizer) and all(parameter.grad is None for parameter in parameters):
            self._say(f"optimizer.step() finds no gradients: the whole step has updated already; {_ADVICE}")

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            logger.warning("%s", text)


def _refuse_backward(*args: Any, **kwargs: Any) -> None:
    """What ``backward`` of a step's loss is."""
    raise GraphoptError(f"this loss comes from a whole step, which has run backward and the update already: {_ADVICE}")


def refuse_modes() -> None:
    """Refuse a step under a mode that sees the model's calls of torch in eager mode, and no call of a program.

    Raises:
        CaptureError: with the mode, and what to do.
    """
    functions, _ = _torch.callers_modes()
    if functions:
        raise CaptureError(
            f"{functions} (a TorchFunctionMode) is at work, which the calls of a whole step do not meet\n"
            "  what to do: leave it around the step, or use graphopt.optimize, whose models run in eager mode under it"
        )


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
