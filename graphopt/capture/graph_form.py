"""What a graph of torch's computes, as plain data: the same in each process in which Dynamo cuts the same graph."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import fx

from graphopt import _torch

__all__ = ["graph_form"]


def graph_form(graph: fx.GraphModule) -> list[Any]:
    """Each node: what it calls, with what, and of which module of the model; nodes stand as their places.

    Functions, tensors and numbers stand as they are.
    """
    places = {node: place for place, node in enumerate(graph.graph.nodes)}
    return [
        [node.op, _target(graph, node), _plain(node.args, places), _plain(node.kwargs, places), _modules(node)]
        for node in graph.graph.nodes
    ]


def _target(graph: fx.GraphModule, node: fx.Node) -> Any:
    if node.op == "get_attr":
        value = operator.attrgetter(str(node.target))(graph)
        return graph_form(value) if isinstance(value, fx.GraphModule) else value
    if isinstance(node.target, _torch.HigherOrderOperator):
        return str(node.target)
    return "" if node.op in ("placeholder", "output") else node.target


def _plain(value: Any, places: Mapping[fx.Node, int]) -> Any:
    if isinstance(value, fx.Node):
        return ("node", places[value])
    if isinstance(value, slice):
        return ("slice", *(_plain(part, places) for part in (value.start, value.stop, value.step)))
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *(_plain(item, places) for item in value)]
    if isinstance(value, Mapping):
        return {name: _plain(item, places) for name, item in value.items()}
    return value


def _modules(node: fx.Node) -> list[str]:
    """The paths of the modules that a call is from, which passes find tensors by."""
    return [str(path) for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
