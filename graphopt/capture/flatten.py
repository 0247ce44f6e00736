"""Nested arguments and results, split into tensors and everything else."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch

from graphopt import _torch
from graphopt.capture.fingerprint import by_value

__all__ = ["Structure", "flatten", "flatten_call"]


@dataclasses.dataclass(frozen=True, eq=False)
class Structure:
    """The shape of a nested value whose tensors have been taken out.

    ``leaves`` holds each leaf that is not a tensor, ``None`` marking a tensor's place in ``is_tensor``; ``paths`` names
    every tensor (``args[0]``, ``batch['mask']``).
    """

    spec: Any
    leaves: tuple[Any, ...]
    is_tensor: tuple[bool, ...]
    paths: tuple[str, ...]

    def restore(self, tensors: Any) -> Any:
        """The nested value with ``tensors`` (any iterable, in order) put back."""
        supply = iter(tensors)
        leaves = [next(supply) if t else leaf for leaf, t in zip(self.leaves, self.is_tensor, strict=True)]
        return _torch.pytree.tree_unflatten(leaves, self.spec)

    @property
    def is_alone(self) -> bool:
        """Whether the value is one tensor, with nothing around it."""
        return bool(self.spec == _ALONE) and self.is_tensor == (True,)

    @functools.cached_property
    def key(self) -> tuple[Any, ...]:
        """What must be equal for two values to have the same structure and the same constants."""
        constants = tuple(
            by_value(leaf) for leaf, tensor in zip(self.leaves, self.is_tensor, strict=True) if not tensor
        )
        return str(self.spec), self.is_tensor, constants


_ALONE = _torch.pytree.tree_flatten(0)[1]
_OF_TENSORS: dict[tuple[int, tuple[str, ...]], Structure] = {}
"""The structures of calls that are given tensors alone, by the number of positional ones and the keywords."""


def flatten_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[torch.Tensor], Structure]:
    """The same as ``flatten`` for the arguments of a call, without paths; at once where all of them are tensors."""
    tensors = [*args, *kwargs.values()]
    if type(kwargs) is not dict or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        return flatten((args, kwargs), paths=False)
    known = len(args), tuple(kwargs)
    if known not in _OF_TENSORS:
        _OF_TENSORS[known] = flatten((args, kwargs), paths=False)[1]
    return tensors, _OF_TENSORS[known]


def flatten(value: Any, *, paths: bool = True) -> tuple[list[torch.Tensor], Structure]:
    """The tensors in ``value`` and its structure. Dataclasses met for the first time are registered with torch.

    Args:
        value: any nesting of tuples, lists, dicts and dataclasses.
        paths: also find out what each tensor is called; slower.
    """
    leaves, spec = _torch.pytree.tree_flatten(value)
    unregistered = {type(leaf) for leaf in leaves if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)}
    if unregistered:
        for cls in unregistered:
            torch.export.register_dataclass(cls)
        return flatten(value, paths=paths)
    found: tuple[str, ...] = ()
    if paths:
        places, _ = _torch.pytree.tree_flatten_with_path(value)
        found = tuple(_torch.pytree.keystr(place) for place, leaf in places if isinstance(leaf, torch.Tensor))
    is_tensor = tuple(isinstance(leaf, torch.Tensor) for leaf in leaves)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)], Structure(
        spec=spec,
        leaves=tuple(None if tensor else leaf for leaf, tensor in zip(leaves, is_tensor, strict=True)),
        is_tensor=is_tensor,
        paths=found,
    )
