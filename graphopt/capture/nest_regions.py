"""A flat exported graph → one whose regions, under autocast or without gradients, are calls of bodies of their own."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from graphopt import _torch
from graphopt.ir.names import identifier

__all__ = ["nest_regions"]


_EXPORTED = re.compile(r"^[pbc]_model_")
"""What ``torch.export`` puts in front of the names of parameters, buffers and constants."""


@dataclass(eq=False)
class _Region:
    """Calls that run under one setting.

    Attributes:
        grad: whether gradients are on in it.
        call: the op that runs it, and that op's arguments in front of the body; None for the whole graph.
        begin: the call that began it, where there is one that its end names.
        items: calls and regions, in order.
    """

    grad: bool
    call: tuple[Any, tuple[Any, ...]] | None = None
    begin: fx.Node | None = None
    items: list[fx.Node | _Region] = field(default_factory=list)

    def nodes(self) -> Iterator[fx.Node]:
        """All calls in it, in order."""
        for item in self.items:
            if isinstance(item, _Region):
                yield from item.nodes()
            else:
                yield item


def nest_regions(module: fx.GraphModule) -> fx.GraphModule:
    """Make calls of ``wrap_with_autocast`` and ``wrap_with_set_grad_enabled`` of what runs between their switches.

    Args:
        module: flat, with the calls that switch (``_torch.without_regions``); it stays as it is.

    Returns:
        A module with the same inputs and outputs; the graphs of other higher-order ops are nested likewise.
    """
    switches = (_torch.AUTOCAST_BEGINS, _torch.AUTOCAST_ENDS, _torch.SETS_GRAD_MODE)
    if not any(node.target in switches or node.op == "get_attr" for node in module.graph.nodes):
        return module
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    attributes: dict[str, Any] = {}
    parser = _Parser()
    for node in module.graph.nodes:
        if node.op != "output":
            parser.read(node)
    _emit(parser.whole, graph, mapping, module, attributes)
    for node in module.graph.find_nodes(op="output"):
        graph.node_copy(node, lambda n: mapping[n])
    return fx.GraphModule(attributes, graph)


class _Parser:
    """Reads a flat graph into regions."""

    def __init__(self) -> None:
        self.whole = _Region(grad=True)
        self._stack = [self.whole]

    def read(self, node: fx.Node) -> None:
        """Take the next call: one that switches, or one that belongs to the region of now."""
        now = self._stack[-1]
        if node.target is _torch.AUTOCAST_BEGINS:
            call = torch.ops.higher_order.wrap_with_autocast, tuple(node.args)
            self._open(_Region(now.grad, call, node))
        elif node.target is _torch.AUTOCAST_ENDS:
            while self._stack.pop().begin is not node.args[0]:
                pass  # a grad mode that was set inside of it, and not back
            self._set_grad(now.grad)
        elif node.target is _torch.SETS_GRAD_MODE:
            self._set_grad(bool(node.args[0]))
        else:
            now.items.append(node)

    def _open(self, region: _Region) -> None:
        self._stack[-1].items.append(region)
        self._stack.append(region)

    def _set_grad(self, enabled: bool) -> None:
        now = self._stack[-1]
        if enabled == now.grad:
            return
        if now.call is not None and now.begin is None:
            self._stack.pop()  # back to the mode around this region
        else:
            self._open(_Region(enabled, (torch.ops.higher_order.wrap_with_set_grad_enabled, (enabled,))))


def _emit(
    region: _Region,
    graph: fx.Graph,
    mapping: dict[fx.Node, fx.Node],
    module: fx.GraphModule,
    attributes: dict[str, Any],
) -> None:
    """Write the calls of a region into a graph, and what they refer to into ``attributes``."""
    for item in region.items:
        if isinstance(item, _Region):
            _emit_body(item, graph, mapping, module, attributes)
        elif item.op != "get_attr":
            for source in item.all_input_nodes:
                if source.op == "get_attr" and source not in mapping:
                    mapping[source] = graph.node_copy(source)
                    value = getattr(module, str(source.target))
                    nested = isinstance(value, fx.GraphModule)
                    attributes[str(source.target)] = nest_regions(value) if nested else value
            mapping[item] = graph.node_copy(item, lambda n: mapping[n])


def _emit_body(
    region: _Region,
    graph: fx.Graph,
    mapping: dict[fx.Node, fx.Node],
    module: fx.GraphModule,
    attributes: dict[str, Any],
) -> None:
    inside = dict.fromkeys(node for node in region.nodes() if node.op != "get_attr")
    if not inside:
        return
    read = dict.fromkeys(source for node in inside for source in node.all_input_nodes)
    sources = [source for source in read if source not in inside and source.op != "get_attr"]
    results = [node for node in inside if any(user not in inside for user in node.users)]
    body, inner, nested = fx.Graph(), dict[fx.Node, fx.Node](), dict[str, Any]()
    for source in sources:
        inner[source] = body.placeholder(identifier(_EXPORTED.sub("", source.name)))
        inner[source].meta = {"val": source.meta.get("val")}
    _emit(region, body, inner, module, nested)
    body.output(tuple(inner[node] for node in results))
    name = next(name for name in (f"region_{i}" for i in range(len(attributes) + 1)) if name not in attributes)
    attributes[name] = fx.GraphModule(nested, body)
    assert region.call is not None
    target, settings = region.call
    inputs = [mapping[source] for source in sources]
    call = graph.call_function(target, (*settings, graph.get_attr(name), *inputs))
    call.meta["val"] = tuple(node.meta.get("val") for node in results)
    for place, node in enumerate(results):
        mapping[node] = graph.call_function(operator.getitem, (call, place))
        mapping[node].meta = dict(node.meta)
