"""Whether a captured program fits a call: everything that a capture depends on, as one key."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from graphopt.capture.fingerprint import by_value, global_flags
from graphopt.capture.flatten import Structure
from graphopt.capture.tensor_classes import has_rules
from graphopt.capture.tensors_met import attributes_set
from graphopt.ir.autocast import autocast_state

__all__ = ["call_parts", "part_signature", "signature"]


def signature(
    model_key: Hashable, structure: Structure, tensors: list[torch.Tensor], *, sizes: bool = True
) -> Hashable:
    """Everything about a call that a capture depends on; equal signatures can share one program.

    Args:
        model_key: of the model (``ModelFingerprint``).
        structure: of the arguments, with the values of those that are not tensors.
        tensors: the tensors among the arguments.
        sizes: whether sizes count (not where they may vary).
    """
    return (
        structure.key,
        *call_parts(tensors, sizes=sizes),
        model_key,
        global_flags(),
        autocast_state(),
    )


def call_parts(tensors: list[torch.Tensor], *, sizes: bool) -> tuple[tuple[Hashable, ...], Hashable]:
    """What a capture depends on of the tensors of a call: of each its metadata, and which of them share memory."""
    return tuple(_metadata(tensor, sizes) for tensor in tensors), _sharing(tensors)


def part_signature(arguments: tuple[Any, ...]) -> tuple[Hashable, Hashable]:
    """What a part of a model depends on beside what Dynamo looks at: torch's settings, and memory that is shared."""
    tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
    return _sharing(tensors), global_flags()


def _metadata(tensor: torch.Tensor, sizes: bool) -> Hashable:
    lazily = tensor.is_conj(), tensor.is_neg()  # views that stand for the conjugate, or the negative, of their elements
    known = tensor.dtype, tensor.device, tensor.requires_grad, type(tensor), lazily, _attributes(tensor)
    if tensor.layout is not torch.strided:
        return *known, tensor.layout, tuple(tensor.shape)
    if sizes:
        return *known, tuple(tensor.shape), tensor.stride()
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))
    return *known, tensor.dim(), tuple(order), tensor.is_contiguous()


def _attributes(tensor: torch.Tensor) -> Hashable:
    """What Python has set on a tensor, but for names of libraries' own."""
    own = attributes_set(tensor)
    return by_value(own) if own else ()


def _sharing(tensors: list[torch.Tensor]) -> Hashable:
    """Which arguments are the same tensor, or lie in the same memory."""
    if len(tensors) < 2:
        return ()
    memory: dict[int, int] = {}
    places = [memory.setdefault(_memory(tensor), index) for index, tensor in enumerate(tensors)]
    if len(memory) == len(tensors):
        return ()
    same: dict[int, int] = {}
    return tuple(places), tuple(same.setdefault(id(tensor), index) for index, tensor in enumerate(tensors))


def _memory(tensor: torch.Tensor) -> int:
    """Where a tensor lies; its own number where it takes no memory, or is made of others."""
    made = tensor.layout is not torch.strided or has_rules(type(tensor))
    place = 0 if made or not tensor.numel() else tensor.untyped_storage().data_ptr()
    return place or -id(tensor)
