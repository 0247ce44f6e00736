"""The ops that start and end exchanges between ranks; each is started and waited for by calls of its own."""

from __future__ import annotations

from graphopt import _torch
from graphopt.ir.ops.all_gather import all_gather_into_tensor
from graphopt.ir.ops.reduce_scatter import reduce_scatter_sum

__all__ = ["ALL_GATHER", "ALL_REDUCE", "BROADCAST", "REDUCE_SCATTER", "REDUCE_SCATTER_SUM", "WAIT"]

ALL_GATHER = all_gather_into_tensor
"""``graphopt.all_gather_into_tensor(Tensor input, int group_size, str group_name) -> Tensor``: starts; of shape
``[group_size * n, ...]``, rank after rank."""

ALL_REDUCE = _torch.all_reduce_
"""``all_reduce_(Tensor(a!) input, str reduce_op, Any group_name) -> Tensor(a!)``: starts, and writes to ``input``."""

BROADCAST = _torch.broadcast_
"""``broadcast_(Tensor(a!) input, int src, Any group_name) -> Tensor(a!)``: starts, and writes what rank ``src`` of the
group has to ``input``."""

REDUCE_SCATTER = _torch.reduce_scatter_tensor
"""``reduce_scatter_tensor(Tensor input, str reduce_op, int group_size, Any group_name) -> Tensor``: starts; rank ``i``
gets the reduction of part ``i`` of ``group_size`` equal parts of dimension 0. Gloo sends as much as an all-reduce."""

REDUCE_SCATTER_SUM = reduce_scatter_sum
"""``graphopt.reduce_scatter_sum(Tensor(a!) input, int group_size, str group_name) -> Tensor``: the same for sums,
around a ring over gloo; writes partial sums to ``input``."""

WAIT = _torch.wait_tensor
"""``wait_tensor(Tensor tensor) -> Tensor``: waits for the collective that writes to ``tensor``, and returns it."""
