"""Nested arguments and results, split into tensors and everything else.

What a loss function returns: the loss, alone or with more that a whole step hands out (metrics, predictions).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from graphopt import _torch
from graphopt.capture.call.tensor_classes import adds_nothing, class_of, data_of
from graphopt.capture.guards.fingerprint import by_value

__all__ = ["Results", "Structure", "change_loss", "copy_others", "detach_all", "flatten", "flatten_call", "loss_in"]


@dataclasses.dataclass(frozen=True, eq=False)
class Structure:
    """The shape of a nested value whose tensors have been taken out.

    ``leaves`` holds each leaf that is not a tensor, ``None`` marking a tensor's place in ``is_tensor``; ``paths`` names
    every tensor (``args[0]``, ``batch['mask']``). ``classes`` holds the class of each tensor that has one of its own,
    which adds nothing to how torch computes; plain tensors with their data have been taken out.
    """

    spec: Any
    leaves: tuple[Any, ...]
    is_tensor: tuple[bool, ...]
    paths: tuple[str, ...]
    classes: tuple[type[torch.Tensor] | None, ...] = ()

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
        return str(self.spec), self.is_tensor, constants, self.classes


class Results(Structure):
    """The shape of a result, whose tensors get the classes that they have in eager mode."""

    def restore(self, tensors: Any) -> Any:
        """The result with ``tensors`` put back."""
        classes = itertools.chain(self.classes, itertools.repeat(None))
        given = zip(tensors, classes, strict=False)
        return super().restore(t if cls is None else t.as_subclass(cls) for t, cls in given)


_ALONE = _torch.pytree.tree_flatten(0)[1]
_OF_TENSORS: dict[tuple[int, tuple[str, ...]], Structure] = {}
"""The structures of calls that are given tensors alone, by the number of positional ones and the keywords."""


def flatten_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[torch.Tensor], Structure]:
    """The same as ``flatten`` for the arguments of a call, without paths; at once where all of them are tensors."""
    tensors = [*args, *kwargs.values()]
    if type(kwargs) is not dict or not all(map(_is_plain, tensors)):
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
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    classes: tuple[type[torch.Tensor] | None, ...] = ()
    if not all(map(_is_plain, tensors)):
        classes = tuple(map(class_of, tensors))
        data = {id(tensor): data_of(tensor) for tensor, cls in zip(tensors, classes, strict=True) if cls is not None}
        tensors = [data.get(id(tensor), tensor) for tensor in tensors]
    return tensors, Structure(
        spec=spec,
        leaves=tuple(None if tensor else leaf for leaf, tensor in zip(leaves, is_tensor, strict=True)),
        is_tensor=is_tensor,
        paths=found,
        classes=classes,
    )


def _is_plain(value: object) -> bool:
    """Whether a value is a tensor that is taken out as it is."""
    return type(value) is torch.Tensor or (isinstance(value, torch.Tensor) and not adds_nothing(type(value)))


def loss_in(result: Any) -> torch.Tensor | None:
    """The loss in a result: the tensor itself, ``"loss"`` of a mapping, ``.loss``, or the first of a tuple or list.

    Returns:
        None where none of these is a tensor.
    """
    found = result
    if isinstance(result, Mapping):
        found = result.get("loss")
    elif not isinstance(result, torch.Tensor):
        first = result[0] if isinstance(result, (tuple, list)) and result else None
        found = getattr(result, "loss", first)
    return found if isinstance(found, torch.Tensor) else None


def change_loss(result: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The result with another loss in the place of its own; ``result`` has one."""
    leaves, spec = _torch.pytree.tree_flatten(result)
    place = _place(result, leaves)
    return _torch.pytree.tree_unflatten([*leaves[:place], change(leaves[place]), *leaves[place + 1 :]], spec)


def copy_others(result: Any) -> Any:
    """The result with everything beside the loss as copies without gradients, which share no memory with anything."""
    leaves, spec = _torch.pytree.tree_flatten(result)
    place = _place(result, leaves)
    copies = [
        leaf.detach().clone() if isinstance(leaf, torch.Tensor) and other != place else leaf
        for other, leaf in enumerate(leaves)
    ]
    return _torch.pytree.tree_unflatten(copies, spec)


def _place(result: Any, leaves: Sequence[Any]) -> int:
    """Where the loss is among the leaves of a result; -1 where there is none."""
    loss = loss_in(result)
    return next((place for place, leaf in enumerate(leaves) if loss is not None and leaf is loss), -1)


def detach_all(result: Any) -> Any:
    """The result without gradients."""
    tensors, structure = flatten(result, paths=False)
    return structure.restore(tensor.detach() for tensor in tensors)
