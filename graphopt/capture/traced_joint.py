"""A forward program run under torch's joint trace, and that trace read back: which call comes from which."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.fx import traceback

from graphopt import _torch
from graphopt.capture.forward_interpreter import Interpreter
from graphopt.ir.node import InputSpec
from graphopt.ir.ops import schema
from graphopt.ir.program import Program

__all__ = ["Runner", "TracedJoint", "base_name", "is_seen_through", "mark_of", "marked", "read_trace"]

_MARK = "graphopt"
"""Where joint nodes get the place of the forward node they were traced under (in ``meta["custom"]``)."""

_IDENTITIES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
"""Ops that autograd's bookkeeping leaves behind; in a program they are their argument."""


class Runner(nn.Module):
    """Runs a forward program node by node, so that every op traced underneath knows which node it came from.

    Attributes:
        keys: by the name of a placeholder, under which name this module has its tensor: one for each tensor.
        holder: what that is.
    """

    def __init__(self, program: Program, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._module = [_as_module(program)]
        self.keys: dict[str, str] = {}
        self.holder: dict[str, InputSpec] = {}
        known: dict[int, str] = {}
        for node, spec in zip(program.placeholders, program.inputs, strict=True):
            if spec.role == "input":
                continue
            tensor = program.constants[node.name] if spec.role == "constant" else tensors[spec.target]
            key = known.setdefault(id(tensor), f"t{len(known)}")
            self.keys[node.name] = key
            if key in self.holder:
                continue
            self.holder[key] = spec
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(key, tensor)
            else:
                self.register_buffer(key, tensor)

    def forward(self, *inputs: torch.Tensor) -> tuple[Any, ...]:
        """What the program returns for its inputs that are no tensors of this module."""
        supply = iter(inputs)
        module = self._module[0]
        values = [
            getattr(self, self.keys[node.name]) if node.name in self.keys else next(supply)
            for node in module.graph.find_nodes(op="placeholder")
        ]
        with traceback.preserve_node_meta():
            return tuple(Interpreter(module).run(*values))


def _as_module(program: Program) -> fx.GraphModule:
    """The program as a module whose every node, also in sub-graphs, carries the mark of where it stands."""
    copy = program.copy()
    module = fx.GraphModule(copy.attributes, copy.graph)
    for mark, node in marked(module.graph, copy.attributes):
        node.meta["custom"] = {_MARK: mark}
    return module


def marked(graph: fx.Graph, attributes: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, fx.Node]]:
    """Every node of a graph and of its sub-graphs, with its place: ``name``, ``sub/name``, ``sub/sub/name``."""
    for node in graph.nodes:
        yield prefix + node.name, node
    for name, body in attributes.items():
        if isinstance(body, fx.GraphModule):
            yield from marked(body.graph, dict(body.named_children()), f"{prefix}{name}/")


@dataclass(frozen=True)
class TracedJoint:
    """A joint graph as torch traced it, with what its nodes are.

    Attributes:
        graph: of torch's.
        inputs: its placeholders with what they stand for, in calling order; tensors by their keys in the ``Runner``.
        outputs: its values, likewise.
        sources: the place of the forward call that a call comes from (``marked``); empty where it is not known.
        backward: the calls of backward.
    """

    graph: fx.Graph
    inputs: Sequence[tuple[fx.Node, _torch.AotInput]]
    outputs: Sequence[tuple[Any, _torch.AotOutput]]
    sources: dict[fx.Node, str]
    backward: set[fx.Node]


def read_trace(trace: _torch.JointTrace) -> TracedJoint:
    """A trace, with what is known of its calls: by the mark of a forward call, else by autograd's number for it."""
    inputs = trace.inputs()
    backward = {node for node, role in inputs if role.kind == "tangent"}
    sources: dict[fx.Node, str] = {}
    by_sequence: dict[int, str] = {}
    begun = False
    for node in trace.graph.nodes:
        if node.op != "call_function" or node.target is torch.ops.aten._assert_tensor_metadata.default:
            continue
        mark = mark_of(node)
        if is_seen_through(node):
            sources[node] = mark
            if node.all_input_nodes[0] in backward:
                backward.add(node)
            continue
        tagged = node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")
        # torch leaves out calls that it makes when backward has ended, for gradients of another dtype
        late = tagged or any(source in backward for source in node.all_input_nodes)
        # and calls of a backward that runs a graph of its own; what stands behind the first of these belongs to them
        late |= begun and not schema.mutated_inputs(node)
        sequence = node.meta.get("seq_nr")
        sources[node] = source = mark or by_sequence.get(sequence, "")
        if late:
            backward.add(node)
        elif source and sequence is not None:
            by_sequence.setdefault(sequence, source)
        begun |= late
    return TracedJoint(trace.graph, inputs, trace.outputs(), sources, backward)


def mark_of(node: fx.Node) -> str:
    """The place of the forward call that torch noted for a call of its joint graph; empty where it noted none."""
    return str((node.meta.get("custom") or {}).get(_MARK, ""))


def is_seen_through(node: fx.Node) -> bool:
    """Whether a call of torch's joint graph is its operand, as far as a program goes."""
    return node.target in _IDENTITIES and not any(user.op == "output" for user in node.users)


def base_name(node: fx.Node) -> str:
    """The name of a node without its number."""
    return re.sub(r"_\d+$", "", node.name)
