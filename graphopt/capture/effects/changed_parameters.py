"""Parameters that forward changes behind autograd's back: ``w.data.clamp_()``, ``max_norm`` of embeddings.

torch treats the changed parameter as a result of forward, with a tangent of its own. A parameter is a leaf, and no
gradient goes through a change of a leaf: that tangent is always zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from graphopt.ir.node import Phase, info, set_info, value_of
from graphopt.ir.program import Program

__all__ = ["finish_changed_parameters"]


def finish_changed_parameters(program: Program, tangents: Sequence[fx.Node]) -> None:
    """Leave out what comes of zero tangents, and let a program that is differentiated whole write changes itself.

    Args:
        program: a joint program, with the outputs that torch has given it.
        tangents: those of its placeholders that are the tangents of changed parameters.
    """
    if not tangents:
        return
    _leave_out_zeros(program, tangents)
    if any(spec.role == "loss" for spec in program.outputs):
        _write_changes(program)
        _without_tangents(program, tangents)


def _leave_out_zeros(program: Program, tangents: Sequence[fx.Node]) -> None:
    """Give no gradient where it comes of zero tangents alone, and leave these out of sums.

    A gradient that is none is not zero: an optimizer leaves its parameter alone.
    """
    zeros = dict.fromkeys(tangents)
    others = {node for node, _ in program.inputs_of("tangent")} - zeros.keys()
    for node in program.nodes:
        sources = [source for source in node.all_input_nodes if source in zeros or source in others]
        if node.op == "call_function" and sources:
            if all(source in zeros for source in sources):
                zeros[node] = None  # backward is linear in its tangents
            else:
                others.add(node)
    for node in [node for node in program.nodes if node in others and node.target is torch.ops.aten.add.Tensor]:
        one, other = node.args[:2]
        if (one in zeros) != (other in zeros) and node.kwargs.get("alpha", 1) == 1:
            kept = other if one in zeros else one
            assert isinstance(kept, fx.Node)
            set_info(kept, replace(info(kept), names=tuple(dict.fromkeys((*info(kept).names, *info(node).names)))))
            node.replace_all_uses_with(kept)
            program.graph.erase_node(node)
    pairs = zip(program.output_values, program.outputs, strict=True)
    program.output_node.args = (
        tuple(None if spec.role == "gradient" and value in zeros else value for value, spec in pairs),
    )


def _write_changes(program: Program) -> None:
    """Write changed parameters at the end of forward, in place of handing them to torch, which would copy them."""
    placeholders = {spec.target: node for node, spec in program.inputs_of("parameter")}
    first = next(program.phase_nodes(Phase.BACKWARD), program.output_node)
    pairs = list(zip(program.output_values, program.outputs, strict=True))
    kept = [pair for pair in pairs if pair[1].role != "mutation" or pair[1].target not in placeholders]
    for changed, spec in pairs:
        if spec.role == "mutation" and spec.target in placeholders:
            args = (placeholders[spec.target], changed)
            origin = "change of a parameter"
            program.insert(torch.ops.aten.copy_.default, args, before=first, phase=Phase.FORWARD, origin=origin)
    program.output_node.args = (tuple(value for value, _ in kept),)
    program.outputs[:] = [spec for _, spec in kept]


def _without_tangents(program: Program, tangents: Sequence[fx.Node]) -> None:
    """Take tangents out of a program's inputs; zeros stand for those that an op still reads beside others."""
    program.erase_dead()
    specs = dict(program.inputs_of("tangent"))
    for node in tangents:
        if node.users:
            value = value_of(node)
            kwargs = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
            about: dict[str, Any] = {"origin": "the gradient of a change", "hint": "zeros"}
            first = next(program.phase_nodes(Phase.BACKWARD))
            args = (list(value.shape), 0.0)
            full = torch.ops.aten.full.default
            node.replace_all_uses_with(program.insert(full, args, kwargs, before=first, phase=Phase.BACKWARD, **about))
        program.graph.erase_node(node)
        program.inputs.remove(specs[node])
