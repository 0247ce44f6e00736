"""Joint program + traced update → step program: the update appended, its inputs and outputs described."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from graphopt import _torch
from graphopt.capture.joint.finish_joint import match_layouts
from graphopt.capture.step.optimizer_tracer import UpdateTrace
from graphopt.ir.names import identifier
from graphopt.ir.node import InputSpec, NodeInfo, OutputSpec, Phase, set_info, value_of
from graphopt.ir.program import Program
from graphopt.rewriting.shards import Shards

__all__ = ["append_update"]


def append_update(program: Program, trace: UpdateTrace) -> Program:
    """A step program: ``program`` (stage joint, with a loss) followed by the traced update of its parameters.

    Gradients become inner values; state and learning rates become inputs; created state becomes outputs.
    """
    step = program.copy()
    step.stage, step.lower = "step", None
    match_layouts(step)
    created = _copy_update(step, trace, _update_inputs(step, trace))
    _set_outputs(step, created, trace.created)
    step.erase_dead()
    _drop_unused_inputs(step)
    return step


def _update_inputs(step: Program, trace: UpdateTrace) -> dict[fx.Node, fx.Node]:
    """What each placeholder of the trace is in the program: a value that is there, or a new input."""
    gradients = {spec.target: value for value, spec in step.outputs_of("gradient")}
    parameters = {spec.target: node for node, spec in step.inputs_of("parameter")}
    mapping: dict[fx.Node, fx.Node] = {}
    for node, spec in zip(trace.graph.find_nodes(op="placeholder"), trace.inputs, strict=True):
        if spec.role == "loss":
            mapping[node] = next(value for value, known in step.outputs_of("loss") if known.role == "loss")
        elif spec.role in ("parameter", "gradient"):
            whole = parameters if spec.role == "parameter" else gradients
            mapping[node] = _part(step, whole[spec.target], spec.target, trace.shards)
        else:
            mapping[node] = step.add_input(identifier(spec.target), value_of(node), spec)
    return mapping


def _copy_update(step: Program, trace: UpdateTrace, mapping: dict[fx.Node, fx.Node]) -> list[fx.Node]:
    """Copy the traced calls to the end of the program; returns the state that they create.

    Args:
        step: the program.
        trace: whose calls are copied.
        mapping: from nodes of the trace to nodes of the program, its inputs known; the calls are entered.
    """
    created: list[fx.Node] = []
    output = step.output_node
    modules = _modules_of(trace)
    for node in trace.graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "get_attr":
            mapping[node] = _add_constant(step, f"update{node.target}", trace.constants[str(node.target)])
            continue
        if node.op == "output":
            created = [mapping[v] for v in _torch.pytree.tree_leaves(node.args[0])]
            continue
        with step.graph.inserting_before(output):
            new = step.graph.node_copy(node, lambda n: mapping[n])
        new.meta = {"val": value_of(node)}
        set_info(new, NodeInfo(Phase.UPDATE, module=modules.get(node, ""), origin="optimizer.step"))
        mapping[node] = new
    return created


def _set_outputs(step: Program, created: list[fx.Node], state: list[InputSpec]) -> None:
    """Return the loss, the model's outputs, gradients that are not of parameters, and the created state."""
    parameters = {spec.target for _, spec in step.inputs_of("parameter")}
    kept = [
        (value, spec)
        for value, spec in zip(step.output_values, step.outputs, strict=True)
        if spec.role in ("loss", "output") or (spec.role == "gradient" and spec.target not in parameters)
    ]
    extra = [(value, OutputSpec("state", spec.target)) for value, spec in zip(created, state, strict=True)]
    step.set_outputs([v for v, _ in kept + extra], [s for _, s in kept + extra])


def _part(program: Program, whole: fx.Node, name: str, shards: Shards | None) -> fx.Node:
    """What the update gets of a parameter or of its gradient, which have the same layout: all, or a shard of both."""
    if shards is None:
        return whole
    first, length = shards[name]
    common: dict[str, Any] = {"before": program.output_node, "phase": Phase.UPDATE, "origin": "optimizer.step"}
    flat = program.insert(torch.ops.aten.as_strided.default, (whole, [value_of(whole).numel()], [1]), **common)
    return program.insert(torch.ops.aten.slice.Tensor, (flat, 0, first, first + length), **common)


def _add_constant(program: Program, name: str, tensor: torch.Tensor) -> fx.Node:
    value = program.fake_mode.from_tensor(tensor)
    node = program.add_input(name, value, InputSpec("constant", name))
    program.constants[node.name] = tensor
    return node


def _modules_of(trace: UpdateTrace) -> dict[fx.Node, str]:
    """The module of the one parameter that an update op works for; '' where it works for many."""
    owner: dict[fx.Node, set[str]] = {}
    for node, spec in zip(trace.graph.find_nodes(op="placeholder"), trace.inputs, strict=True):
        owner[node] = {spec.target.split("/")[0].rpartition(".")[0]} if spec.role != "hyperparameter" else set()
    for node in trace.graph.nodes:
        if node not in owner:
            owner[node] = set().union(*(owner[source] for source in node.all_input_nodes))
    return {node: next(iter(modules)) for node, modules in owner.items() if len(modules) == 1}


def _drop_unused_inputs(program: Program) -> None:
    """Forget learning rates of groups that have no trained parameter."""
    pairs = list(zip(program.placeholders, program.inputs, strict=True))
    for node, spec in pairs:
        if spec.role in ("hyperparameter", "state") and not node.users:
            program.graph.erase_node(node)
            program.inputs.remove(spec)
