"""Calls that are alike but smaller: how much a call takes that is too large to be run by itself.

One size of its largest tensor is made smaller wherever it stands in the call. What two such calls take gives the power
of this size with which the bytes grow; the call is taken to go on growing so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphopt import _torch
from graphopt.analysis.costs.isolated_call import Fill, call_bytes, call_tensors, real_call, sizes
from graphopt.ir.node import value_of
from graphopt.ir.ops.values import storage_bytes, tensors_of

__all__ = ["SmallerCall", "extrapolated", "smaller_calls"]


@dataclass(frozen=True, slots=True)
class SmallerCall:
    """A call in which one size is smaller.

    Attributes:
        node: the call that it stands for.
        old: the size in that call.
        new: the size here, from 1 to ``old - 1``.
        nbytes: bytes that its arguments and results take.
    """

    node: fx.Node
    old: int
    new: int
    nbytes: int

    def prepare(self, fill: Fill) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """The op with real arguments; it raises ValueError for results that are not the call's with the smaller size.

        Args:
            fill: makes the data of each tensor.
        """
        target, args, kwargs = real_call(self.node)
        made = {
            source: _torch.pytree.tree_map(lambda value: self._real(value, fill), value_of(source))
            for source in self.node.all_input_nodes
        }
        args, kwargs = _torch.map_aggregate((args, kwargs), lambda a: made[a] if isinstance(a, fx.Node) else a)
        args = tuple(self._shape_argument(argument) for argument in args)
        return self._checked(target), args, kwargs

    def _real(self, value: Any, fill: Fill) -> Any:
        if not isinstance(value, torch.Tensor):
            return _torch.size_hint(value) if isinstance(value, torch.SymInt) else value
        shape, strides, count = _compact(value, self.old, self.new)
        return fill(count, value.dtype, value.device).as_strided(shape, strides)

    def _shape_argument(self, argument: Any) -> Any:
        """Lists of numbers are shapes."""
        if isinstance(argument, (list, tuple)) and argument and all(type(item) is int for item in argument):
            return [self.new if item == self.old else item for item in argument]
        return argument

    def _checked(self, target: Any) -> Any:
        expected = [_shape(tensor, self.old, self.new) for tensor in tensors_of(value_of(self.node))]

        def call(*args: Any, **kwargs: Any) -> Any:
            result = target(*args, **kwargs)
            found = [tuple(tensor.shape) for tensor in tensors_of(result)]
            if result is not None and found != expected:
                raise ValueError(f"with {self.new} for {self.old} it returns {found}, not {expected}")
            return result

        return call


def smaller_calls(node: fx.Node, limit: int) -> Iterator[tuple[SmallerCall, SmallerCall]]:
    """Pairs of calls that stand for a larger one, the second half as large in the size that differs; likeliest first.

    Args:
        node: a call.
        limit: bytes that the arguments and results of each may take at most.
    """
    largest = max(call_tensors(node), key=storage_bytes, default=None)
    for old in dict.fromkeys(sizes(largest.shape) if largest is not None else ()):
        new = old - 1
        while new >= 2 and _bytes(node, old, new) > limit:
            new //= 2
        if new >= 2:
            first, second = (SmallerCall(node, old, size, _bytes(node, old, size)) for size in (new, new // 2))
            yield first, second


def extrapolated(call: SmallerCall, half: SmallerCall, temporary: int, of_half: int) -> int:
    """Bytes that the whole call takes, by what two smaller ones took.

    They grow with the power of the size that the two calls show, but by no less than the size or the bytes of the call
    do, nor by more than the square of it: what does not grow is counted several times rather than missed.
    """
    power = math.log(temporary / of_half) / math.log(call.new / half.new) if temporary > of_half > 0 else 1.0
    by_size = math.pow(call.old / call.new, min(max(power, 1.0), 2.0))
    return math.ceil(temporary * max(by_size, call_bytes(call.node) / max(call.nbytes, 1)))


def _bytes(node: fx.Node, old: int, new: int) -> int:
    return sum(_compact(tensor, old, new)[2] * tensor.element_size() for tensor in call_tensors(node))


def _shape(tensor: torch.Tensor, old: int, new: int) -> tuple[int, ...]:
    return tuple(new if size == old else size for size in sizes(tensor.shape))


def _compact(tensor: torch.Tensor, old: int, new: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """The smaller shape, strides without gaps in the order of the tensor's, and how many elements lie behind them."""
    shape, before = _shape(tensor, old, new), sizes(tensor.stride())
    strides, count = [0] * len(shape), 1
    for axis in sorted(range(len(shape)), key=lambda axis: (before[axis], -axis)):
        if before[axis]:
            strides[axis], count = count, count * shape[axis]
    return shape, tuple(strides), count if math.prod(shape) else 0
