"""Regions of a forward program: bodies that run under autocast or without gradients, and values across them."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from graphopt import _torch
from graphopt.ir.node import NodeInfo, Phase, info, set_info, set_value, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.layers.recurrent import parts_in_eager
from graphopt.ir.program import Program
from graphopt.rewriting.precision.casts import ORIGIN
from graphopt.rewriting.precision.levels import refused, tensor_nodes

__all__ = [
    "Parts",
    "autocast_of",
    "autocast_set",
    "body_of",
    "body_results",
    "evaluate",
    "parts",
    "put_body",
    "put_under_autocast",
]


@contextlib.contextmanager
def autocast_of(node: fx.Node) -> Iterator[None]:
    """The autocast that a region of the model's own runs under."""
    device, dtype, enabled, *_ = node.args
    with autocast_set(str(device), dtype, bool(enabled)):
        yield


@contextlib.contextmanager
def autocast_set(device: str, dtype: Any, enabled: bool) -> Iterator[None]:
    """Autocast on or off for a kind of device."""
    saved = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, enabled)
    torch.set_autocast_dtype(device, dtype if dtype is not None else saved[1])
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, saved[0])
        torch.set_autocast_dtype(device, saved[1])


def evaluate(program: Program, node: fx.Node) -> Any:
    """The value of a call, computed from its arguments' values without data.

    Raises:
        GraphoptError: where the op refuses them, with its module and source line, and what to do.
    """
    target = node.target
    try:
        if isinstance(target, type(_torch.custom_function)):
            key, *args = node.args
            values: list[Any] = [value_of(a) if isinstance(a, fx.Node) else a for a in args]
            with program.fake_mode, torch.no_grad():
                return target.original(str(key), *values)
        return program.propagate(node)
    except Exception as error:
        raise refused(node, error) from error


def body_of(program: Program, node: fx.Node, place: int) -> tuple[Program, list[fx.Node]]:
    """A copy of the body that a region runs, as a program, and what stands for its inputs outside.

    Args:
        program: where the region is.
        node: the call of the region.
        place: the number of the argument that names the body; the inputs follow it.
    """
    name, *inputs = node.args[place:]
    assert isinstance(name, fx.Node)
    body = program.attributes[str(name.target)]
    nested = {name: child for name, child in body.named_children() if isinstance(child, fx.GraphModule)}
    inner = Program(body.graph, "forward", [], [], attributes=nested)
    return inner.copy(), inputs  # type: ignore[return-value]


def put_body(program: Program, node: fx.Node, place: int, inner: Program) -> None:
    """Let a region run a rewritten body."""
    name = node.args[place]
    assert isinstance(name, fx.Node)
    program.attributes[str(name.target)] = fx.GraphModule(dict(inner.attributes), inner.graph)


def body_results(inner: Program) -> tuple[Any, ...]:
    """The values that a body returns, without data."""
    results = _torch.map_aggregate(inner.output_values, lambda a: value_of(a) if isinstance(a, fx.Node) else a)
    return tuple(results)


def put_under_autocast(program: Program, node: fx.Node, device: str, dtype: torch.dtype) -> fx.Node:
    """Let one call run inside of a region under autocast, as eager PyTorch would run it; returns what stands for it."""
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for source in node.all_input_nodes:
        mapping[source] = inside = graph.placeholder(source.name)
        set_value(inside, value_of(source))
        set_info(inside, NodeInfo(Phase.FORWARD))
    call = graph.node_copy(node, lambda n: mapping[n])
    with autocast_set(device, dtype, True):
        set_value(call, evaluate(program, call))
    value = value_of(call)
    if isinstance(value, (tuple, list)):
        parts = [_element(graph, call, place) for place in range(len(value))]
        graph.output(tuple(parts))
    else:
        graph.output((call,))
    name = next(n for n in (f"autocast_{i}" for i in range(10**6)) if n not in program.attributes)
    program.attributes[name] = fx.GraphModule({}, graph)
    return _call_region(program, node, name, (device, dtype, True, True), value)


def _element(graph: fx.Graph, call: fx.Node, place: int) -> fx.Node:
    """One of several results, inside of a body."""
    node = graph.call_function(operator.getitem, (call, place))
    set_value(node, value_of(call)[place])
    set_info(node, NodeInfo(Phase.FORWARD, info(call).module, source=info(call).source))
    return node


def _call_region(program: Program, node: fx.Node, name: str, settings: tuple[Any, ...], value: Any) -> fx.Node:
    known = info(node)
    origin = f"{ORIGIN}: {schema.op_name(node)} as under autocast"
    described = NodeInfo(Phase.FORWARD, known.module, source=known.source, origin=origin, region=known.region)
    several = isinstance(value, (tuple, list))
    with program.graph.inserting_before(node):
        body = program.graph.get_attr(name)
        region = program.graph.call_function(
            torch.ops.higher_order.wrap_with_autocast, (*settings, body, *node.all_input_nodes)
        )
        result = region if several else program.graph.call_function(operator.getitem, (region, 0))
    region.meta["val"] = tuple(value) if several else (value,)
    result.meta["val"] = region.meta["val"] if several else value
    for new in (body, region, result):
        set_info(new, described)
    set_info(result, replace(described, names=known.names))
    return result


@dataclass(frozen=True)
class Parts:
    """What a composite op is made of.

    Attributes:
        calls: the ops, in order, as nodes of a graph of their own.
        inputs: for each placeholder of that graph the node outside that it stands for.
        results: the nodes of that graph that are the op's results.
    """

    calls: list[fx.Node]
    inputs: dict[fx.Node, fx.Node]
    results: list[fx.Node]


def parts(program: Program, node: fx.Node, dtype: torch.dtype) -> Parts | None:
    """A composite op one level down, as eager mode runs it under autocast; None where not only tensors result."""
    assert isinstance(node.target, _torch.OpOverload)
    sources = tensor_nodes(node)
    with program.fake_mode, autocast_set(value_of(sources[0]).device.type, dtype, True):
        graph, numbers = parts_in_eager(node)
    placeholders = list(graph.find_nodes(op="placeholder"))
    inputs: dict[fx.Node, fx.Node] = {}
    for number, source in zip(numbers, sources, strict=True):
        inputs.setdefault(placeholders[number], source)
    (end,) = graph.find_nodes(op="output")
    results = _torch.pytree.tree_leaves(end.args)
    value = value_of(node)
    values = [value] if isinstance(value, torch.Tensor) else value
    tensors = all(isinstance(v, torch.Tensor) for v in values) and all(isinstance(n, fx.Node) for n in results)
    if not tensors or any(n.op == "get_attr" for n in graph.nodes):
        return None
    calls = [n for n in graph.nodes if n.op == "call_function" and (n.users or schema.mutated_inputs(n))]
    return Parts(calls, inputs, results)
