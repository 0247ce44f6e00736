"""The op that starts an all-gather: ``all_gather_into_tensor``.

It is torch's functional collective of this name, but for how gloo is called: from rank to rank, in pieces
(``point_to_point``), among more than two ranks around a ring (``ring``). Torch's own way to call gloo's gather goes by
the path for lists of tensors, on which torch 2.13 corrupts the heap where two gathers are under way at a time
(``malloc(): unaligned tcache chunk detected``). Other backends gather by the path for one tensor, which torch takes
where the result is given.
"""

from __future__ import annotations

import torch

from graphopt import _torch
from graphopt.ir.ops.define import define
from graphopt.ir.ops.groups import find_group
from graphopt.ir.ops.point_to_point import goes_point_to_point, start_exchange
from graphopt.ir.ops.ring import start_all_gather

__all__ = ["all_gather_into_tensor"]


def _all_gather(input: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
    group, input = find_group(group_name), input.contiguous()
    result = _result(input, group_size, group_name)
    if goes_point_to_point(input, group):
        incoming = result.chunk(group_size)
        incoming[group.rank].copy_(input)
        if group_size > 2:
            start_all_gather(result, group)
        else:
            start_exchange([input] * group_size, incoming, group, result)
    else:
        _torch.all_gather_into_tensor_out(input, group_size, group_name, out=result)
    return result


def _result(input: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
    """Room for what comes; what an example run gives too."""
    return input.new_empty((group_size * input.shape[0], *input.shape[1:]))


all_gather_into_tensor = define(
    "all_gather_into_tensor(Tensor input, int group_size, str group_name) -> Tensor", _all_gather, _result
)
"""``all_gather_into_tensor(Tensor input, int group_size, str group_name) -> Tensor``: start to gather.

The result, of shape ``[group_size * n, ...]`` for an input of shape ``[n, ...]``, holds the inputs of all ranks, rank
after rank, once ``wait_tensor`` has returned it. Until then the input must not be written to.
"""
