"""What each collective of a program moves, and for how long by itself."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from graphopt.errors import GraphoptError
from graphopt.ir.node import value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.communication.groups import find_group
from graphopt.ir.ops.values import storage_bytes, tensors_of
from graphopt.ir.program import Program
from graphopt.rewriting.distributed.prediction.link import Link
from graphopt.rewriting.distributed.prediction.measured_link import link_between
from graphopt.rewriting.distributed.prediction.volume import Volume, all_gather, all_reduce, broadcast, reduce_scatter

__all__ = ["LINK", "group_size", "is_exchange", "moved", "seconds_on_link", "seconds_with_exchanges"]

LINK = "10Gbit"
"""What joins ranks where nothing is said of it."""

_VOLUMES = {
    "all_gather_into_tensor": all_gather,
    "all_gather_into_tensor_out": all_gather,
    "all_to_all": reduce_scatter,  # as many bytes and rounds: all but a rank's own part of what it puts in
    "gather_into_": all_gather,
    "gather_shards": all_gather,
    "reduce_scatter_tensor": reduce_scatter,
    "reduce_scatter_sum": reduce_scatter,
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


def is_exchange(node: fx.Node) -> bool:
    """Whether a call starts a collective."""
    return schema.is_collective(node) and not schema.hands_on(node)


def seconds_with_exchanges(program: Program, nodes: Sequence[fx.Node], seconds: Sequence[float]) -> list[float]:
    """Seconds of a program's calls, of which exchanges take what they do on the link of their ranks (``link_between``).

    Args:
        program: with its groups.
        nodes: its calls.
        seconds: of each, by a cost model.

    Raises:
        GraphoptError: where nothing is known of a link.
    """
    links: dict[str, Link] = {}
    found = []
    for node, own in zip(nodes, seconds, strict=True):
        if is_exchange(node):
            name = str(schema.named_arguments(node)["group_name"])
            if name not in links:
                device = next(t.device for source in node.all_input_nodes for t in tensors_of(value_of(source)))
                links[name] = link_between(program, find_group(name), device)
            own = moved(node).seconds(links[name], group_size(node))
        found.append(own)
    return found


def seconds_on_link(nodes: Sequence[fx.Node], seconds: Sequence[float], link: Link) -> tuple[list[float], int]:
    """Seconds of calls, of which exchanges take what they do on a link; and of how many of these nothing is known.

    Args:
        nodes: calls of a program.
        seconds: of each, by a cost model; those of exchanges whose number of ranks is not known stay.
        link: of each rank.
    """
    found, unknown = [], 0
    for node, own in zip(nodes, seconds, strict=True):
        if is_exchange(node):
            try:
                own = moved(node).seconds(link, group_size(node))
            except GraphoptError:  # of a group that this process does not belong to
                unknown += 1
        found.append(own)
    return found, unknown
