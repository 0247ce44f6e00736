"""Facts about collectives that their schemas do not tell."""

from __future__ import annotations

from torch import fx

from graphopt import _torch
from graphopt.ir.node import value_of
from graphopt.ir.ops.all_gather import all_gather_into_tensor
from graphopt.ir.ops.values import storage_bytes, tensors_of

__all__ = ["ALL_GATHER", "ALL_REDUCE", "ALL_TO_ALL", "BROADCAST", "REDUCE_SCATTER", "WAIT", "workspace_bytes"]

ALL_GATHER = all_gather_into_tensor
"""``graphopt.all_gather_into_tensor(Tensor input, int group_size, str group_name) -> Tensor``: starts; of shape
``[group_size * n, ...]``, rank after rank."""

ALL_REDUCE = _torch.all_reduce_
"""``all_reduce_(Tensor(a!) input, str reduce_op, Any group_name) -> Tensor(a!)``: starts, and writes to ``input``."""

ALL_TO_ALL = _torch.all_to_all_single
"""``all_to_all_single(Tensor input, SymInt[] output_sizes, SymInt[] input_sizes, Any group_name) -> Tensor``: starts;
part ``i`` of dimension 0 goes to rank ``i``, and what came from rank ``i`` is part ``i`` of the result."""

BROADCAST = _torch.broadcast_
"""``broadcast_(Tensor(a!) input, int src, Any group_name) -> Tensor(a!)``: starts, and writes what rank ``src`` of the
group has to ``input``."""

REDUCE_SCATTER = _torch.reduce_scatter_tensor
"""``reduce_scatter_tensor(Tensor input, str reduce_op, int group_size, Any group_name) -> Tensor``: starts; rank ``i``
gets the reduction of part ``i`` of ``group_size`` equal parts of dimension 0. Gloo sends as much as an all-reduce."""

WAIT = _torch.wait_tensor
"""``wait_tensor(Tensor tensor) -> Tensor``: waits for the collective that writes to ``tensor``, and returns it."""


def workspace_bytes(node: fx.Node) -> int:
    """Bytes that a collective allocates beside its result while it runs.

    Gloo, which serves CPU tensors, gathers into a buffer of its own and copies it into the result; NCCL needs nothing
    of torch's allocator.

    Args:
        node: any call; 0 for what is not a gather of CPU tensors.
    """
    if node.target is not ALL_GATHER:
        return 0
    return sum(storage_bytes(tensor) for tensor in tensors_of(value_of(node)) if _torch.device_kind(tensor) == "cpu")
