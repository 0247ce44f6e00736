"""Whole gradients that a rank adds up over several backwards, of which the last one reduces the sum.

So FSDP2 does where ``set_requires_gradient_sync(False)`` was called. The sums are state of the model's programs, which
its backwards add to in place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from graphopt.errors import GraphoptError
from graphopt.ir.node import Phase, info, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.communication.unreduced_gradient import ACCUMULATED_GRADIENT, NOT_REDUCED
from graphopt.ir.program import Program
from graphopt.ir.state import PassState

__all__ = ["accumulate_whole_gradients", "gradients_before_reduction", "sum_of_gradients", "tangents_of_sums"]

aten = torch.ops.aten

_SUMS = "whole-gradients/"
"""How the names of sums begin."""


def sum_of_gradients(parameter: str) -> str:
    """The name of the state that is the sum of a parameter's whole gradients."""
    return f"{_SUMS}{parameter}"


def accumulate_whole_gradients(program: Program) -> None:
    """Put state of the program in the place of ``accumulated_gradient``, and no gradient in that of ``not_reduced``.

    Args:
        program: of stage joint, rewritten in place.
    """
    names = {node: spec.target for node, spec in program.inputs_of("parameter")}
    for node in program.graph.find_nodes(op="call_function", target=ACCUMULATED_GRADIENT):
        given = schema.named_arguments(node)
        gradient, value = given["gradient"], value_of(node)
        target = sum_of_gradients(names[_parameter(given["shard"])])
        # what is there before the next sum begins means nothing to a checkpoint: FSDP2's has none either
        state = PassState(tuple(value.shape), value.dtype, value.device, saved=False, local=True)
        total = program.add_state(target, state)
        if gradient is not None:
            how = {"before": node, "phase": Phase.BACKWARD, "origin": info(node).origin, "like": node}
            total = program.insert(aten.add_.Tensor, (total, gradient), **how)
        node.replace_all_uses_with(total)
        program.graph.erase_node(node)
    values = [None if _is_not_reduced(value) else value for value in program.output_values]
    program.set_outputs(values, program.outputs)
    for node in program.graph.find_nodes(op="call_function", target=NOT_REDUCED):
        program.graph.erase_node(node)


def gradients_before_reduction(program: Program) -> dict[fx.Node, fx.Node]:
    """Of the gradients that models after ``fully_shard`` reduce together, by the shard's gradient the whole one.

    Args:
        program: of stage joint.
    """
    pieces: dict[fx.Node, list[fx.Node]] = {}
    for value, _ in program.outputs_of("gradient"):
        together = _reduced_together(value) if isinstance(value, fx.Node) else None
        if together is not None:
            pieces.setdefault(together, []).append(value)
    found: dict[fx.Node, fx.Node] = {}
    for together, gradients in pieces.items():
        wholes: Any = together.args[0]
        in_order = sorted(dict.fromkeys(gradients), key=lambda cut: schema.named_arguments(cut)["storage_offset"] or 0)
        if len(in_order) == len(wholes):
            found |= dict(zip(in_order, wholes, strict=True))
    return found


def _reduced_together(gradient: fx.Node) -> fx.Node | None:
    """What puts gradients together for the reduction that a shard's gradient is cut out of; None for others."""
    if schema.op_name(gradient) != "as_strided":
        return None
    node = gradient
    while node.op == "call_function" and node.all_input_nodes:
        if schema.op_name(node) == "_chunk_cat":
            return node
        node = node.all_input_nodes[0]
    return None


def tangents_of_sums(program: Program) -> dict[str, frozenset[str]]:
    """Which tangents have to come so that a backward adds to a sum of whole gradients, by the name of the sum.

    Args:
        program: of stage joint; sums to which it adds nothing are left out.
    """
    sums = {node: spec.target for node, spec in program.inputs_of("pass_state")}
    reach = {node: frozenset([node.name]) for node, _ in program.inputs_of("tangent")}
    found: dict[str, frozenset[str]] = {}
    for node in program.graph.nodes:
        if node.op == "call_function":
            reach[node] = frozenset[str]().union(*(reach.get(source, ()) for source in node.all_input_nodes))
            for written in schema.mutated_inputs(node):
                if sums.get(written, "").startswith(_SUMS):
                    found[sums[written]] = reach[node]
    return found


def _is_not_reduced(value: object) -> bool:
    return isinstance(value, fx.Node) and value.target is NOT_REDUCED


def _parameter(shard: fx.Node) -> fx.Node:
    """The parameter that a shard is, which a cast may have been put behind."""
    node = shard
    while node.op != "placeholder":
        if len(node.all_input_nodes) != 1:
            raise GraphoptError(f"{shard.name} is made of more than one tensor, and no shard of a parameter")
        (node,) = node.all_input_nodes
    return node
