"""Low-precision copies of parameters that live across steps, whose float32 masters the optimizer updates (level O2).

The masters are the model's own parameters, so the model's and the optimizer's ``state_dict`` keep float32. As in
Micikevicius et al., "Mixed Precision Training", 2018 (arXiv 1710.03740), section 3.1.
"""

from __future__ import annotations

import torch
from torch import fx

from graphopt.ir.gradients import base_of, update_gradients
from graphopt.ir.node import Phase, value_of
from graphopt.ir.ops import schema
from graphopt.ir.program import Program
from graphopt.ir.state import PassState
from graphopt.rewriting.precision.autocast_rules import LOW_DTYPES
from graphopt.rewriting.precision.casts import is_cast

__all__ = ["COPIES", "cast_late", "hold_copies"]

COPIES = "low-precision/"
"""How the names of kept copies begin; the parameter's name follows."""

_LOW = tuple(LOW_DTYPES.values())


def hold_copies(program: Program, origin: str) -> list[str]:
    """Read parameters from kept copies in low precision, which are renewed behind the update, in place of casts.

    Args:
        program: of stage step.
        origin: the pass that asks, for people.

    Returns:
        the names of the parameters. One that is not contiguous keeps its cast.
    """
    kept: list[str] = []
    for node, spec in program.inputs_of("parameter"):
        casts = [user for user in node.users if is_cast(user) and user.kwargs["dtype"] in _LOW]
        value = value_of(node)
        dtypes = {value_of(cast).dtype for cast in casts}
        if len(dtypes) != 1 or not value.is_contiguous():
            continue
        (dtype,) = dtypes
        target = f"{COPIES}{spec.target}"
        copy = program.add_state(
            target, PassState(tuple(value.shape), dtype, value.device, source=spec.target, follows=True, saved=False)
        )
        for cast in casts:
            cast.replace_all_uses_with(copy)
            program.graph.erase_node(cast)
        if any(node in map(base_of, schema.mutated_inputs(call)) for call in program.phase_nodes(Phase.UPDATE)):
            whose = f"{origin}: {spec.target} in low precision"
            renew = torch.ops.aten.copy_.default
            program.insert(renew, (copy, node), before=program.output_node, phase=Phase.UPDATE, origin=whose)
        kept.append(spec.target)
    return kept


def cast_late(program: Program) -> int:
    """Let gradients wait for the update in low precision: cast them up just before it; returns how many.

    Args:
        program: of stage step, before anything else reads its gradients.
    """
    moved = 0
    position = {node: index for index, node in enumerate(program.graph.nodes)}
    for gradient in update_gradients(program):
        if not _widens(gradient) or any(reader.op == "output" for reader in gradient.users):
            continue
        due: fx.Node = min(gradient.users, key=position.__getitem__)
        if due is not gradient.next:
            due.prepend(gradient)
            moved += 1
    return moved


def _widens(node: fx.Node) -> bool:
    """Whether a call casts from a low dtype up, in differentiation's own form too."""
    if node.target is not torch.ops.aten._to_copy.default:
        return False
    (source,) = node.all_input_nodes
    return value_of(source).dtype in _LOW and value_of(node).dtype == torch.float32
