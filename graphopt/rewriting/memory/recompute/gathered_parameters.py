"""Parameters that forward gathers by ops of the program, as those of models after ``fully_shard``.

So are activations that tensor parallelism has divided along the sequence.

A whole parameter is a value of forward like an activation: saved for backward, or freed and gathered again, which is
recomputing it. Where the model asks for the latter, that is a segment of its own, as ``torch.utils.checkpoint`` makes
them; a planner takes it for a hint and weighs gathers by the seconds that the link takes for their bytes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from graphopt import _torch
from graphopt.analysis.costs.cost import CostReport, costs_of
from graphopt.errors import GraphoptError
from graphopt.ir.memory.timeline import MemoryTimeline
from graphopt.ir.node import Phase, info, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.communication.collectives import ALL_REDUCE, REDUCE_SCATTER, WAIT, gather_shards
from graphopt.ir.ops.communication.groups import Group, find_group
from graphopt.ir.program import Program
from graphopt.rewriting.distributed.prediction.collective import seconds_on_link
from graphopt.rewriting.distributed.prediction.link import Link
from graphopt.rewriting.distributed.prediction.measured_link import link_between
from graphopt.rewriting.memory.recompute.checkpoint_segments import CHECKPOINT
from graphopt.rewriting.memory.recompute.rematerialize import rematerialize

__all__ = [
    "costs_with_gathers",
    "free_whole_parameters",
    "gather_by_own_op",
    "gathered_names",
    "gathering_group",
    "made_of_shards",
    "measure_gathers",
    "reduce_in_place",
    "sharding_group",
]

aten = torch.ops.aten

_COPIES = ("split_with_sizes_copy", "as_strided")
"""Ops beside views that cut whole parameters out of what was gathered."""


def free_whole_parameters(program: Program) -> int:
    """Free whole parameters behind forward, and gather them again for backward, where the model asks for that.

    Args:
        program: of stage joint, rewritten in place.

    Returns:
        how many gathers are recomputed.
    """
    again: set[fx.Node] = set()
    gathers = [node for node in _gathers(program) if schema.named_arguments(node)["frees"]]
    for gather in gathers:
        again |= {gather, *made_of_shards(gather)}
    for node in program.phase_nodes(Phase.FORWARD):
        cuts = schema.is_view(node) or node.target is operator.getitem or schema.op_name(node) in _COPIES
        if cuts and node.op == "call_function" and again.intersection(node.all_input_nodes[:1]):
            again.add(node)
    done = rematerialize(program, [node for node in program.nodes if node in again], origin=CHECKPOINT)
    return sum(gather in done.clones for gather in gathers)


def gather_by_own_op(program: Program) -> int:
    """Let what the dispatch of distributed tensors gathers be gathered by an op that may be recomputed.

    Args:
        program: of stage joint, which all ranks run; rewritten in place.

    Returns:
        how many gathers there are.
    """
    found = [
        start
        for start in program.graph.find_nodes(op="call_function", target=_torch.all_gather_into_tensor)
        if [user.target for user in start.users] == [WAIT]
    ]
    for start in found:
        (wait,) = start.users
        made = program.insert(
            gather_shards,
            (start.args[0], start.args[1], False, start.args[2]),
            before=start,
            phase=info(start).phase,
            origin=info(start).origin,
            like=start,
            names=info(wait).names,
            hint="gather_shards",
        )
        wait.replace_all_uses_with(made)
        program.graph.erase_node(wait)
        program.graph.erase_node(start)
    return len(found)


def reduce_in_place(program: Program) -> int:
    """Let gradients of CPU tensors be reduced where they are, of which each rank then keeps its part.

    Gloo has no reduce-scatter: what torch calls so reduces a copy of everything. The sums are the same to the last bit.

    Args:
        program: of stage joint, rewritten in place.

    Returns:
        how many reductions there are.
    """
    found = [
        node
        for node in program.graph.find_nodes(op="call_function", target=REDUCE_SCATTER)
        if _gathers(program) and value_of(node).device.type == "cpu" and len(node.all_input_nodes[0].users) == 1
    ]
    for start in found:
        flat, operation, _, name = start.args
        (wait,) = start.users
        how: dict[str, Any] = {"before": start, "phase": info(start).phase, "origin": info(start).origin, "like": start}
        reducing = program.insert(ALL_REDUCE, (flat, operation, name), hint="all_reduce", **how)
        reduced = program.insert(WAIT, (reducing,), **how)
        rows = value_of(start).shape[0]
        rank = find_group(str(name)).rank
        mine = program.insert(aten.slice.Tensor, (reduced, 0, rank * rows, (rank + 1) * rows), **how)
        wait.replace_all_uses_with(program.insert(aten.clone.default, (mine,), **how))
        program.graph.erase_node(wait)
        program.graph.erase_node(start)
    return len(found)


def _gathers(program: Program) -> list[fx.Node]:
    return [node for node in program.phase_nodes(Phase.FORWARD) if schema.is_gather(node)]


def made_of_shards(gather: fx.Node) -> set[fx.Node]:
    """What puts shards together for a gather, which takes little and is not worth saving."""
    found: set[fx.Node] = set()
    pending = list(gather.all_input_nodes)
    while pending:
        node = pending.pop()
        if node.op == "call_function" and node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found


def gathering_group(program: Program) -> Group | None:
    """The ranks that have to run the same gathers; None where there are none.

    With replicas of shards that is every rank, since gradients are reduced over all of them.
    """
    names = {str(schema.named_arguments(node)["group_name"]) for node in _gathers(program)}
    if not names:
        return None
    reduced = {
        str(schema.named_arguments(node).get("group_name", ""))
        for node in program.phase_nodes(*Phase)
        if schema.is_collective(node) and not schema.hands_on(node)
    }
    if len(names | reduced) == 1:
        return find_group(names.pop())
    return find_group(dist.group.WORLD.group_name)  # type: ignore[union-attr]


def sharding_group(program: Program) -> Group | None:
    """The ranks among which parameters are sharded that forward gathers; None where there are none.

    Raises:
        GraphoptError: where these are not the same for all of them.
    """
    names = {str(schema.named_arguments(node)["group_name"]) for node in _gathers(program)}
    if len(names) > 1:
        raise GraphoptError(f"parameters are sharded among the ranks of several groups: {', '.join(sorted(names))}")
    return find_group(names.pop()) if names else None


def gathered_names(program: Program) -> set[str]:
    """The parameters of which forward gathers the shards, by name."""
    put = {node for gather in _gathers(program) for node in (*made_of_shards(gather), gather)}
    return {spec.target for node, spec in program.inputs_of("parameter") if put.intersection(node.users)}


def measure_gathers(program: Program, cost: str) -> None:
    """Measure the link of gathers, where it is not known; all ranks come here together before one of them plans."""
    for node in _gathers(program):
        _link(program, node, cost)


def costs_with_gathers(
    program: Program,
    memory: MemoryTimeline,
    cost: str,
    progress: Callable[[int, int], None] | None = None,
) -> CostReport:
    """Seconds of a program's ops, of which gathers of parameters take what they do on their link.

    Args:
        program: whose link is known (``measure_gathers``).
        memory: its timeline.
        cost: where seconds come from.
        progress: as ``cost_report`` takes it.
    """
    costs = costs_of(memory, cost, progress=progress)
    gathers = _gathers(program)
    if not gathers:
        return costs
    seconds, _ = seconds_on_link(memory.nodes, costs.seconds, _link(program, gathers[0], cost))
    return replace(costs, seconds=tuple(seconds))


def _link(program: Program, gather: fx.Node, cost: str) -> Link:
    group = find_group(str(schema.named_arguments(gather)["group_name"]))
    return link_between(program, group, value_of(gather).device, cost)
