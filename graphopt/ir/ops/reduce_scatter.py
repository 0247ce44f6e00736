"""The op that starts a reduce-scatter of CPU tensors: ``reduce_scatter_sum``.

It is a ring over gloo (``ring``): gloo has no reduce-scatter, and torch's stand-in for it sends as much as an
all-reduce. What comes is added to what is sent on, so that nothing but the result takes memory.
"""

from __future__ import annotations

import torch

from graphopt import _torch
from graphopt.ir.ops.define import define
from graphopt.ir.ops.groups import find_group
from graphopt.ir.ops.point_to_point import goes_point_to_point
from graphopt.ir.ops.ring import start_reduce_scatter

__all__ = ["reduce_scatter_sum"]


def _reduce_scatter(input: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
    group = find_group(group_name)
    if not goes_point_to_point(input, group):
        found: torch.Tensor = _torch.reduce_scatter_tensor(input, "sum", group_size, group_name)
        return found
    result = _result(input, group_size, group_name)
    start_reduce_scatter(input, result, group)
    return result


def _result(input: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
    """Room for what comes; what an example run gives too."""
    del group_name
    return input.new_empty((input.shape[0] // group_size, *input.shape[1:]))


reduce_scatter_sum = define(
    "reduce_scatter_sum(Tensor(a!) input, int group_size, str group_name) -> Tensor", _reduce_scatter, _result
)
"""``reduce_scatter_sum(Tensor(a!) input, int group_size, str group_name) -> Tensor``: start to sum parts over ranks.

``input`` is contiguous; of ``group_size`` equal parts of its dimension 0, rank ``i`` gets the sum of parts ``i`` of all
ranks, once ``wait_tensor`` has returned the result. Until then the input must be left alone, and afterwards it holds
partial sums. Sums begin with the part of rank ``i + 1`` and go around the ring, rounded to the dtype at each rank.
"""
