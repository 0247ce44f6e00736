"""From a program to the GraphModule that runs it, with calls taken in place as eager autograd takes sums of gradients.

A program is functional: ``add`` makes a third tensor. Where an operand dies in a sum, a product, an activation, a
softmax or the backward of one, the generated code writes the result over it, and the memory model counts it so. Neither
inputs, nor what forward hands to backward (which may run twice), nor what a transfer or a collective still reads is
overwritten.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from graphopt import _torch
from graphopt.errors import GraphoptError
from graphopt.ir.node import Phase, info, own_phase, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.inplace import InPlace, as_in_place, in_place
from graphopt.ir.ops.values import storage_bytes
from graphopt.ir.program import Program

__all__ = ["apply_reuse", "overwritable_of_forward", "reused_operands", "to_graph_module"]

_ADD = torch.ops.aten.add.Tensor
_LAID_OUT_ANEW = ("mm", "addmm", "bmm", "baddbmm", "native_layer_norm_backward", "embedding_dense_backward")
"""Ops whose results have the same strides whatever those of their arguments."""

_BEHIND_FORWARD = (Phase.BACKWARD, Phase.RECOMPUTE)


def reused_operands(program: Program, *, in_forward: bool = True) -> dict[fx.Node, fx.Node]:
    """For each call that can be taken in place, the operand that it may overwrite.

    Args:
        program: of any stage.
        in_forward: whether calls of forward are among them; without, forward's values keep storages of their own, as
            they must where some of them are to be made again.
    """
    root, last = _lives(program)
    position = {node: index for index, node in enumerate(program.graph.nodes)}
    open_strides = _with_open_strides(program)
    phases = (Phase.FORWARD, *_BEHIND_FORWARD) if in_forward and not program.context.compiled else _BEHIND_FORWARD
    phase_of = _phase if in_forward else own_phase
    found: dict[fx.Node, fx.Node] = {}
    for node in program.graph.nodes:
        form = in_place(node)
        if form is None or phase_of(node) not in phases or (program.context.compiled and node.target is not _ADD):
            continue
        dying = [a for a in _operands(node, form) if last[root[a]] == position[node]]
        if not in_forward:
            dying = [a for a in dying if root[a].op != "call_function" or own_phase(root[a]) is not Phase.FORWARD]
        if not open_strides.isdisjoint(node.all_input_nodes):
            dying = [a for a in dying if form.dimension is None and a is node.args[form.layout]]
        operand = next((a for a in dying if _may_overwrite(node, a, root)), None)
        if operand is not None:
            found[node] = operand
    return found


def _phase(node: fx.Node) -> Phase:
    return info(node).phase


def _with_open_strides(program: Program) -> set[fx.Node]:
    """Values whose strides follow those of the tangents, which come as the loss outside of the program makes them.

    A pointwise call lays its result out as one of its arguments is (``InPlace.layout``): that one may be overwritten
    whatever its strides, and another one only where all of them are known.
    """
    found = {node for node, _ in program.inputs_of("tangent") if value_of(node).dim() > 1}
    if found:
        for node in program.graph.nodes:
            settled = node.op != "call_function" or schema.op_name(node) in _LAID_OUT_ANEW
            if not settled and not found.isdisjoint(node.all_input_nodes):
                found.add(node)
    return found


def overwritable_of_forward(program: Program) -> dict[fx.Node, list[fx.Node]]:
    """For each call that can be taken in place, the operands of forward that it may overwrite once they die in it."""
    if program.context.compiled:
        return {}
    root, _ = _lives(program)
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in program.graph.nodes:
        form = in_place(node)
        if form is not None:
            mine = [a for a in _operands(node, form) if own_phase(root[a]) is Phase.FORWARD]
            found[node] = [a for a in mine if _may_overwrite(node, a, root)]
    return found


def _operands(node: fx.Node, form: InPlace) -> list[fx.Node]:
    arguments = [node.args[n] for n in form.operands if n < len(node.args)]
    return [argument for argument in arguments if isinstance(argument, fx.Node)]


def _lives(program: Program) -> tuple[dict[fx.Node, fx.Node], dict[fx.Node, int]]:
    """The node that stands for the memory behind each value, and the position of the last call that reads it."""
    position = {node: index for index, node in enumerate(program.graph.nodes)}
    root: dict[fx.Node, fx.Node] = {}
    last: dict[fx.Node, int] = {}
    elements: dict[tuple[object, object], fx.Node] = {}
    for node in program.graph.nodes:
        if schema.is_own_tensor(node):
            root[node] = elements.setdefault(node.args, node)
        else:
            sources = schema.aliased_inputs(node) if node.op == "call_function" else []
            root[node] = root[sources[0]] if sources else node
        reads = [position[node], *(position[user] for user in node.users)]
        reads += [position[wait] for user in node.users if schema.is_collective(user) for wait in user.users]
        last[root[node]] = max(last.get(root[node], -1), *reads)
    return root, last


def _may_overwrite(node: fx.Node, operand: fx.Node, root: Mapping[fx.Node, fx.Node]) -> bool:
    """Whether an operand is a whole tensor of the program's own and of the call's phase, laid out as the result is."""
    base = root[operand]
    if operand.op != "call_function" or base.op != "call_function" or info(node).phase is not info(base).phase:
        return False
    if base in (root[a] for a in node.all_input_nodes if a is not operand):
        return False
    if not isinstance(schema.maker(base).target, _torch.OpOverload):
        return False  # what other calls return may be what they were given
    mine, result, whole = value_of(operand), value_of(node), value_of(base)
    if not (isinstance(mine, torch.Tensor) and isinstance(result, torch.Tensor) and isinstance(whole, torch.Tensor)):
        return False
    if result.is_complex():
        return False  # a product of complex numbers rounds otherwise where it is written over a factor
    if mine.dtype != result.dtype or tuple(mine.shape) != tuple(result.shape) or mine.stride() != result.stride():
        return False
    if _is_contiguous_by_other_strides(mine):
        return False  # what kernels make anew has the usual strides, by which those behind it choose how they round
    return storage_bytes(whole) == storage_bytes(result) == _dense_bytes(mine)


def _is_contiguous_by_other_strides(tensor: torch.Tensor) -> bool:
    """Whether a tensor is contiguous though axes of one element have strides that a new tensor would not have."""
    step, others = 1, False
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        elements = _torch.size_hint(size)
        if _torch.size_hint(stride) != step:
            if elements != 1:
                return False
            others = True
        step *= max(elements, 1)
    return others


def _dense_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the elements alone; equal to the storage's where no element is shared or skipped."""
    count = tensor.element_size()
    for size in tensor.shape:
        count *= _torch.size_hint(size)
    return count


def apply_reuse(program: Program) -> None:
    """Write the calls of ``reused_operands`` in place; for a copy that is about to be compiled."""
    for node, operand in reused_operands(program).items():
        as_in_place(node, operand)


def to_graph_module(program: Program) -> fx.GraphModule:
    """A GraphModule with the boxed calling convention: ``module.forward(list_of_inputs)`` empties the list.

    Calls are taken in place where an operand dies in them, as the memory model assumes (``ir/lowering.py``).

    Raises:
        GraphoptError: for a program that was captured without data.
    """
    device = program.context.device
    if device is not None:
        raise GraphoptError(
            f"{program.title or 'this program'} was captured without data for {device.name}: it is planned, printed, "
            "drawn and saved, and cannot run\n  what to do: on that device, capture it again without device="
        )
    copy = program.copy()
    apply_reuse(copy)
    copy.graph.set_codegen(_torch.BoxedCodeGen())
    return fx.GraphModule(dict(program.attributes), copy.graph, class_name=f"Graphopt{program.stage.title()}")
