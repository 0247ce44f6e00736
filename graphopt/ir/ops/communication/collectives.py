"""The ops that start and end exchanges between ranks; each is started and waited for by calls of its own.

The op that starts an all-gather: ``all_gather_into_tensor``.

It is torch's functional collective of this name, but for how gloo is called: from rank to rank, in pieces
(``point_to_point``), among more than two ranks around a ring (``ring``). Torch's own way to call gloo's gather goes by
the path for lists of tensors, on which torch 2.13 corrupts the heap where two gathers are under way at a time
(``malloc(): unaligned tcache chunk detected``). Other backends gather by the path for one tensor, which torch takes
where the result is given.

The op that starts a reduce-scatter of CPU tensors: ``reduce_scatter_sum``.

It is a ring over gloo (``ring``): gloo has no reduce-scatter, and torch's stand-in for it sends as much as an
all-reduce. What comes is added to what is sent on, so that nothing but the result takes memory.
"""

from __future__ import annotations

import torch

from graphopt import _torch
from graphopt.ir.ops.communication.groups import find_group
from graphopt.ir.ops.communication.ring import (
    goes_point_to_point,
    start_all_gather,
    start_exchange,
    start_reduce_scatter,
)
from graphopt.ir.ops.define import define, described, require

__all__ = [
    "ALL_GATHER",
    "ALL_REDUCE",
    "ALL_TO_ALL",
    "BROADCAST",
    "GATHER_INTO",
    "REDUCE_SCATTER",
    "REDUCE_SCATTER_SUM",
    "WAIT",
    "all_gather_into_tensor",
    "all_to_all",
    "gather_into_",
    "gather_shards",
    "reduce_scatter_sum",
]


