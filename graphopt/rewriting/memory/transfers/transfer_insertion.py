"""Inserting transfers: a tensor is copied away after it is made, freed, and brought back before it is read again.

Copies of inputs that reside elsewhere, taken out of a program so that plans are made as if they were not there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphopt import _torch
from graphopt.analysis.costs.cost import DeviceProfile, link_bandwidth
from graphopt.errors import GraphoptError
from graphopt.ir.host import local_ranks
from graphopt.ir.node import Phase, Policy, info, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.communication.collectives import WAIT
from graphopt.ir.ops.storage import swap, transfer
from graphopt.ir.ops.transfers import checked_tier
from graphopt.ir.ops.values import storage_bytes
from graphopt.ir.program import Program
from graphopt.planning.transfers.offloading import Lanes
from graphopt.rewriting.distributed.sharding.low_precision_gathers import cast_like
from graphopt.rewriting.distributed.sharding.sharded_parameters import sharded_inputs
from graphopt.rewriting.memory.free_memory import free_host_bytes
from graphopt.rewriting.memory.recompute.planning_problem import PlanningProblem
from graphopt.rewriting.memory.recompute.recompute_plan import Again, recompute
from graphopt.rewriting.memory.transfers.state_swaps import RANKS

__all__ = ["Move", "Swaps", "check_copies", "host_lanes", "lift_gathers", "lift_swaps", "movable", "move", "nodes_of"]


def check_copies(tier: str, prefetch: int | str) -> None:
    """Refuse what says nothing about copies: to where, and how many tensors ahead they start.

    Raises:
        GraphoptError: with the near names, or what there may be.
    """
    checked_tier(tier)
    if prefetch != "auto" and (isinstance(prefetch, (str, bool)) or prefetch < 0):
        raise GraphoptError(f"prefetch is auto or a number of tensors of at least 0, got {prefetch!r}")


@dataclass(frozen=True, slots=True)
class Move:
    """One tensor that goes away and comes back.

    Attributes:
        node: the call that made it (or the ``getitem`` of its result), which owns its storage.
        after: the call behind which its copy away starts.
        freed_before: the call before which that copy is waited for.
        fetched_before: the call before which the copy back starts.
        needed_before: the first call that reads what came back.
    """

    node: fx.Node
    after: fx.Node
    freed_before: fx.Node
    fetched_before: fx.Node
    needed_before: fx.Node


def movable(node: fx.Node) -> str:
    """Why a tensor cannot be moved; empty where it can."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor):
        return "it is not a tensor"
    if any(isinstance(size, torch.SymInt) for size in (*value.shape, *value.stride())):
        return "its size varies from call to call"
    if value.layout is not torch.strided or value.is_conj() or value.is_neg():
        return "it is not a plain dense tensor"
    if schema.is_collective(schema.maker(node)):
        return "a collective makes it, and a copy that starts behind the call would not wait for its data"
    return ""


def move(program: Program, moves: Sequence[Move], tier: str, *, origin: str) -> None:
    """Insert the transfers and let everything from ``needed_before`` on read what came back.

    Views are made anew on it; size, strides and offset are those of the original.

    Args:
        program: a joint or step program, rewritten in place.
        moves: in any order.
        tier: ``host`` or ``disk``.
        origin: provenance, for people.
    """
    returned: list[Again] = []
    for item in moves:
        returned.append(Again(item.node, item.needed_before, origin, _insert(program, item, tier, origin)))
    recompute(program, returned)
    program.set_policy([item.node for item in moves], Policy.MUST_CPU_OFFLOAD)


def _insert(program: Program, item: Move, tier: str, origin: str) -> fx.Node:
    node, known = item.node, info(item.node)
    name = known.names[0] if known.names else node.name
    value = value_of(node)
    elements = storage_bytes(value) // value.element_size()

    common: dict[str, Any] = {"phase": Phase.TRANSFER, "origin": f"{origin}: {name}", "like": node}
    handle = program.insert(transfer.offload, (node, tier), after=item.after, hint=f"{node.name}_offload", **common)
    freed_before = _within_forward(program, item.freed_before)
    handle = program.insert(
        transfer.offload_wait, (handle, node), before=freed_before, hint=f"{node.name}_offloaded", **common
    )
    layout = (list(value.shape), list(value.stride()), 0, elements, value.dtype, value.device)
    fetched = program.insert(
        transfer.prefetch, (handle, *layout), before=item.fetched_before, hint=f"{node.name}_prefetch", **common
    )
    return program.insert(
        transfer.prefetch_wait, (fetched, handle), before=item.needed_before, hint=f"{node.name}_prefetched", **common
    )


