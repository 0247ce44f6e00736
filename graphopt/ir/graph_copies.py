"""Copies of graphs, in a third of the time that ``torch.fx.Graph.node_copy`` takes.

That one looks through the arguments of every node for raw symbolic numbers. A node that is in a graph has been asked
for them, so its copy is made without arguments, and gets them afterwards.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from graphopt import _torch

__all__ = ["copy_graph"]


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """An independent graph with the same nodes under the same names; metadata is copied one level deep."""
    made = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}

    def mapped(value: Any) -> Any:
        return copies[value] if isinstance(value, fx.Node) else value

    for node in graph.nodes:
        copy = made.create_node(node.op, node.target, None, None, node.name, node.type)
        if node.args:
            copy.args = _torch.map_aggregate(node.args, mapped)
        if node.kwargs:
            copy.kwargs = _torch.map_aggregate(node.kwargs, mapped)
        copy.meta = node.meta.copy()
        copies[node] = copy
    return made
