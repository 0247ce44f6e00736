"""Optimizer state elsewhere as an action of the planner: how much of it, weighed against running calls again."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from graphopt.analysis.costs.cost import link_bandwidth, profile_of_cost
from graphopt.ir.gradients import update_calls
from graphopt.ir.memory.timeline import MemoryTimeline
from graphopt.ir.node import value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.communication.groups import Group, find_group
from graphopt.ir.ops.values import storage_bytes
from graphopt.ir.program import Program
from graphopt.ir.words.written_units import format_bytes, format_seconds
from graphopt.planning.transfers.swapping import schedule_visits, seconds_waited
from graphopt.rewriting.distributed.prediction.measured_link import link_between
from graphopt.rewriting.memory.fit.fitting import Fitting
from graphopt.rewriting.memory.order.early_updates import ordered_updates
from graphopt.rewriting.memory.transfers.state_swaps import RANKS, Link, Swapped, obstacle, state_visits, swap_state
from graphopt.rewriting.memory.transfers.transfer_insertion import Swaps

__all__ = [
    "StateAction",
    "gather_link",
    "link_of",
    "link_to",
    "movable_state",
    "move_created_state",
    "state_to_move",
    "swapped_line",
]

_LEAST = 65_536
"""Bytes below which state stays: a copy takes longer than its bytes are worth."""

_SHARES = 8
"""In how many steps, from nothing to all of it, state is moved."""


@dataclass(frozen=True, slots=True)
class StateAction:
    """State that is to reside elsewhere.

    Attributes:
        names: what it is called.
        tier: where it is to reside.
    """

    names: frozenset[str]
    tier: str

    def nodes(self, program: Program) -> dict[fx.Node, str]:
        """The inputs of a program that are meant, and what they are called."""
        return {node: spec.target for node, spec in program.inputs_of("state") if spec.target in self.names}


def movable_state(program: Program) -> dict[fx.Node, str]:
    """The optimizer state that may reside elsewhere, the largest first, and what it is called."""
    if any(schema.op_name(call) == "opaque_update_" for call in update_calls(program)):
        return {}
    found = {
        node: spec.target
        for node, spec in program.inputs_of("state")
        if not obstacle(node) and storage_bytes(value_of(node)) >= _LEAST
    }
    return dict(sorted(found.items(), key=lambda item: -storage_bytes(value_of(item[0]))))


def link_to(program: Program, cost: str, tier: str = "") -> Link:
    """The way to where state resides: on the host for what is on a CUDA device, else on a disk.

    Args:
        program: whose inputs.
        cost: where seconds come from, which may be a device.
        tier: by default the one that suits the device.
    """
    profile = profile_of_cost(cost, program.context.device)
    devices = {value_of(node).device for node, _ in program.inputs_of("parameter", "state") if _is_tensor(node)}
    on_cpu = profile.kind == "cpu" if profile is not None else all(device.type == "cpu" for device in devices)
    tier = tier or ("disk" if on_cpu else "host")
    if profile is not None:
        return Link(tier, profile.host_bandwidth)
    return Link(tier, min((link_bandwidth(device, tier) for device in devices), default=1.0))  # type: ignore[arg-type]


def gather_link(program: Program, group: Group) -> Link:
    """The way of shards from the other ranks, measured once by all of them together; the same figure on every rank."""
    key = f"gathers over {group.name}/bytes per second"
    numbers = program.context.step.numbers
    if key not in numbers:
        device = next(value_of(node).device for node, _ in program.inputs_of("parameter") if _is_tensor(node))
        numbers[key] = link_between(program, group, device).carried(group.size)
    return Link(RANKS, numbers[key] * group.size / max(group.size - 1, 1))


def link_of(program: Program, swaps: Swaps, cost: str) -> Link:
    """The way of copies that were taken out of a program."""
    if swaps.tier != RANKS:
        return link_to(program, cost, swaps.tier)
    group = next(state.group for state in program.pass_state.values() if state.shard is not None)
    return gather_link(program, find_group(group))


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(value_of(node), torch.Tensor)


def state_to_move(
    fitting: Fitting,
    memory: MemoryTimeline,
    seconds: Sequence[float],
    state: Mapping[fx.Node, str],
    budget: int,
    link: Link,
) -> list[StateAction]:
    """How much state to move, so that what is recomputed and what copies are waited for take the least together.

    The first is what is expected to be best; where no plan fits with it after all, the next ones move more.

    Args:
        fitting: plans for the program with all of the state elsewhere.
        memory: its timeline.
        seconds: of each of its calls.
        state: all of it, the largest first.
        budget: in bytes.
        link: the way there.
    """
    total = sum(storage_bytes(value_of(node)) for node in state)
    best: tuple[float, int] | None = None
    for share in range(_SHARES + 1):
        moved = _largest(state, total * share // _SHARES)
        kept = total - sum(storage_bytes(value_of(node)) for node in moved)
        again = fitting.expected_seconds(budget - kept)
        if again is None:
            continue
        level = [min(count + kept, budget) for count in memory.bytes]
        visits = state_visits(memory, moved, seconds, level, link)
        windows = schedule_visits(seconds, level, visits, link.rate)
        taken = again + seconds_waited(seconds, visits, windows, link.rate)
        if best is None or taken < best[0]:
            best = taken, share
    share = _SHARES if best is None else best[1]
    names = [frozenset(_largest(state, total * more // _SHARES).values()) for more in range(share, _SHARES + 1)]
    return [StateAction(chosen, link.tier) for chosen in dict.fromkeys(names)]


def _largest(state: Mapping[fx.Node, str], least: int) -> dict[fx.Node, str]:
    """As many of the first as have so many bytes together."""
    found: dict[fx.Node, str] = {}
    count = 0
    for node, name in state.items():
        if count >= least:
            break
        found[node] = name
        count += storage_bytes(value_of(node))
    return found


def move_created_state(program: Program, names: Collection[str], link: Link, cost: str, *, origin: str) -> None:
    """Move state away that a program creates, each piece behind the update of its parameter.

    Args:
        program: the step of an optimizer that has no state yet; rewritten in place.
        names: what the state is called.
        link: the way to where it is to reside.
        cost: where seconds come from.
        origin: who asks.
    """
    candidates = ordered_updates(program, origin)
    for candidate in candidates:
        swap_state(candidate, {}, link, cost, origin=origin, created=names)
    best = min(candidates, key=lambda candidate: candidate.memory().peak_bytes)
    program.graph, program.outputs = best.graph, best.outputs


def swapped_line(swapped: Swapped, nbytes: int, tier: str) -> str:
    """What resides elsewhere, and what that costs, for people.

    Args:
        swapped: what was done.
        nbytes: of all that resides there.
        tier: where.
    """
    count = len(swapped.inputs) + len(swapped.created)
    return (
        f"{format_bytes(nbytes)} in {count} tensors reside on the {tier}, and are copied in "
        f"{swapped.visits} times a step; the computation waits {format_seconds(swapped.waited)} for copies (expected)"
    )
