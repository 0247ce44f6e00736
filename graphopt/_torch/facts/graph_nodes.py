"""Nodes of graphs, added in a third of the time that ``torch.fx.Graph.create_node`` takes.

That one looks through all arguments for raw symbolic numbers, which are no arguments of graphs here; and assigning
arguments to a node takes it out of the graph's table of ops, and puts it there again.
"""

from __future__ import annotations

from typing import Any

from torch import fx

__all__ = ["add_node"]


def add_node(
    graph: fx.Graph,
    op: str,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name: str,
    type_expr: Any = None,
) -> fx.Node:
    """A node at the end of a graph, as ``graph.create_node`` adds it.

    Args:
        graph: where it is added.
        op: what kind of node it is.
        target: what it calls.
        args: nodes, numbers, and what holds these; no symbolic numbers.
        kwargs: the same by name.
        name: what it is called, where no other node is.
        type_expr: the annotation of its value.
    """
    node = graph.create_node(op, target, None, None, name, type_expr)
    if args or kwargs:
        set_both = getattr(node, "_update_args_kwargs", None)
        if set_both is None:
            node.args, node.kwargs = args, kwargs
        else:
            set_both(args, kwargs)
    return node
