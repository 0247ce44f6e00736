"""Inputs that reside elsewhere: copied in around the calls that need them, and back behind those that write them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from graphopt.analysis.costs.cost import costs_of
from graphopt.analysis.liveness import bytes_of_copy
from graphopt.ir.memory.timeline import MemoryTimeline
from graphopt.ir.node import Phase, set_value, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.communication.collectives import ALL_GATHER, WAIT
from graphopt.ir.ops.communication.groups import find_group
from graphopt.ir.ops.storage import swap
from graphopt.ir.ops.values import is_dense, storage_bytes
from graphopt.ir.program import Program
from graphopt.planning.transfers.swapping import Visit, VisitWindow, schedule_visits, seconds_waited
from graphopt.rewriting.distributed.agreed_decision import decided_by_first_rank
from graphopt.rewriting.distributed.sharding.low_precision_gathers import cast_like, casts_as_inputs
from graphopt.rewriting.distributed.sharding.sharded_parameters import SHARDS, sharded_inputs
from graphopt.rewriting.memory.recompute.recompute_plan import Again, recompute
from graphopt.rewriting.progress import measuring

__all__ = [
    "RANKS",
    "Link",
    "Swapped",
    "created_state",
    "elsewhere",
    "obstacle",
    "state_visits",
    "swap_state",
]


RANKS = "ranks"
"""The tier of parameters of which each rank keeps a shard."""

_LATENCY = 1e-4
"""Seconds that a copy takes at least, beside its bytes: threads hand it over."""


_CLOSE = 0.01
"""The share of a program's seconds that the computation may wait longer where fewer copies take the link."""


@dataclass(frozen=True, slots=True)
class Link:
    """The way between a device and where tensors reside.

    Attributes:
        tier: ``host``, ``disk``, or ``ranks`` for parameters that are gathered from the shards of all ranks.
        rate: bytes per second, each way.
        ahead: how many copies ahead each one starts; None for as many as time and memory allow.
        room: bytes by which copies may raise the peak, to be ahead, and to stay from one call that needs them to the
            next in place of being made again.
    """

    tier: str
    rate: float
    ahead: int | None = None
    room: int = 0

    @property
    def phase(self) -> Phase:
        """That of the copies."""
        return Phase.SYNC if self.tier == RANKS else Phase.TRANSFER


@dataclass(frozen=True, slots=True)
class Swapped:
    """What was done to a program.

    Attributes:
        inputs: the inputs that reside elsewhere now, by name.
        created: the state that the program creates and offloads.
        visits: how often a tensor is copied in.
        waited: seconds for which the computation is expected to wait.
    """

    inputs: tuple[str, ...]
    created: tuple[str, ...]
    visits: int
    waited: float


