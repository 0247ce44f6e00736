"""Gradients as autograd leaves them in ``.grad``: in their parameter's strides, in memory of their own.

Autograd copies a gradient that comes otherwise. A program makes the copy itself, right behind the gradient, as eager
mode does: copied at the end of backward, it would lie on top of all the other gradients, and no plan would know of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from graphopt.capture.assigned_buffers import IN_PARTS
from graphopt.errors import GraphBreakError
from graphopt.ir.node import Phase, info, value_of
from graphopt.ir.program import Program

__all__ = ["match_layouts", "own_gradients"]


def match_layouts(program: Program) -> None:
    """Give each gradient its parameter's strides. Fused kernels walk parameter, gradient and state by address.

    Raises:
        GraphBreakError: for a gradient that is sparse, which has no strides.
    """
    parameters = {spec.target: node for node, spec in program.inputs_of("parameter")}
    values = list(program.output_values)
    for index, (value, spec) in enumerate(zip(values, program.outputs, strict=True)):
        if spec.role != "gradient" or spec.target not in parameters or not isinstance(value, fx.Node):
            continue
        wanted = value_of(parameters[spec.target])
        if value_of(value).layout is not torch.strided:
            raise GraphBreakError(
                f"{program.title}: the gradient of {spec.target} is sparse, and programs have dense tensors only\n"
                f"  where: {info(value).source or 'an unknown line'}\n"
                f"  what to do: make the embedding without sparse=True, with an optimizer for dense gradients{IN_PARTS}"
            )
        if value_of(value).stride() != wanted.stride():
            values[index] = _copied_like(program, value, wanted)
            program.hand_over_name(f"{spec.target}~", value, values[index])
    program.set_outputs(values, program.outputs)


def own_gradients(program: Program) -> None:
    """Copy gradients of parameters that are one tensor with another gradient, or with what the caller holds.

    Views of one tensor autograd leaves as they are.
    """
    values = list(program.output_values)
    taken = {value for value, _ in program.outputs_of("output", "base")}.union(program.placeholders)
    for index, (value, spec) in enumerate(zip(values, program.outputs, strict=True)):
        if spec.role != "gradient" or not isinstance(value, fx.Node):
            continue
        if value in taken:
            values[index] = _copied_like(program, value, value_of(value))
            program.hand_over_name(f"{spec.target}~", value, values[index])
        taken.add(value)
    program.set_outputs(values, program.outputs)


def _copied_like(program: Program, gradient: fx.Node, wanted: torch.Tensor) -> fx.Node:
    """A copy of a gradient with the strides of ``wanted``."""
    backward = gradient.op == "call_function" and info(gradient).phase is not Phase.FORWARD
    place: dict[str, Any] = {"after": gradient} if backward else {"before": program.output_node}
    common: dict[str, Any] = {"phase": Phase.BACKWARD, "like": gradient, "origin": "gradient layout"}
    if wanted.is_contiguous():
        options: dict[str, Any] = {"memory_format": torch.contiguous_format}
        return program.insert(torch.ops.aten.clone.default, (gradient,), options, **place, **common)
    layout = (list(wanted.shape), list(wanted.stride()))
    options = {"dtype": wanted.dtype, "device": wanted.device}
    empty = program.insert(torch.ops.aten.empty_strided.default, layout, options, **place, **common)
    return program.insert(torch.ops.aten.copy.default, (empty, gradient), after=empty, **common)
