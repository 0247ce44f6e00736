"""Programs in parts: forward and backward for autograd; what a compiler takes and the update that it does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from graphopt import _torch
from graphopt.ir.gradients import base_of
from graphopt.ir.node import Phase, info, value_of
from graphopt.ir.ops import schema
from graphopt.ir.program import Program
from graphopt.ir.reuse import apply_reuse

__all__ = ["bind_state", "partition", "saved_values", "split_update"]


def saved_values(program: Program) -> list[fx.Node]:
    """What forward computes or is given, and something after forward reads: tensors first, then sizes."""
    found: dict[fx.Node, None] = {}
    late = _late(program)
    there = late.union(node for node, _ in program.inputs_of("pass_state"))
    for node in program.graph.nodes:
        if node in late:
            found |= dict.fromkeys(source for source in node.all_input_nodes if source not in there)
    for value, _ in program.outputs_of("gradient"):
        if isinstance(value, fx.Node) and value not in late:
            found[value] = None
    order = {node: index for index, node in enumerate(program.graph.nodes)}
    nodes = sorted(found, key=order.__getitem__)
    tensors = [node for node in nodes if isinstance(value_of(node), torch.Tensor)]
    return tensors + [node for node in nodes if not isinstance(value_of(node), torch.Tensor)]


def _late(program: Program) -> set[fx.Node]:
    """What runs after forward, and the tangents. Transfers and exchanges belong to the part in which they stand."""
    found: set[fx.Node] = set()
    for node in program.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        phase = info(node).phase
        where_it_stands = phase in (Phase.TRANSFER, Phase.SYNC)
        if phase is not Phase.FORWARD and (found or not where_it_stands):
            found.add(node)
    return found.union(node for node, _ in program.inputs_of("tangent"))


def partition(
    program: Program, layout: list[bool], state: Mapping[str, torch.Tensor] | None = None
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The two halves of a joint program, in torch's calling convention.

    Args:
        program: of stage joint, with tangents as inputs.
        layout: for each input that backward answers for, whether it has a gradient (None is returned otherwise).
        state: the tensors behind the inputs that are pass state, by target; they become buffers of the halves that use
            them, under the names of the inputs' nodes.

    Returns:
        forward: inputs → outputs, saved tensors, saved sizes; backward: saved sizes, saved tensors, tangents →
        gradients. Both use the boxed convention.
    """
    program = program.copy()
    apply_reuse(program)
    saved = saved_values(program)
    tensors = [node for node in saved if isinstance(value_of(node), torch.Tensor)]
    sizes = [node for node in saved if node not in tensors]
    tangents = [node for node, _ in program.inputs_of("tangent")]
    live = {node: (state or {})[spec.target] for node, spec in program.inputs_of("pass_state")}
    primals = [node for node in program.placeholders if node not in tangents and node not in live]
    results = [value for value, _ in program.outputs_of("mutation", "output", "base", "loss")]
    gradients = iter([value for value, _ in program.outputs_of("gradient")])
    answers = [next(gradients) if present else None for present in layout]
    late = _late(program)
    calls = [node for node in program.graph.nodes if node.op not in ("placeholder", "output")]
    early = [node for node in calls if node not in late]
    forward = _extract(primals, early, [*results, *tensors, *sizes], "GraphoptForward", live)
    late_calls = [node for node in calls if node in late]
    backward = _extract([*sizes, *tensors, *tangents], late_calls, answers, "GraphoptBackward", live)
    return forward, backward


def bind_state(module: fx.GraphModule, program: Program, state: Mapping[str, torch.Tensor]) -> None:
    """Let a copy of one half refer to the tensors of pass state themselves: torch compiles a deep copy of each half."""
    for node, spec in program.inputs_of("pass_state"):
        if hasattr(module, node.name):
            setattr(module, node.name, state[spec.target])


def _extract(
    inputs: list[fx.Node], calls: list[fx.Node], results: list[Any], name: str,
    live: Mapping[fx.Node, torch.Tensor] | None = None,
) -> fx.GraphModule:  # fmt: skip
    """A module of some calls; the tensors of ``live`` that these read become its buffers, and are not inputs."""
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        mapping[node] = graph.placeholder(node.name)
        mapping[node].meta = dict(node.meta)
    read = {source for node in calls for source in node.all_input_nodes}
    read |= {value for value in results if isinstance(value, fx.Node)}
    owner = nn.Module()
    for node, tensor in (live or {}).items():
        if node in read:
            owner.register_buffer(node.name, tensor)
            mapping[node] = graph.get_attr(node.name)
            mapping[node].meta = dict(node.meta)
    for node in calls:
        mapping[node] = graph.node_copy(node, lambda n: mapping[n])
    graph.output(tuple(mapping[value] if isinstance(value, fx.Node) else value for value in results))
    graph.set_codegen(_torch.BoxedCodeGen())
    return fx.GraphModule(owner, graph, class_name=name)


def split_update(program: Program) -> tuple[fx.GraphModule, fx.GraphModule, list[int], list[int]]:
    """A step program as two modules of the boxed convention: everything up to the gradients, and the update.

    Updates that run between calls of backward run behind all of them, in their order. What reads what the update has
    made or written, such as exchanges of parameters behind it, belongs to the update.

    Returns:
        The first module: (the inputs it needs) → (results of its own, then what the update reads).
        The second: (the inputs it needs, then what the first handed over) → (results of its own).
        For both, the positions of the inputs they need among the program's.
    """
    program = program.copy()
    update = _from_update_on(program)
    for node in update:
        program.output_node.prepend(node)
    apply_reuse(program)  # only now: no sum may overwrite a gradient that its update has yet to read
    calls = [node for node in program.graph.nodes if node.op not in ("placeholder", "output")]
    needs = dict.fromkeys(source for node in calls if node in update for source in node.all_input_nodes)
    handed = [node for node in needs if node.op != "placeholder" and node not in update]
    results = [value for value, _ in program.outputs_of("loss", "output", "gradient", "base", "mutation", "state")]
    first_uses = {source for node in calls if node not in update for source in node.all_input_nodes}
    first_uses |= {value for value in results if isinstance(value, fx.Node)}
    first_inputs = [node for node in program.placeholders if node in first_uses]
    second_inputs = [node for node in program.placeholders if node in needs]
    own = [value for value in results if value not in update]
    first = _extract(first_inputs, [n for n in calls if n not in update], [*own, *handed], "GraphoptGradients")
    late = [value for value in results if value in update]
    second = _extract([*second_inputs, *handed], [n for n in calls if n in update], late, "GraphoptUpdate")
    order = program.placeholders
    return first, second, [order.index(n) for n in first_inputs], [order.index(n) for n in second_inputs]


def _from_update_on(program: Program) -> dict[fx.Node, None]:
    """The calls of the update and those that depend on them, by value or by what they write, in order."""
    found: dict[fx.Node, None] = {}
    written: set[fx.Node] = set()
    for node in program.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        sources = node.all_input_nodes
        depends = not found.keys().isdisjoint(sources) or not written.isdisjoint(map(base_of, sources))
        if depends or info(node).phase is Phase.UPDATE:
            found[node] = None
            written.update(base_of(target) for target in schema.mutated_inputs(node))
    return found