def obstacle(node: fx.Node) -> str:
    """Why an input cannot reside elsewhere; empty where it can."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor):
        return "it is no tensor"
    if not is_dense(value):
        return "it does not fill its memory without gaps"
    if any(user.op == "output" for user in schema.readers(node) | set(node.users)):
        return "the program returns it"
    return ""


def created_state(program: Program, least: int) -> list[tuple[fx.Node, str]]:
    """The optimizer state of at least so many bytes that a program creates, with what it is called."""
    found = [(value, spec.target) for value, spec in program.outputs_of("state") if isinstance(value, fx.Node)]
    return [(value, name) for value, name in found if storage_bytes(value_of(value)) >= least]


def swap_state(
    program: Program,
    inputs: Mapping[fx.Node, str],
    link: Link,
    cost: str,
    *,
    origin: str,
    created: Collection[str] = (),
) -> Swapped:
    """Let inputs reside elsewhere, and state that the program creates move there.

    The peak is then no higher than if each call had what it touches of them copied in just before it, and back just
    behind it, but for the room that there is; within that, a tensor stays between two calls where the copies would take
    longer, or there is room for it, and copies are ahead.

    Args:
        program: of stage step, rewritten in place.
        inputs: those that are to reside elsewhere, and what they are called.
        link: the way there.
        cost: where seconds come from.
        origin: the pass that asks.
        created: what the state that moves is called.
    """
    if link.tier != RANKS:
        return _swap(program, inputs, link, cost, origin, created)
    with casts_as_inputs(program, inputs) as gathered:
        return _swap(program, gathered, link, cost, origin, created)


def _swap(
    program: Program, inputs: Mapping[fx.Node, str], link: Link, cost: str, origin: str, created: Collection[str]
) -> Swapped:
    with elsewhere(program, inputs):
        memory = program.memory()
    sizes = {node: bytes_of_copy(program, node) for node in inputs}
    if link.tier == RANKS:
        decided = decided_by_first_rank(program, lambda: _decided(memory, sizes, link, cost))
    else:
        decided = _decided(memory, sizes, link, cost)
    nodes = list(inputs)
    stays = [_Stay(nodes[number], visit) for number, visit in decided.visits]
    moved = _move_created(program, memory, link, origin, created)
    _Copies(program, [*memory.nodes, program.output_node], link, origin).insert(stays, decided.windows, inputs)
    program.erase_dead()
    return Swapped(tuple(inputs.values()), tuple(moved), len(stays), decided.waited)


@dataclass(frozen=True, slots=True)
class _Decided:
    """When inputs are copied in: the number of the input and the visit, and when each takes memory."""

    visits: list[tuple[int, Visit]]
    windows: list[VisitWindow]
    waited: float


def _decided(memory: MemoryTimeline, sizes: Mapping[fx.Node, int], link: Link, cost: str) -> _Decided:
    with measuring() as measured:
        seconds = costs_of(memory, cost, progress=measured).seconds
    number = {node: index for index, node in enumerate(sizes)}
    found = []
    for patient in (True, False) if link.room or link.tier == RANKS else (True,):
        uses = _Uses(memory, seconds, list(memory.bytes), link, patient)
        stays = uses.stays(sizes)
        visits = [stay.visit for stay in stays]
        windows = schedule_visits(seconds, uses.level, visits, link.rate, ahead=link.ahead, limit=uses.limit)
        waited = seconds_waited(seconds, visits, windows, link.rate)
        found.append(_Decided([(number[stay.node], stay.visit) for stay in stays], windows, waited))
    close = min(decided.waited for decided in found) + _CLOSE * sum(seconds)
    return min((decided for decided in found if decided.waited <= close), key=lambda decided: len(decided.visits))


@contextlib.contextmanager
def elsewhere(program: Program, inputs: Iterable[fx.Node]) -> Iterator[None]:
    """Count the bytes of inputs only during the calls that touch them."""
    was = program.context
    names = was.offloaded.names.union(node.name for node in inputs)
    program.context = replace(was, offloaded=replace(was.offloaded, names=names))
    try:
        yield
    finally:
        offloaded = replace(program.context.offloaded, names=was.offloaded.names)
        program.context = replace(program.context, offloaded=offloaded)


def state_visits(
    memory: MemoryTimeline, inputs: Iterable[fx.Node], seconds: Sequence[float], level: list[int], link: Link
) -> list[Visit]:
    """The times for which inputs are copied in; what they take between two calls is added to ``level``.

    Args:
        memory: of the program with these inputs elsewhere.
        inputs: that reside elsewhere.
        seconds: of each call.
        level: bytes alive at each call.
        link: the way there.
    """
    sizes = {node: storage_bytes(value_of(node)) for node in inputs}
    return [stay.visit for stay in _Uses(memory, seconds, level, link, patient=True).stays(sizes)]


@dataclass(frozen=True, slots=True)
class _Stay:
    """One visit of one input, in the program."""

    node: fx.Node
    visit: Visit


@dataclass(frozen=True, slots=True)
class _Uses:
    """How the calls of a program use inputs that reside elsewhere.

    Attributes:
        memory: of the program with these inputs elsewhere.
        seconds: of each call.
        level: bytes alive at each call; what is taken between two uses is added.
        link: the way there.
        patient: whether an input goes where there is time to copy it anew, though memory would let it stay.
        limit: bytes that may be alive.
    """

    memory: MemoryTimeline
    seconds: Sequence[float]
    level: list[int]
    link: Link
    patient: bool
    limit: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "limit", max(self.level, default=0) + self.link.room)

    def stays(self, sizes: Mapping[fx.Node, int]) -> list[_Stay]:
        """The visits of inputs that take so many bytes each, in the order in which they are needed.

        What is needed again soonest stays first, as far as there is memory.
        """
        found: list[_Stay] = []
        touching = _touching(self.memory, sizes)
        for node in touching if self.patient else sorted(touching, key=lambda node: _longest_gap(touching[node])):
            found += self._stays(node, sizes[node], touching[node])
        return sorted(found, key=lambda stay: stay.visit.first)

    def _stays(self, node: fx.Node, size: int, touching: Sequence[int]) -> list[_Stay]:
        """The uses of one input, parted where a copy takes less time than lies between them, or memory lacks."""
        touches, writes, joined = _touches(self.memory, node, touching)
        enough = size / self.link.rate + _LATENCY if self.patient else math.inf
        groups: list[list[int]] = []
        for step in touches:
            between = slice(groups[-1][-1] + 1, step) if groups else slice(0)
            fits = sum(self.seconds[between]) <= enough and max(self.level[between], default=0) + size <= self.limit
            if groups and (step in joined or fits):
                groups[-1].append(step)
                self.level[between] = [count + size for count in self.level[between]]
            else:
                groups.append([step])
        found: list[_Stay] = []
        for group in groups:
            earliest = found[-1].visit.last + 1 if found else 0
            found.append(_Stay(node, Visit(size, group[0], group[-1], not writes.isdisjoint(group), earliest)))
        return found


def _longest_gap(steps: Sequence[int]) -> int:
    return max((after - before for before, after in pairwise(steps)), default=0)


def _touching(memory: MemoryTimeline, inputs: Iterable[fx.Node]) -> dict[fx.Node, list[int]]:
    """The steps of the calls that touch each input's memory, views among them."""
    owner = {id(storage): node for node in inputs for storage in memory.refers[node]}
    found: dict[fx.Node, list[int]] = {node: [] for node in owner.values()}
    for step, call in enumerate(memory.nodes):
        sources = (s for source in call.all_input_nodes for s in memory.refers.get(source, ()))
        for node in {owner[id(storage)]: None for storage in sources if id(storage) in owner}:
            found[node].append(step)
    return found


