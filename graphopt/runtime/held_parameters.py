"""The parameters that an optimizer holds: one that is replaced in the model alone is not trained any more."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from graphopt.errors import GraphoptError

__all__ = ["HeldParameters"]


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
