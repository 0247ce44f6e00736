"""Whether what a step reads from its model and optimizer may have been replaced since the last call.

The parameters that an optimizer holds: one that is replaced in the model alone is not trained any more.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable

import torch
from torch import nn

from graphopt import _torch
from graphopt.errors import GraphoptError

__all__ = ["ForeignGradients", "HeldParameters", "optimizer_version"]


def optimizer_version(optimizer: torch.optim.Optimizer) -> Hashable:
    """A key that is another one after every assignment to the optimizer's state; None for state without versions.

    Assignments are noticed, not writes to tensors. Two equal keys mean that each piece of state is the same object.
    """
    state = optimizer.state
    pieces = list(state.values())
    if not all(isinstance(piece, dict) for piece in pieces):
        return None
    return id(state), _torch.dict_version(state), *map(_torch.dict_version, pieces)


class ForeignGradients:
    """Refuses gradients that wait in ``.grad``, which a whole step would leave unread.

    Args:
        model: whose parameters are looked at.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._changes = -1
        self._parameters: list[nn.Parameter] = []

    def refuse(self, changes: int) -> None:
        """Raise for a parameter with a gradient.

        Args:
            changes: how often the model was found changed so far; its parameters are looked up anew at another number.

        Raises:
            GraphoptError: with the parameter's name.
        """
        if changes == self._changes and not any(parameter.grad is not None for parameter in self._parameters):
            return
        named = dict(self._model.named_parameters())
        self._parameters, self._changes = list(named.values()), changes
        for name, parameter in named.items():
            if parameter.grad is not None:
                raise GraphoptError(
                    f"{name}.grad is set from outside of this step, and would be ignored: the program holds its own "
                    "gradients; call optimizer.zero_grad() once before the first step"
                )


class HeldParameters:
    """Notes which parameters an optimizer holds, by their names in the model.

    Args:
        model: that is trained.
        optimizer: over its parameters.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        held = self._held()
        self._known = {name: weakref.ref(p) for name, p in model.named_parameters() if id(p) in held}

    def check(self) -> None:
        """Look at them again.

        Raises:
            GraphoptError: where the model has another parameter under a name, and the optimizer has not.
        """
        held: set[int] = set()
        for name, parameter in self._model.named_parameters():
            known = self._known.get(name)
            if known is None or known() is parameter:
                continue
            held = held or self._held()
            if id(parameter) not in held:
                raise GraphoptError(
                    f"{name} is another parameter than the one that the optimizer holds, which eager mode would go on "
                    "updating: was it replaced, by load_state_dict(assign=True) or a new nn.Parameter?\n  what to do: "
                    "make the optimizer and the step anew from model.parameters(), or copy values into the parameter "
                    "that was there"
                )
            self._known[name] = weakref.ref(parameter)

    def _held(self) -> set[int]:
        return {id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]}
