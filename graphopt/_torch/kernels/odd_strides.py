"""Strides of dimensions of size 1, which say nothing: kernels give a result those of a new tensor, or an argument's.

A convolution takes another way for a tensor whose strides look like channels last, with other temporaries. So they
matter to a program, whose tensors without data have to have those that kernels make.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from graphopt._torch.capture.fake_tensors import device_kind

__all__ = ["lays_out_anew", "odd_strides", "with_new_strides"]

_APART = 64
"""A stride that no new tensor of a few elements has."""


def odd_strides(tensor: torch.Tensor) -> list[int]:
    """The dimensions of size 1 whose strides are not those of a new tensor; none where sizes vary.

    >>> odd_strides(torch.empty(2, 1, 1, 3).permute(0, 3, 1, 2))
    [3, 2]
    """
    odd: list[int] = []
    fresh = 1
    for place in range(tensor.dim() - 1, -1, -1):
        size: Any = tensor.shape[place]
        if not isinstance(size, int):
            return []
        if size == 1 and tensor.stride(place) != fresh:
            odd.append(place)
        fresh = fresh * size
    return odd


def lays_out_anew(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the result on a CPU has the strides of a new tensor, though those of an argument are odd.

    Most pointwise kernels do so where arguments are of one shape and contiguous. A few elements tell, but for ops that
    draw random numbers, which all do.

    Args:
        op: a pointwise op.
        args: of the call, tensors without data among them.
        kwargs: of the call.
    """
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if not any(map(odd_strides, tensors)):
        return False
    if any(
        each.shape != tensors[0].shape or not each.is_contiguous() or device_kind(each) != "cpu" for each in tensors
    ):
        return False
    if torch.Tag.nondeterministic_seeded in op.tags:
        return True
    places = [odd_strides(tensor) for tensor in tensors]
    with _disable_current_modes():
        few = iter([_few(tensor, odd) for tensor, odd in zip(tensors, places, strict=True)])
        given = pytree.tree_map_only(torch.Tensor, lambda _: next(few), (args, kwargs))
        result = op(*given[0], **given[1])
    return isinstance(result, torch.Tensor) and not odd_strides(result)


def _few(tensor: torch.Tensor, odd: list[int]) -> torch.Tensor:
    """Ones, at most two along each dimension, with odd strides where the tensor has them."""
    few = torch.ones([min(size, 2) for size in tensor.shape], dtype=tensor.dtype)
    return few.as_strided(few.shape, [_APART if place in odd else stride for place, stride in enumerate(few.stride())])


def with_new_strides(result: Any) -> Any:
    """A result, or what is in it, with the strides of a new tensor."""
    if isinstance(result, torch.Tensor):
        return torch.empty_like(result, memory_format=torch.contiguous_format)
    return pytree.tree_map_only(torch.Tensor, with_new_strides, result)
