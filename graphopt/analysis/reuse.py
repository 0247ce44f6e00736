"""Sums that can be taken in place: what eager autograd does when it accumulates gradients.

A program is functional: ``add`` makes a third tensor. Where one operand belongs to backward and dies in the sum, the
generated code adds into it instead, as autograd's own accumulation does, and the memory model counts it so.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from graphopt import _torch
from graphopt.ops import schema
from graphopt.program import Phase, Program, info
from graphopt.values import storage_bytes

__all__ = ["apply_reuse", "reused_operands"]

_ADD = torch.ops.aten.add.Tensor
_ADD_IN_PLACE = torch.ops.aten.add_.Tensor


def reused_operands(program: Program) -> dict[fx.Node, fx.Node]:
    """For each sum in backward that can be taken in place, the operand that it may overwrite."""
    position = {node: index for index, node in enumerate(program.graph.nodes)}
    root: dict[fx.Node, fx.Node] = {}
    last: dict[fx.Node, int] = {}
    for node in program.graph.nodes:
        sources = schema.aliased_inputs(node) if node.op == "call_function" else []
        root[node] = root[sources[0]] if sources else node
        uses = [position[user] for user in node.users]
        last[root[node]] = max([last.get(root[node], -1), position[node], *uses])
    found: dict[fx.Node, fx.Node] = {}
    for node in program.phase_nodes(Phase.BACKWARD):
        if node.target is _ADD and not node.kwargs and len(node.args) == 2:
            operand = next((a for a in node.args if _may_overwrite(node, a, root, last, position)), None)
            if isinstance(operand, fx.Node):
                found[node] = operand
    return found


def _may_overwrite(
    node: fx.Node, operand: object, root: Mapping[fx.Node, fx.Node], last: Mapping[fx.Node, int],
    position: Mapping[fx.Node, int],
) -> bool:  # fmt: skip
    if not isinstance(operand, fx.Node) or operand.op != "call_function":
        return False
    base = root[operand]
    if base.op != "call_function" or info(base).phase is not Phase.BACKWARD or last[base] != position[node]:
        return False
    others = [root[a] for a in node.args if isinstance(a, fx.Node) and a is not operand]
    mine, result, whole = operand.meta.get("val"), node.meta.get("val"), base.meta.get("val")
    if (
        not isinstance(mine, torch.Tensor)
        or not isinstance(result, torch.Tensor)
        or not isinstance(whole, torch.Tensor)
    ):
        return False
    if base in others or mine.dtype != result.dtype:
        return False
    same = tuple(mine.shape) == tuple(result.shape) and mine.stride() == result.stride()
    return same and storage_bytes(whole) == storage_bytes(result) == _dense_bytes(mine)


def _dense_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the elements alone; equal to the storage's where no element is shared or skipped."""
    count = tensor.element_size()
    for size in tensor.shape:
        count *= _torch.size_hint(size)
    return count


def apply_reuse(program: Program) -> None:
    """Write the sums of ``reused_operands`` as in-place ops; for a copy that is about to be compiled."""
    for node, operand in reused_operands(program).items():
        other = next((a for a in node.args if a is not operand), operand)
        node.target = _ADD_IN_PLACE
        node.args = (operand, other)
