"""The op that starts an all-to-all of equal parts: ``all_to_all_single``."""

from __future__ import annotations

import torch

from graphopt import _torch
from graphopt.ir.ops.define import define
from graphopt.ir.ops.groups import find_group
from graphopt.ir.ops.point_to_point import goes_point_to_point, start_exchange

__all__ = ["all_to_all_single"]


def _all_to_all(input: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
    group, input = find_group(group_name), input.contiguous()
    if not goes_point_to_point(input, group):
        sizes = [len(input) // group_size] * group_size
        found: torch.Tensor = _torch.all_to_all_single(input, sizes, sizes, group_name)
        return found
    result = torch.empty_like(input)
    outgoing, incoming = input.chunk(group_size), result.chunk(group_size)
    incoming[group.rank].copy_(outgoing[group.rank])
    start_exchange(outgoing, incoming, group, result)
    return result


def _result(input: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
    """Room for what comes; what an example run gives too."""
    del group_size, group_name
    return torch.empty_like(input, memory_format=torch.contiguous_format)


all_to_all_single = define(
    "all_to_all_single(Tensor input, int group_size, str group_name) -> Tensor", _all_to_all, _result
)
"""``all_to_all_single(Tensor input, int group_size, str group_name) -> Tensor``: start to exchange parts.

Of ``group_size`` equal parts of dimension 0, part ``i`` goes to rank ``i``; part ``i`` of the result is what came from
rank ``i``, once ``wait_tensor`` has returned it. Until then the input must not be written to.
"""
