"""This rank's parts of distributed tensors, put into a model, and its optimizer, in the place of these.

A program's parameters are plain tensors. While a call is looked at and captured, a model whose parameters are
``DTensor`` objects (``fully_shard``, ``parallelize_module``) has parameters that share the memory of this rank's parts;
an optimizer of a whole step holds these too, and state of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from graphopt import _torch

__all__ = ["DistributedTensor", "LocalParameters"]


class DistributedTensor(Protocol):
    """A parameter or buffer of a model that is a ``DTensor``."""

    @property
    def path(self) -> str:
        """Its name in the model."""
        ...

    @property
    def places(self) -> Sequence[tuple[nn.Module, str]]:
        """The modules that have it, each with its name there."""
        ...

    @property
    def tensor(self) -> Any:
        """The user's ``DTensor``."""
        ...

    @property
    def local(self) -> torch.Tensor:
        """This rank's part of it, in its memory."""
        ...

    def distributed(self, local: torch.Tensor) -> Any:
        """A ``DTensor`` like the user's of another tensor of the part's shape."""
        ...


class LocalParameters:
    """What stands in a model, and in its optimizer, for distributed tensors.

    Args:
        tensors: all of the model's.
    """

    def __init__(self, tensors: Sequence[DistributedTensor]) -> None:
        self._tensors = tensors
        self._parts: dict[DistributedTensor, torch.Tensor] = {}

    @contextmanager
    def in_place(self, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
        """Meanwhile, the model has this rank's parts.

        Args:
            optimizer: over its parameters, which then holds the parts too.
        """
        with ExitStack() as stack:
            given = {each: each.tensor for each in self._tensors}
            stack.callback(_put, given)
            _put({each: self._part(each) for each in self._tensors})
            if optimizer is not None:
                stack.callback(self._whole_state, optimizer, self._parts_of_state(optimizer))
            yield

    def part(self, tensor: DistributedTensor) -> torch.Tensor:
        """What stands in the model for a tensor, or stood there last."""
        return self._parts[tensor]

    def _part(self, tensor: DistributedTensor) -> torch.Tensor:
        """This rank's part as a parameter, the same one as long as the user's tensor has the same memory."""
        given, local = tensor.tensor, tensor.local
        known = self._parts.get(tensor)
        if known is None or known.data_ptr() != local.data_ptr() or known.shape != local.shape:
            trained = isinstance(given, nn.Parameter)
            known = nn.Parameter(local, requires_grad=given.requires_grad) if trained else local
            self._parts[tensor] = known
        elif known.requires_grad != given.requires_grad:
            known.requires_grad_(given.requires_grad)
        return known

    def _parts_of_state(self, optimizer: torch.optim.Optimizer) -> dict[int, Any]:
        """Give an optimizer parts in place of the user's tensors; returns the latter by what stands for them."""
        parts: dict[int, torch.Tensor] = {id(each.tensor): part for each, part in self._parts.items()}
        given: dict[int, Any] = {}

        def part_of(value: Any) -> Any:
            found = parts.get(id(value))
            if found is None:
                found = _torch.local_part(value)
            if found is not None:
                given[id(found)] = value
            return value if found is None else found

        for group in optimizer.param_groups:
            group["params"][:] = [part_of(parameter) for parameter in group["params"]]
        _replace(
            optimizer.state,
            lambda parameter, state: (
                part_of(parameter),
                {key: part_of(value) for key, value in state.items()} if isinstance(state, dict) else state,
            ),
        )
        return given

    def _whole_state(self, optimizer: torch.optim.Optimizer, given: Mapping[int, Any]) -> None:
        """Give an optimizer the user's tensors again, and distributed ones for state that is new."""
        owners = {id(part): each for each, part in self._parts.items()}

        def whole(value: Any, owner: DistributedTensor | None) -> Any:
            if id(value) in given or owner is None or not isinstance(value, torch.Tensor):
                return given.get(id(value), value)
            same = value.shape == owner.local.shape and value.dim() > 0
            return owner.distributed(value) if same else value

        def restored(parameter: Any, state: Any) -> tuple[Any, Any]:
            owner = owners.get(id(parameter))
            if isinstance(state, dict):
                state = {key: whole(value, owner) for key, value in state.items()}
            return given.get(id(parameter), parameter), state

        for group in optimizer.param_groups:
            group["params"][:] = [given.get(id(parameter), parameter) for parameter in group["params"]]
        _replace(optimizer.state, restored)

    def connected(
        self,
        tensors: Sequence[torch.Tensor],
        placements: Mapping[str, Sequence[Any]] | None = None,
        without: Container[int] = (),
    ) -> list[torch.Tensor]:
        """Tensors of a call, with the user's own in place of parts, so that these get the gradients.

        Args:
            tensors: of a call.
            placements: by the name of a parameter those of its gradient, where they are not its own.
            without: the ids of parts whose tensors get no gradient, not even one of zeros.
        """
        users = {id(part): each for each, part in self._parts.items() if id(part) not in without}
        placed = placements or {}
        return [
            _torch.gradient_like(users[id(tensor)].tensor, placed.get(users[id(tensor)].path))
            if id(tensor) in users
            else tensor
            for tensor in tensors
        ]


def _put(tensors: Mapping[DistributedTensor, Any]) -> None:
    for each, tensor in tensors.items():
        for module, name in each.places:
            (module._parameters if name in module._parameters else module._buffers)[name] = tensor


def _replace(states: dict[Any, Any], change: Callable[[Any, Any], tuple[Any, Any]]) -> None:
    """Change keys and values of a dictionary, which stays the same one, in its order."""
    changed = [change(key, value) for key, value in states.items()]
    states.clear()
    states.update(changed)