def _within_forward(program: Program, place: fx.Node) -> fx.Node:
    """Where a copy away is waited for: no later than forward ends, where forward and backward run apart.

    Backward can begin with views, which are no operations of the planner: a place before its first operation may stand
    behind them, in the other half.
    """
    if not program.inputs_of("tangent") or info(place).phase is Phase.FORWARD:
        return place
    early = (Phase.FORWARD, Phase.TRANSFER)
    first = next((node for node in program.phase_nodes(*Phase) if info(node).phase not in early), place)
    order = list(program.graph.nodes)
    return first if order.index(first) < order.index(place) else place


def _profile(planning: PlanningProblem) -> DeviceProfile | None:
    """Of the device that a program without data is for."""
    others = (_torch.stand_in_of(value_of(node)) for node in planning.makers)
    found = next((other.device for other in others if other is not None), None)
    return found if isinstance(found, DeviceProfile) else None


def host_lanes(
    planning: PlanningProblem, room: int | None, *, rate: float | None = None, smallest: int = 1_000_000
) -> Lanes:
    """What copies to the host can do for a program's values.

    Args:
        planning: the program's problem.
        room: bytes that may be on the host at once; None for what is free there, or for nothing where the values live
            on the CPU: its memory is the host's. For a program without data, None stands for twice the device's memory.
        rate: bytes per second each way; measured on this machine, or taken from the device's profile, by default.
        smallest: values of fewer bytes stay.
    """
    profile = _profile(planning)
    if profile is not None:
        on_host = profile.kind == "cpu"
        room = (0 if on_host else 2 * profile.memory_bytes) if room is None else room
        rate = profile.host_bandwidth if rate is None else rate
    devices = {value_of(node).device for node in planning.makers if isinstance(value_of(node), torch.Tensor)}
    if room is None:
        on_host = any(device.type == "cpu" for device in devices)
        room = 0 if on_host else (free_host_bytes() or 0) // local_ranks()
    can_move = [not movable(node) for node in planning.makers]
    parted = any(storage.owner.op == "placeholder" for storage in planning.storages)
    if rate is None:
        rate = min((link_bandwidth(device, "host") for device in devices), default=1.0) if room else 1.0
    return Lanes(rate, rate, room, smallest, can_move, parted)


@dataclass(frozen=True, slots=True)
class Swaps:
    """The copies of a program's inputs, taken out of it.

    Attributes:
        inputs: that reside elsewhere, by the names of their nodes, and what they are called.
        tier: where they reside.
        origin: the pass that had put the copies in.
    """

    inputs: Mapping[str, str]
    tier: str
    origin: str

    def nodes(self, program: Program) -> dict[fx.Node, str]:
        """The inputs in a program, and what they are called."""
        return {node: self.inputs[node.name] for node in program.placeholders if node.name in self.inputs}


def nodes_of(program: Program, lifted: Iterable[Swaps]) -> list[fx.Node]:
    """The inputs of a program whose copies were taken out."""
    return [node for swaps in lifted for node in swaps.nodes(program)]


def lift_swaps(program: Program) -> Swaps | None:
    """Take the copies of inputs out of a program, so that its calls read and write the inputs; None without any."""
    found: dict[str, str] = {}
    tier = origin = ""
    for node in list(program.graph.nodes):
        if node.target is swap.swap_in_wait:
            begun, at = node.args
            tier, origin = begun.args[1], info(node).made_by
            found[at.name] = info(node).made_for
            node.replace_all_uses_with(at)
            program.graph.erase_node(node)
            program.graph.erase_node(begun)
        elif node.target in (swap.swap_out, swap.swap_out_wait):
            program.graph.erase_node(node)
    return Swaps(found, tier, origin) if found else None


def lift_gathers(program: Program) -> Swaps | None:
    """Take the gathers of parameters out of a program, so that its calls read the parameters; None without any."""
    nodes = {name: node for node, (name, _) in sharded_inputs(program).items()}
    found: dict[str, str] = {}
    origin = ""
    for whole in list(program.graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided.default)):
        who, name = info(whole).made_by, info(whole).made_for
        done = whole.args[0]
        if name in nodes and isinstance(done, fx.Node) and done.target is WAIT and info(whole).phase is Phase.SYNC:
            (begun,) = done.all_input_nodes
            (shard,) = begun.all_input_nodes
            found[nodes[name].name], origin = name, who
            reader = next(iter(whole.users))
            phase = info(reader).phase if reader.op != "output" else Phase.BACKWARD
            read = cast_like(program, nodes[name], value_of(whole), whole, name, phase=phase, origin=name)
            whole.replace_all_uses_with(read)
            for node in (whole, done, begun, *([shard] if shard.op == "call_function" else [])):
                program.graph.erase_node(node)
    return Swaps(found, RANKS, origin) if found else None
