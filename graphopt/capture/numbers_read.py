"""Tensors whose numbers Python reads while a model is captured, beside those of the call: ``factor.item()``.

A program has such numbers as constants. They are part of what it is for, as numbers in attributes and variables are.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable

import torch

from graphopt import _torch

__all__ = ["READS", "NumbersRead"]

READS = frozenset((
    "__array__", "__bool__", "__complex__", "__contains__", "__float__", "__format__", "__index__", "__int__",
    "__repr__", "item", "numpy", "tolist",
))  # fmt: skip
"""Methods of tensors that give numbers to Python."""

_MOST = 1_024
"""Numbers that are compared one by one; of larger tensors, and those on devices, it is how often ops have written."""


class NumbersRead:
    """A tensor whose numbers were read, which it does not keep alive.

    Args:
        tensor: with data.
        where: the line that read them, for people.
    """

    def __init__(self, tensor: torch.Tensor, where: str) -> None:
        self._tensor = weakref.ref(tensor)
        self.where = where

    @property
    def tensor(self) -> torch.Tensor | None:
        """The tensor; None once it is gone."""
        return self._tensor()

    def now(self) -> Hashable:
        """What is equal as long as the numbers are; None once the tensor is gone."""
        tensor = self.tensor
        if tensor is None:
            return None
        with torch.no_grad(), _torch.without_dispatch_modes():
            if tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.numel() <= _MOST:
                return repr(tensor.tolist())  # so that NaN equals itself, and zeros differ by sign
            place = tensor.data_ptr() if tensor.layout is torch.strided else 0
            return place, None if tensor.is_inference() else tensor._version