def _touches(memory: MemoryTimeline, node: fx.Node, touching: Sequence[int]) -> tuple[list[int], set[int], set[int]]:
    """The steps that touch an input's memory, those that write it, and those that read what a write before returned."""
    own = {id(storage) for storage in memory.refers[node]}
    written: set[fx.Node] = set()
    touches, writes, joined = [], set(), set()
    for step in touching:
        call = memory.nodes[step]
        sources = [source for source in call.all_input_nodes if own & {id(s) for s in memory.refers.get(source, ())}]
        if written.intersection(sources):
            joined.add(step)
            written.add(call)
        if schema.is_view(call):
            continue
        touches.append(step)
        if any(own & {id(s) for s in memory.refers.get(target, ())} for target in schema.mutated_inputs(call)):
            writes.add(step)
            written.add(call)
    return touches, writes, joined


@dataclass(frozen=True, slots=True)
class _Copies:
    """Inserts copies into a program.

    Attributes:
        program: rewritten in place.
        places: the calls by their steps, and the output behind them.
        link: the way to where the inputs reside.
        origin: the pass that asks.
    """

    program: Program
    places: Sequence[fx.Node]
    link: Link
    origin: str

    def insert(self, stays: Sequence[_Stay], windows: Sequence[VisitWindow], names: Mapping[fx.Node, str]) -> None:
        """Insert the copies, and let the calls of each visit read what was copied in."""
        devices = {node: value_of(node).device for node in names}
        for node in names:
            if self.link.tier == "host" and devices[node].type != "cpu":
                _reside_on_host(self.program, node)
        inside: list[Again] = []
        copies: list[fx.Node] = []
        for index in sorted(range(len(stays)), key=lambda index: windows[index].fetched):
            stay, window = stays[index], windows[index]
            whose = f"{self.origin}: {names[stay.node]}"
            there, made = self._visit(stay, window, devices[stay.node], whose)
            inside.append(Again(stay.node, self.places[stay.visit.first], whose, there))
            copies += made
        meant = [(copy, copy.args) for copy in copies]
        step = {node: index for index, node in enumerate(self.places)}
        recompute(self.program, sorted(inside, key=lambda again: step[again.before]))
        for copy, args in meant:  # copies are about the input itself, wherever its values are at the moment
            copy.args = args

    def _visit(
        self, stay: _Stay, window: VisitWindow, device: torch.device, whose: str
    ) -> tuple[fx.Node, list[fx.Node]]:
        """The copies of one visit: what is there during it, and all calls that were inserted."""
        node, visit, insert = stay.node, stay.visit, self.program.insert
        common: dict[str, Any] = {"phase": self.link.phase, "origin": whose, "like": node}
        begin, first, last = (self.places[step] for step in (window.fetched, visit.first, visit.last))
        if self.link.tier == RANKS:
            return self._gathered(node, begin, first, common), []
        given = (node, self.link.tier, device)
        begun = insert(swap.swap_in, given, before=begin, hint=f"{node.name}_swap_in", **common)
        there = insert(swap.swap_in_wait, (begun, node), before=first, hint=f"{node.name}_in", **common)
        if not visit.writes:
            return there, [begun, there]
        back = insert(swap.swap_out, (node, there, self.link.tier), after=last, **common)
        awaited = insert(swap.swap_out_wait, (node, there), before=self.places[window.freed], **common)
        return there, [begun, there, back, awaited]

    def _gathered(self, node: fx.Node, begin: fx.Node, first: fx.Node, common: dict[str, Any]) -> fx.Node:
        """A parameter that is gathered from the shards of all ranks."""
        name, shard = sharded_inputs(self.program)[node]
        group = find_group(self.program.pass_state[f"{SHARDS}{name}"].group)
        value, insert = value_of(node), self.program.insert
        given: dict[str, Any] = {"phase": common["phase"], "origin": common["origin"], "like": node}
        shard = cast_like(self.program, shard, value, begin, name, **given)
        begun = insert(ALL_GATHER, (shard, group.size, group.name), before=begin, hint=f"{node.name}_gather", **common)
        done = insert(WAIT, (begun,), before=first, hint=f"{node.name}_gathered", **common)
        layout = (done, list(value.shape), list(value.stride()), 0)
        return insert(torch.ops.aten.as_strided.default, layout, before=first, hint=f"{node.name}_whole", **common)


def _reside_on_host(program: Program, node: fx.Node) -> None:
    """Describe an input as a tensor on the CPU."""
    value = value_of(node)
    with program.fake_mode:
        there = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
    set_value(node, there)


def _move_created(
    program: Program, memory: MemoryTimeline, link: Link, origin: str, created: Collection[str]
) -> list[str]:
    """Move the state that the program creates away behind the last call that touches it."""
    found = [(value, name) for value, name in created_state(program, 1) if name in created]
    values = list(program.output_values)
    for value, name in found:
        own = {id(storage) for storage in memory.refers[value]}
        touching = [
            call
            for call in memory.nodes
            if any(own & {id(s) for s in memory.refers[source]} for source in [call, *call.all_input_nodes])
        ]
        common: dict[str, Any] = {"phase": Phase.TRANSFER, "origin": f"{origin}: {name}", "like": value}
        begun = program.insert(
            swap.move_out, (value, link.tier), after=touching[-1], hint=f"{value.name}_move_out", **common
        )
        there = program.insert(swap.move_out_wait, (begun, value), after=begun, hint=f"{value.name}_out", **common)
        values[values.index(value)] = there
    if found:
        program.set_outputs(values, program.outputs)
    return [name for _, name in found]
