"""What a joint program still needs once it is built: a seed, early writes, regions that are recomputed, names.

Gradients as autograd leaves them in ``.grad``: in their parameter's strides, in memory of their own.

Autograd copies a gradient that comes otherwise. A program makes the copy itself, right behind the gradient, as eager
mode does: copied at the end of backward, it would lie on top of all the other gradients, and no plan would know of it.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from graphopt.capture.call.assigned_buffers import IN_PARTS
from graphopt.errors import GraphBreakError
from graphopt.ir.gradients import base_of
from graphopt.ir.node import Phase, info, set_info, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.values import storage_bytes
from graphopt.ir.program import Program
from graphopt.rewriting.memory.recompute.checkpoint_segments import CHECKPOINT
from graphopt.rewriting.memory.recompute.rematerialize import rematerialize

__all__ = [
    "forget_statistics",
    "honour_regions",
    "match_layouts",
    "name_gradients",
    "own_gradients",
    "return_originals",
    "seed_backward",
    "settle_mutations",
]

logger = logging.getLogger(__name__)


def seed_backward(program: Program) -> None:
    """Replace the tangent of the loss by the constant one that ``loss.backward()`` starts from."""
    (node, spec), *others = program.inputs_of("tangent")
    assert not others
    first = next(program.phase_nodes(Phase.BACKWARD), program.output_node)
    value = value_of(node)
    args = (list(value.shape), 1.0)
    kwargs = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
    about: dict[str, Any] = {"origin": "the seed of the backward", "names": ("loss~",), "hint": "seed"}
    seed = program.insert(torch.ops.aten.full.default, args, kwargs, before=first, phase=Phase.BACKWARD, **about)
    node.replace_all_uses_with(seed)
    program.graph.erase_node(node)
    program.inputs.remove(spec)


def return_originals(program: Program) -> None:
    """Return what is beside the loss itself in place of its copy, where it is memory that nothing else holds."""
    values = list(program.output_values)
    kept = {base_of(value) for value in values if isinstance(value, fx.Node)}
    written = {base_of(source) for node in program.nodes for source in schema.mutated_inputs(node)}
    for place, (value, spec) in enumerate(zip(values, program.outputs, strict=True)):
        if spec.role != "output" or not isinstance(value, fx.Node) or value.target is not torch.ops.aten.clone.default:
            continue
        original = value.all_input_nodes[0]
        base = base_of(original)
        whole = base.op == "call_function" and storage_bytes(value_of(base)) == storage_bytes(value_of(value))
        if whole and base not in kept | written:
            kept.add(base)
            values[place] = original
    program.set_outputs(values, program.outputs)


def name_gradients(program: Program) -> None:
    """Let the gradient of ``layers.0.weight`` be found as ``layers.0.weight~``, at later stages too."""
    for value, spec in program.outputs_of("gradient"):
        if isinstance(value, fx.Node) and value.op == "call_function":
            set_info(value, replace(info(value), names=(*info(value).names, f"{spec.target}~")))


def forget_statistics(program: Program) -> None:
    """BatchNorm's backward in training reads the batch's statistics only; do not keep the running ones for it."""
    for node in program.phase_nodes(Phase.BACKWARD):
        if node.target is torch.ops.aten.native_batch_norm_backward.default and node.args[7] is True:
            node.args = (*node.args[:3], None, None, *node.args[5:])


def settle_mutations(program: Program) -> None:
    """Write new values into buffers as soon as the last reader of the old value has run.

    torch keeps every write for the end of forward; each new value would then stay alive until there.
    """
    position = {node: index for index, node in enumerate(program.graph.nodes)}
    for node in program.nodes:
        if node.target is not torch.ops.aten.copy_.default:
            continue
        old, new = node.args[:2]
        if not isinstance(old, fx.Node) or not isinstance(new, fx.Node) or old.op != "placeholder":
            continue
        readers = schema.readers(old) - {node}
        set_info(node, replace(info(node), module=info(old).names[0].rpartition(".")[0], origin="buffer update"))
        last = max([new, *readers], key=position.__getitem__)
        if position[last] < position[node]:
            last.append(node)
            position[node] = position[last]


def honour_regions(program: Program) -> None:
    """What the model runs under ``torch.utils.checkpoint`` is recomputed in backward, as in eager mode."""
    regions = [n for n in program.phase_nodes(Phase.FORWARD) if info(n).region is not None]
    inner = [node for node in regions if all(_stays_inside(node, user) for user in node.users)]
    if inner:
        done = rematerialize(program, inner, origin=CHECKPOINT)
        _tell_second_writes(program, {info(node).region for node in done.clones})


def _tell_second_writes(program: Program, regions: set[int | None]) -> None:
    """Say which buffers eager mode writes a second time, when it runs a segment again; a program writes them once."""
    written = [
        info(old).names[0]
        for node in program.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
        for old, new in [node.args[:2]]
        if old.op == "placeholder" and isinstance(new, fx.Node) and info(new).region in regions - {None}
    ]
    if written:
        logger.warning(
            "%s under torch.utils.checkpoint: eager mode updates %s once more when it runs the segment again for "
            "backward, a program once for each call",
            program.title,
            ", ".join([*written[:3], *([f"{len(written) - 3} more"] if len(written) > 3 else [])]),
        )


def _stays_inside(node: fx.Node, user: fx.Node) -> bool:
    """Whether a reader of a region's value lets it be recomputed: it is of the same region, or not of forward."""
    if user.op == "output":
        return False
    return info(user).region == info(node).region or info(user).phase is not Phase.FORWARD


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
