"""The gradient of a part's input, use by use: whoever adds them up then does so in eager mode's order.

Autograd adds what the uses of a tensor give one by one, the latest use first. Where other code uses a part's input as
well, a sum that the part made by itself would be another order, and so other bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from graphopt import _torch
from graphopt.capture.forward.export import ForwardCapture
from graphopt.ir.gradients import base_of
from graphopt.ir.names import identifier
from graphopt.ir.node import InputSpec, info, set_info, set_value, value_of
from graphopt.ir.ops import schema
from graphopt.ir.program import Program
from graphopt.ir.region_effects import mutated_inputs

__all__ = ["split_uses"]


def split_uses(captured: ForwardCapture, tensors: dict[str, torch.Tensor]) -> tuple[ForwardCapture, list[str]]:
    """A forward program that takes a tensor with a gradient as often as it uses it.

    Args:
        captured: the program and its example tensors.
        tensors: parameters by name.

    Returns:
        The capture, with inputs behind those that it had, and for each of these the name of the input that it repeats:
        the given order of arguments for one tensor is that in which autograd is to add their gradients. What the
        program writes to has one input, as before.
    """
    program = captured.program.copy()
    graph = program.graph
    examples = list(captured.example_tensors)
    given = dict(zip((spec.target for _, spec in program.inputs_of("input")), examples, strict=True))
    written = {base_of(node) for call in graph.nodes for node in mutated_inputs(call, program.attributes)}
    repeated: list[str] = []
    for node, spec in program.inputs_of("parameter", "input"):
        example = tensors.get(spec.target) if spec.role == "parameter" else given[spec.target]
        if example is None or not example.requires_grad or node in written:
            continue
        _see_through(node)
        _, *earlier = _latest_first(node)
        for number, (user, place) in enumerate(earlier, start=2):
            new = _another(program, node, f"{spec.target} (use {number})")
            _replace_one(user, place, node, new)
            examples.append(example.detach().requires_grad_())
            repeated.append(spec.target)
    program.erase_dead()
    return dataclasses.replace(captured, program=program, example_tensors=examples), repeated


_ITSELF = (
    "to",
    "type_as",
    "contiguous",
    "resolve_conj",
    "resolve_neg",
    "flatten",
    "dropout",
    "feature_dropout",
    "alpha_dropout",
    "atleast_1d",
    "atleast_2d",
    "atleast_3d",
)
"""Ops that give their argument itself where there is nothing to change, and then are no step of autograd's."""


def _see_through(node: fx.Node) -> None:
    """Let calls that use what an op gives use ``node``, where the op gives it itself."""
    for user in node.graph.nodes:
        takes = user.op == "call_function" and user.args and user.args[0] is node
        if takes and schema.op_name(user) in _ITSELF and _is_itself(user, node):
            user.replace_all_uses_with(node)


def _is_itself(call: fx.Node, node: fx.Node) -> bool:
    result, tensor = value_of(call), value_of(node)
    if schema.op_name(call) in ("dropout", "feature_dropout", "alpha_dropout"):
        return not call.args[2]
    copied = "copy" in call.kwargs or any(argument is True for argument in call.args)
    kind, other = (tensor.dtype, tensor.device, tensor.layout), (result.dtype, result.device, result.layout)
    return not copied and kind == other and tensor.shape == result.shape and tensor.stride() == result.stride()


def _another(program: Program, node: fx.Node, target: str) -> fx.Node:
    """One more input behind all others, for the same tensor."""
    last = program.placeholders[-1]
    with program.graph.inserting_after(last):
        new = program.graph.placeholder(identifier(target))
    set_value(new, value_of(node))
    set_info(new, dataclasses.replace(info(node), names=(target,), origin="input"))
    program.inputs.append(InputSpec("input", target))
    return new


def _latest_first(node: fx.Node) -> list[tuple[fx.Node, int]]:
    """Where a value is used, in the order in which autograd adds up gradients: calls, and which of their arguments."""
    found: list[tuple[fx.Node, int]] = []
    for user in reversed(list(_users(node))):
        places = range(sum(source is node for source in schema.nodes_in((user.args, user.kwargs))))
        found += [(user, place) for place in places]
    return found or [(node, 0)]


def _users(node: fx.Node) -> Iterator[fx.Node]:
    """The calls that use a value, in program order."""
    return (user for user in node.graph.nodes if node in user.all_input_nodes)


def _replace_one(user: fx.Node, place: int, node: fx.Node, new: fx.Node) -> None:
    """Let a call take another value in one of the places where it takes ``node``."""
    seen = iter(range(len(schema.nodes_in((user.args, user.kwargs)))))

    def other(item: Any) -> Any:
        return new if item is node and next(seen) == place else item

    user.args, user.kwargs = _torch.map_aggregate((user.args, user.kwargs), other)
