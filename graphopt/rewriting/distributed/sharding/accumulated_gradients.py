"""Whole gradients that a rank adds up over several backwards, of which the last one reduces the sum.

So FSDP2 does where ``set_requires_gradient_sync(False)`` was called. The sums are state of the model's programs, which
its backwards add to in place.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    reduced: set[str] = set()
    for node in program.graph.find_nodes(op="call_function", target=ACCUMULATED_GRADIENT):
        target = sum_of_gradients(names[_parameter(schema.named_arguments(node)["shard"])])
        waits = any(map(_is_not_reduced, node.users))
        again = target in reduced  # of a module that runs several times; what waits is in the first reduction
        node.replace_all_uses_with(_alone(program, node) if again else _added_to(program, node, target))
        reduced |= set() if waits else {target}
        program.graph.erase_node(node)
    _leave_without(program)


def _added_to(program: Program, node: fx.Node, target: str) -> fx.Node:
    """The sum of a name with the gradient of a call added to it."""
    value, gradient = value_of(node), schema.named_arguments(node)["gradient"]
    # what is there before the next sum begins means nothing to a checkpoint: FSDP2's has none either
    state = PassState(tuple(value.shape), value.dtype, value.device, saved=False, local=True)
    total = program.add_state(target, state)
    return total if gradient is None else _insert(program, node, aten.add_.Tensor, (total, gradient))


def _alone(program: Program, node: fx.Node) -> fx.Node:
    """The gradient of a call in the dtype of sums; zeros where it has none."""
    value = value_of(node)
    gradient: fx.Node | None = schema.named_arguments(node)["gradient"]
    if gradient is None:
        zeros = {"dtype": value.dtype, "device": value.device}
        return _insert(program, node, aten.zeros.default, (list(value.shape),), zeros)
    if value_of(gradient).dtype == value.dtype:
        return gradient
    return _insert(program, node, aten._to_copy.default, (gradient,), {"dtype": value.dtype})


def _insert(
    program: Program, node: fx.Node, op: Any, args: Sequence[Any], kwargs: dict[str, Any] | None = None
) -> fx.Node:
    origin = info(node).origin
    return program.insert(op, args, kwargs, before=node, phase=Phase.BACKWARD, origin=origin, like=node)


def _leave_without(program: Program) -> None:
    """Give shards no gradient that get none yet; of modules that run several times those are added up."""
    without: dict[fx.Node, None] = {}
    for node in program.graph.nodes:
        sources = node.all_input_nodes
        if _is_not_reduced(node) or (sources and schema.op_name(node) == "add" and without.keys() >= set(sources)):
            without[node] = None
    program.set_outputs([None if value in without else value for value in program.output_values], program.outputs)
    for node in reversed(without):
        program.graph.erase_node(node)


def gradients_before_reduction(program: Program) -> dict[fx.Node, fx.Node]:
    """Of the gradients that models after ``fully_shard`` reduce together, by the shard's gradient the whole one.

    Args:
        program: of stage joint.
    """
    pieces: dict[fx.Node, list[fx.Node]] = {}
    for node in program.phase_nodes(Phase.BACKWARD):
        together = _reduced_together(node)
        if together is not None:
            pieces.setdefault(together, []).append(node)
    found: dict[fx.Node, fx.Node] = {}
    for together, gradients in pieces.items():
        wholes: Any = together.args[0]
        in_order = sorted(gradients, key=lambda cut: schema.named_arguments(cut)["storage_offset"] or 0)
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
                    found[sums[written]] = found.get(sums[written], frozenset()) | reach[node]
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
