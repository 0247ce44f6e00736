"""What a loss function returns: the loss, alone or with more that a whole step hands out (metrics, predictions)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from graphopt import _torch
from graphopt.capture.flatten import flatten

__all__ = ["change_loss", "copy_others", "detach_all", "loss_in"]


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
