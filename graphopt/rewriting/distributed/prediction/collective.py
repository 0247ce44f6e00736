"""What each collective of a program moves, and for how long by itself."""

from __future__ import annotations

from torch import fx

from graphopt.ir.node import value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.groups import find_group
from graphopt.ir.ops.values import storage_bytes, tensors_of
from graphopt.rewriting.distributed.prediction.volume import Volume, all_gather, all_reduce, broadcast, reduce_scatter

__all__ = ["group_size", "moved"]

_VOLUMES = {
    "all_gather_into_tensor": all_gather,
    "all_gather_into_tensor_out": all_gather,
    "reduce_scatter_tensor": reduce_scatter,
    "all_to_all_single": reduce_scatter,
    "all_reduce": all_reduce,
    "all_reduce_": all_reduce,
    "broadcast": broadcast,
    "broadcast_": broadcast,
}


def group_size(node: fx.Node) -> int:
    """How many ranks take part in a collective.

    Raises:
        GraphoptError: where the call says nothing of it and this process does not belong to its group.
    """
    arguments = schema.named_arguments(node)
    if isinstance(arguments.get("group_size"), int):
        return int(arguments["group_size"])
    return find_group(str(arguments.get("group_name", ""))).size


def moved(node: fx.Node) -> Volume:
    """What crosses a rank's link: of a collective that is none of the known ones, its bytes once.

    Args:
        node: that starts a collective.
    """
    given = schema.nodes_in(node.args[:1])  # what is written to follows
    size = float(sum(storage_bytes(tensor) for source in given for tensor in tensors_of(value_of(source))))
    known = _VOLUMES.get(schema.op_name(node))
    return known(size, group_size(node)) if known is not None else Volume(1, size, size, size, 1)