def _all_gather(input: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
    input = input.contiguous()
    result = _gathered(input, group_size, group_name)
    _start_gather(input, result, input, group_size, group_name)
    return result


def _start_gather(
    input: torch.Tensor, result: torch.Tensor, sent: torch.Tensor, group_size: int, group_name: str
) -> None:
    """Start to gather into memory that is there, with what is sent in ``sent`` until it is waited for."""
    group = find_group(group_name)
    if goes_point_to_point(input, group):
        incoming = result.chunk(group_size)
        incoming[group.rank].copy_(input)
        if group_size > 2:
            start_all_gather(result, group)
        else:
            start_exchange([sent] * group_size, incoming, group, result)
    else:
        _torch.all_gather_into_tensor_out(input, group_size, group_name, out=result)


def _gathered(input: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
    """Room for what comes; what an example run gives too."""
    return input.new_empty((group_size * input.shape[0], *input.shape[1:]))


all_gather_into_tensor = define(
    "all_gather_into_tensor(Tensor input, int group_size, str group_name) -> Tensor", _all_gather, _gathered
)
"""``all_gather_into_tensor(Tensor input, int group_size, str group_name) -> Tensor``: start to gather.

The result, of shape ``[group_size * n, ...]`` for an input of shape ``[n, ...]``, holds the inputs of all ranks, rank
after rank, once ``wait_tensor`` has returned it. Until then the input must not be written to.
"""


def _gather_into(input: torch.Tensor, result: torch.Tensor, group_size: int, group_name: str) -> None:
    _check_room(input, result, group_size, group_name)
    own = result.chunk(group_size)[find_group(group_name).rank]  # what is given may be gone before it has been sent
    _start_gather(input.contiguous(), result, own, group_size, group_name)


def _check_room(input: torch.Tensor, result: torch.Tensor, group_size: int, group_name: str) -> None:
    del group_name
    wanted = [group_size * input.shape[0], *input.shape[1:]]
    require(
        list(result.shape) == wanted and result.dtype is input.dtype and result.is_contiguous(),
        "gather_into_",
        f"result is contiguous, {input.dtype} of shape {wanted}, got {described(result)}",
    )


gather_into_ = define(
    "gather_into_(Tensor input, Tensor(a!) result, int group_size, str group_name) -> ()", _gather_into, _check_room
)
"""``gather_into_(Tensor input, Tensor(a!) result, int group_size, str group_name) -> ()``: start to gather.

As ``all_gather_into_tensor``, into memory that is there, so that a later run of a program can wait for it:
``wait_tensor(result)``. The input may be written to, or go, before that.
"""


def _reduce_scatter(input: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
    group = find_group(group_name)
    if not goes_point_to_point(input, group):
        found: torch.Tensor = _torch.reduce_scatter_tensor(input, "sum", group_size, group_name)
        return found
    result = _scattered(input, group_size, group_name)
    start_reduce_scatter(input, result, group)
    return result


def _scattered(input: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
    """Room for what comes; what an example run gives too."""
    del group_name
    return input.new_empty((input.shape[0] // group_size, *input.shape[1:]))


reduce_scatter_sum = define(
    "reduce_scatter_sum(Tensor(a!) input, int group_size, str group_name) -> Tensor", _reduce_scatter, _scattered
)
"""``reduce_scatter_sum(Tensor(a!) input, int group_size, str group_name) -> Tensor``: start to sum parts over ranks.

``input`` is contiguous; of ``group_size`` equal parts of its dimension 0, rank ``i`` gets the sum of parts ``i`` of all
ranks, once ``wait_tensor`` has returned the result. Until then the input must be left alone, and afterwards it holds
partial sums. Sums begin with the part of rank ``i + 1`` and go around the ring, rounded to the dtype at each rank.
"""


def _all_to_all(input: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
    input, group = input.contiguous(), find_group(group_name)
    if not goes_point_to_point(input, group):
        found: torch.Tensor = _torch.all_to_all_single(input, group_size, group_name)
        return found
    result = torch.empty_like(input)
    outgoing, incoming = input.chunk(group_size), result.chunk(group_size)
    incoming[group.rank].copy_(outgoing[group.rank])
    start_exchange(outgoing, incoming, group, result)
    return result


def _as_many(input: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
    """Room for what comes; what an example run gives too."""
    del group_size, group_name
    return input.new_empty(input.shape)


all_to_all = define("all_to_all(Tensor input, int group_size, str group_name) -> Tensor", _all_to_all, _as_many)
"""``all_to_all(Tensor input, int group_size, str group_name) -> Tensor``: start to exchange parts.

Of ``group_size`` equal parts of the input's dimension 0, rank ``i`` gets part ``i`` of all ranks' inputs, rank after
rank, once ``wait_tensor`` has returned the result. Until then the input must not be written to.
"""


def _gather_shards(input: torch.Tensor, group_size: int, frees: bool, group_name: str) -> torch.Tensor:
    del frees
    found: torch.Tensor = WAIT(all_gather_into_tensor(input, group_size, group_name))
    return found


def _whole(input: torch.Tensor, group_size: int, frees: bool, group_name: str) -> torch.Tensor:
    """Room for what comes; what an example run gives too."""
    del frees
    return _gathered(input, group_size, group_name)


gather_shards = define(
    "gather_shards(Tensor input, int group_size, bool frees, str group_name) -> Tensor", _gather_shards, _whole
)
"""``gather_shards(Tensor input, int group_size, bool frees, str group_name) -> Tensor``: gather, and wait for it.

As ``all_gather_into_tensor``, in one op, which may be recomputed: all ranks run the same program. ``frees`` says that
the model asks for the result to be freed behind forward, and gathered again for backward.
"""

ALL_GATHER = all_gather_into_tensor
"""``graphopt.all_gather_into_tensor(Tensor input, int group_size, str group_name) -> Tensor``: starts; of shape
``[group_size * n, ...]``, rank after rank."""

ALL_REDUCE = _torch.all_reduce_
"""``all_reduce_(Tensor(a!) input, str reduce_op, Any group_name) -> Tensor(a!)``: starts, and writes to ``input``."""

ALL_TO_ALL = all_to_all
"""``graphopt.all_to_all(Tensor input, int group_size, str group_name) -> Tensor``: starts; rank ``i`` gets part ``i``
of ``group_size`` equal parts of dimension 0 of all ranks' inputs, rank after rank."""

BROADCAST = _torch.broadcast_
"""``broadcast_(Tensor(a!) input, int src, Any group_name) -> Tensor(a!)``: starts, and writes what rank ``src`` of the
group has to ``input``."""

GATHER_INTO = gather_into_
"""``graphopt.gather_into_(Tensor input, Tensor(a!) result, int group_size, str group_name) -> ()``: starts."""

REDUCE_SCATTER = _torch.reduce_scatter_tensor
"""``reduce_scatter_tensor(Tensor input, str reduce_op, int group_size, Any group_name) -> Tensor``: starts; rank ``i``
gets the reduction of part ``i`` of ``group_size`` equal parts of dimension 0. Gloo sends as much as an all-reduce."""

REDUCE_SCATTER_SUM = reduce_scatter_sum
"""``graphopt.reduce_scatter_sum(Tensor(a!) input, int group_size, str group_name) -> Tensor``: the same for sums,
around a ring over gloo; writes partial sums to ``input``."""

WAIT = _torch.wait_tensor
"""``wait_tensor(Tensor tensor) -> Tensor``: waits for the collective that writes to ``tensor``, and returns it."""
