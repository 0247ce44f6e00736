"""Parameters averaged over ranks behind the update: local SGD and its kin."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import fx

from graphopt.ir.gradients import base_of
from graphopt.ir.node import Phase, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.communication.groups import Group
from graphopt.ir.program import Program
from graphopt.rewriting.distributed.dense.buckets import Item, pack
from graphopt.rewriting.distributed.flat_exchange import read_parts, start_exchange

__all__ = ["average_now", "average_parameters", "behind_update", "updated_parameters"]

aten = torch.ops.aten


def average_parameters(program: Program, group: Group, *, limit: int, state: bool, origin: str) -> list[str]:
    """Replace each parameter that the update has written by its mean over the ranks, in fused buckets.

    Low-precision copies that the program renews behind the update are renewed from the mean.

    Args:
        program: of stage step.
        group: at least two ranks.
        limit: bytes that close a bucket.
        state: whether the optimizer's state of floats (momentum, not step counts) is averaged as well.
        origin: whose nodes they are.

    Returns:
        the names of what is averaged.
    """
    wanted = updated_parameters(program)
    if state:
        wanted |= _state_of_floats(program)
    place = behind_update(program, set(wanted.values()))
    for bucket in _packed(((name, value_of(node)) for name, node in wanted.items()), limit):
        nodes = [wanted[name] for name in bucket]
        whose = f"{origin}: {bucket[0]}" if len(bucket) == 1 else f"{origin}: {bucket[0]} to {bucket[-1]}"
        start = start_exchange(program, nodes, place, group, "mean", whose)
        for node, part in zip(nodes, read_parts(program, start, nodes, place, whose), strict=True):
            program.insert(aten.copy_.default, (node, part), before=place, phase=Phase.SYNC, origin=whose, like=node)
    return list(wanted)


def updated_parameters(program: Program) -> dict[str, fx.Node]:
    """The parameters that the update of a program has written, by name."""
    written = {base_of(target) for node in program.phase_nodes(Phase.UPDATE) for target in schema.mutated_inputs(node)}
    return {spec.target: node for node, spec in program.inputs_of("parameter") if node in written}


def _state_of_floats(program: Program) -> dict[str, fx.Node]:
    """The optimizer's state that is a tensor of floats, by name; that which this step creates included."""
    known = {spec.target: node for node, spec in program.inputs_of("state")}
    created = {spec.target: value for value, spec in program.outputs_of("state") if isinstance(value, fx.Node)}
    found = [*known.items(), *created.items()]
    return {name: node for name, node in found if value_of(node).is_floating_point() and value_of(node).dim() > 0}


def _packed(items: Iterable[tuple[str, torch.Tensor]], limit: int) -> list[list[str]]:
    found = [
        Item(name, value.numel() * value.element_size(), index, (value.dtype, value.device))
        for index, (name, value) in enumerate(items)
    ]
    return [[item.name for item in bucket.items] for bucket in pack(found, limit)]


def behind_update(program: Program, wanted: set[fx.Node]) -> fx.Node:
    """The place behind the last write of what is exchanged; what only reads it behind the update moves behind that.

    Args:
        program: of stage step.
        wanted: parameters and state that ranks exchange behind the update.

    Returns:
        the node in front of which exchanges go; low-precision copies are renewed behind it.
    """
    last: fx.Node = program.output_node
    for node in program.phase_nodes(Phase.UPDATE):
        if wanted.intersection(base_of(target) for target in schema.mutated_inputs(node)) or node in wanted:
            last = node
    place: fx.Node = last if last.op == "output" else last.next
    position = {node: index for index, node in enumerate(program.graph.nodes)}
    copies = {node for node, spec in program.inputs_of("pass_state") if program.pass_state[spec.target].follows}
    renewed = [
        node
        for node in program.phase_nodes(Phase.UPDATE)
        if node.target is aten.copy_.default and node.args[0] in copies and position[node] < position[place]
    ]
    for node in renewed:
        place.prepend(node)
    return renewed[0] if renewed else place


def average_now(tensors: Sequence[torch.Tensor], group: Group, limit: int) -> None:
    """What ``average_parameters`` does to the parameters, outside of a program; all ranks have to call it."""
    named = {str(index): tensor for index, tensor in enumerate(tensors)}
    with torch.no_grad():
        for bucket in _packed(named.items(), limit):
            flat = torch.cat([named[name].reshape(-1) for name in bucket]).mul_(1.0 / group.size)
            dist.all_reduce(flat, group=group.handle)
            sizes = [named[name].numel() for name in bucket]
            for name, part in zip(bucket, torch.split(flat, sizes), strict=True):
                named[name].copy_(part.view(named[name].shape))
