"""Copies of graphs, in a third of the time that ``torch.fx.Graph.node_copy`` takes (``_torch.add_node``).

Keys of ops that are made once, as long as the op, its arguments and their values are the same objects.

What an op is measured under, say, is asked for at each timeline of a program, and in each copy of it.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import fx

from graphopt import _torch

__all__ = ["copy_graph", "copy_node", "forget_keys", "is_unchanged", "kept_key", "pass_on_keys"]


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """An independent graph with the same nodes under the same names; metadata is copied one level deep."""
    made = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}

    def mapped(value: Any) -> Any:
        return copies[value] if isinstance(value, fx.Node) else value

    for node in graph.nodes:
        copies[node] = _copied(made, node, mapped, node.name)
        pass_on_keys(node, copies[node])
    return made


def is_unchanged(graph: fx.Graph, copy: fx.Graph) -> bool:
    """Whether a graph has the nodes that a copy of it has, with the same arguments, values and metadata."""

    def name(value: Any) -> Any:
        return (value.name,) if isinstance(value, fx.Node) else value

    def known(node: fx.Node) -> tuple[Any, ...]:
        return node.op, node.name, node.target, _torch.map_aggregate((node.args, node.kwargs), name)

    if len(graph.nodes) != len(copy.nodes):
        return False
    return all(
        known(one) == known(other) and one.meta.keys() == other.meta.keys() and _same_metadata(one, other)
        for one, other in zip(graph.nodes, copy.nodes, strict=True)
    )


def _same_metadata(one: fx.Node, other: fx.Node) -> bool:
    return all(
        value is other.meta[key] or (key == "graphopt" and value == other.meta[key])
        for key, value in one.meta.items()
        if key != _KNOWN
    )


def copy_node(graph: fx.Graph, node: fx.Node, mapped: Callable[[Any], Any], name: str | None = None) -> fx.Node:
    """A copy of a node in a graph, with its metadata copied one level deep.

    Args:
        graph: where to.
        node: of any graph.
        mapped: what stands for each item of its arguments.
        name: of the copy, where it is not that of the node.
    """
    copy = _copied(graph, node, mapped, name or node.name)
    forget_keys(copy)
    return copy


def _copied(graph: fx.Graph, node: fx.Node, mapped: Callable[[Any], Any], name: str) -> fx.Node:
    args = _torch.map_aggregate(node.args, mapped) if node.args else ()
    kwargs = _torch.map_aggregate(node.kwargs, mapped) if node.kwargs else {}
    copy = _torch.add_node(graph, node.op, node.target, args, kwargs, name, node.type)
    copy.meta.update(node.meta)
    return copy


_KNOWN = "graphopt_keys"
_KEYS = 8
"""How many keys of an op are kept: those for sizes of the past are of no use."""


class _Known(NamedTuple):
    """Keys with what they are about, held so that nothing else can take the place of an object that is gone."""

    target: Any
    args: Any
    kwargs: Any
    values: tuple[Any, ...]
    fixed: bool
    keys: dict[tuple[Callable[[fx.Node], str], object], str]

    def is_of(self, node: fx.Node) -> bool:
        """Whether the op is as it was."""
        same = self.target is node.target and self.args is node.args and self.kwargs is node.kwargs
        return same and all(map(is_, self.values, _values(node)))


def kept_key(node: fx.Node, make: Callable[[fx.Node], str]) -> str:
    """What ``make`` says of an op.

    Args:
        node: the op.
        make: a function of a module; its key depends on the target, the arguments and the sizes of their values alone.
    """
    known = node.meta.get(_KNOWN)
    if known is None or not known.is_of(node):
        values = tuple(_values(node))
        fixed = all(map(_is_fixed, values))
        known = node.meta[_KNOWN] = _Known(node.target, node.args, node.kwargs, values, fixed, {})
    place = make, None if known.fixed else _torch.taken_sizes()
    key = known.keys.get(place)
    if key is None:
        if len(known.keys) >= _KEYS:
            known.keys.clear()
        key = known.keys[place] = make(node)
    return key


def pass_on_keys(node: fx.Node, copy: fx.Node) -> None:
    """Let a copy of an op with its metadata, which reads copies of what the op reads, have its keys."""
    known = node.meta.get(_KNOWN)
    if known is None:
        return
    if known.args is node.args and known.kwargs is node.kwargs:
        copy.meta[_KNOWN] = _Known(known.target, copy.args, copy.kwargs, known.values, known.fixed, known.keys)
    else:
        forget_keys(copy)


def forget_keys(copy: fx.Node) -> None:
    """Let another op with an op's metadata have none of its keys, which would keep the first one's graph alive."""
    copy.meta.pop(_KNOWN, None)


def _values(node: fx.Node) -> list[Any]:
    return [source.meta.get("val") for source in node.all_input_nodes]


def _is_fixed(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_nested:
            return False  # sizes are elsewhere
        behind = value.storage_offset(), value.untyped_storage().nbytes()
        return all(type(size) is int for size in (*value.shape, *value.stride(), *behind))
    if isinstance(value, (list, tuple)):
        return all(map(_is_fixed, value))
    return not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
