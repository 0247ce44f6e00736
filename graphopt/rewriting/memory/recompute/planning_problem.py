"""A program as the planner's plain data: operations with seconds and bytes, values with sizes."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from graphopt import _torch
from graphopt.analysis.liveness import simulate
from graphopt.ir.lowering import overwritable_of_forward
from graphopt.ir.memory.timeline import MemoryTimeline, Storage
from graphopt.ir.node import Phase, info, own_phase, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.layers.rms_norm import without_statistics
from graphopt.ir.program import Program
from graphopt.planning import Operation, Problem
from graphopt.planning.transfers.slices import OfSlice
from graphopt.rewriting.memory.recompute.replay import can_recompute, stale_values

__all__ = ["PlanningProblem", "planning_problem", "repeatable_calls"]


@dataclass(frozen=True, slots=True)
class PlanningProblem:
    """A program's problem, and what its parts are in the program.

    Attributes:
        problem: the plain data.
        nodes: the call behind each operation; None for the arrival of the tangents in a program without a loss.
        storages: the storage behind each value.
        makers: the node that stands for each value: the call itself, or its ``getitem``.
        slices: for each operation of a program that takes its batch in slices, which slice it is for; empty otherwise.
    """

    problem: Problem
    nodes: tuple[fx.Node | None, ...]
    storages: tuple[Storage, ...]
    makers: tuple[fx.Node, ...]
    slices: tuple[OfSlice | None, ...] = ()


def generator_state_bytes() -> int:
    """Bytes of the saved state of the CPU's random-number generator."""
    return int(torch.get_rng_state().numel())


def planning_problem(program: Program, seconds: Sequence[float]) -> PlanningProblem:
    """The planner's view of a program.

    Views are not operations of their own: what reads a view reads its storage. Calls of backward that the generated
    code takes in place read and write the operand's storage. Those of forward make values of their own, since either
    may be kept without the other; these take the place of the operand in plans in which it dies there.

    Args:
        program: of stage joint or step.
        seconds: of each call, in the order of the program's timeline.
    """
    return _Reader(program, simulate(program, forward_in_place=False), seconds).read()


def _outdated(program: Program, memory: MemoryTimeline) -> set[fx.Node]:
    """The calls of forward whose results may be needed again after the update has overwritten what they read.

    An update that runs between ops of backward ends the time in which readers of its parameter can be recomputed. An op
    is needed again no later than the last op that reads its results, or that can be recomputed itself and is needed
    again then.
    """
    place = {node: index for index, node in enumerate(memory.nodes)}
    until: dict[int, int] = {}
    for node in program.phase_nodes(Phase.UPDATE):
        for target in schema.mutated_inputs(node):
            for storage in memory.refers[target]:
                until.setdefault(id(storage), place[node])
    found: set[fx.Node] = set()
    needed: dict[fx.Node, int] = {}
    for node in reversed(memory.nodes):
        if own_phase(node) is not Phase.FORWARD:
            needed[node] = place[node]
            continue
        needed[node] = max((needed[user] for user in node.users if user in needed), default=-1)
        ends = [until[id(s)] for source in node.all_input_nodes for s in memory.refers[source] if id(s) in until]
        if min(ends, default=len(memory.nodes)) < needed[node]:
            found.add(node)
            needed[node] = place[node]
    return found


def repeatable_calls(program: Program) -> set[fx.Node]:
    """The calls of a program that may be recomputed."""
    memory = simulate(program, measure=False, forward_in_place=False)
    repeatable = _Repeatable(program, memory)
    return {node for node in memory.nodes if repeatable(node)}


class _Repeatable:
    """Says which calls may be recomputed: pure ones of forward, whose arguments are not overwritten meanwhile."""

    def __init__(self, program: Program, memory: MemoryTimeline) -> None:
        self._stale = stale_values(program)
        self._outdated = _outdated(program, memory)

    def __call__(self, node: fx.Node) -> bool:
        if own_phase(node) is not Phase.FORWARD or not can_recompute(node):
            return False
        if node.target in (_torch.run_and_save_rng_state, _torch.run_with_rng_state):
            return False
        pure = without_statistics(node)
        sources = node.all_input_nodes if pure is None else [a for a in pure[1] if isinstance(a, fx.Node)]
        if self._stale.intersection(sources) or node in self._outdated:
            return False
        return isinstance(value_of(node), (torch.Tensor, tuple, list))


def _called(storage: Storage, maker: fx.Node) -> str:
    """What people call a value; in a slice of the batch, the name of what it is a part of."""
    part = info(maker).batch_slice
    if storage.names:
        return storage.names[0]
    return storage.owner.name if part is None else part.of


class _Reader:
    def __init__(self, program: Program, memory: MemoryTimeline, seconds: Sequence[float]) -> None:
        self._program = program
        self._memory = memory
        self._seconds = seconds
        self._refers = memory.refers
        self._repeatable = _Repeatable(program, memory)
        self._overwritable = overwritable_of_forward(program)
        self._numbers: dict[int, int] = {}
        self._storages: list[Storage] = []
        self._operations: list[Operation] = []
        self._nodes: list[fx.Node | None] = []
        self._places: list[int] = []
        self._boundary = 0

    def read(self) -> PlanningProblem:
        start = self._backward_start()
        made = self._made_at()
        for place, node in enumerate(self._memory.nodes):
            if place == start:
                self._boundary = len(self._operations)
                self._tangents(place)
            owned = made.get(place, [])
            if owned or not (schema.is_view(node) or node.target is operator.getitem):
                self._operation(place, node, owned)
        makers = self._value_nodes()
        problem = Problem(
            operations=tuple(self._operations),
            sizes=tuple(s.bytes for s in self._storages),
            resident=self._memory.resident_bytes,
            held=self._lasting(),
            boundary=self._boundary,
            names=tuple(map(_called, self._storages, makers)),
        )
        return PlanningProblem(problem, tuple(self._nodes), tuple(self._storages), makers, self._slices())

    def _slices(self) -> tuple[OfSlice | None, ...]:
        """Which slice of the batch each operation is for; empty where the batch is whole."""
        seen: Counter[tuple[int, str]] = Counter()
        found: list[OfSlice | None] = []
        for node in self._nodes:
            part = None if node is None else info(node).batch_slice
            if part is None:
                found.append(None)
                continue
            key = part.number, part.of
            found.append(OfSlice(part.number, (part.of, seen[key]), part.phase is Phase.FORWARD))
            seen[key] += 1
        return tuple(found) if any(found) else ()

    def _made_at(self) -> dict[int, list[Storage]]:
        """The storages that each call makes, by the call's place."""
        made: dict[int, list[Storage]] = {}
        for storage in self._memory.storages:
            if storage.owner.op != "placeholder":
                made.setdefault(storage.first, []).append(storage)
        return made

    def _number(self, storage: Storage) -> int:
        number = self._numbers.get(id(storage))
        if number is None:
            number = self._numbers[id(storage)] = len(self._storages)
            self._storages.append(storage)
        return number

    def _backward_start(self) -> int:
        nodes = self._memory.nodes
        return next((i for i, node in enumerate(nodes) if info(node).phase is not Phase.FORWARD), len(nodes))

    def _tangents(self, place: int) -> None:
        """Where inputs come in later than the program begins: an operation that makes them."""
        arriving = [s for s in self._memory.storages if s.owner.op == "placeholder" and s.first >= 0]
        if arriving:
            makes = tuple(self._number(storage) for storage in arriving)
            self._operations.append(Operation((), makes, 0.0, repeatable=False, name="tangents arrive"))
            self._nodes.append(None)
            self._places.append(place)

    def _operation(self, place: int, node: fx.Node, owned: list[Storage]) -> None:
        reads = dict.fromkeys(
            self._numbers[id(storage)]
            for source in node.all_input_nodes
            for storage in self._refers[source]
            if id(storage) in self._numbers
        )
        makes = tuple(self._number(storage) for storage in owned)
        pure = without_statistics(node)
        again = owned[: pure[2]] if pure is not None else owned
        self._operations.append(
            Operation(
                reads=tuple(reads),
                makes=makes,
                seconds=self._seconds[place],
                scratch=self._memory.temporaries[place],
                repeatable=self._repeatable(node),
                remakes=tuple(self._number(storage) for storage in again),
                memo=generator_state_bytes() if schema.is_random(node) else 0,
                overwrites=self._overwrites(node, makes),
                name=node.name,
            )
        )
        self._nodes.append(node)
        self._places.append(place)

    def _overwrites(self, node: fx.Node, makes: Sequence[int]) -> tuple[int, ...]:
        """The values of forward that the result of a call may take the place of."""
        found = [self._numbers.get(id(s)) for a in self._overwritable.get(node, ()) for s in self._refers[a]]
        size = sum(self._storages[made].bytes for made in makes) if len(makes) == 1 else -1
        return tuple(value for value in found if value is not None and self._storages[value].bytes == size)

    def _lasting(self) -> dict[int, int]:
        """What the program returns lives to the end, or until the user's loss has been computed."""
        found: dict[int, int] = {}
        places = self._places
        count = len(self._memory.nodes)
        returned = {id(s) for node in self._program.output_node.all_input_nodes for s in self._refers[node]}
        for storage in self._storages:
            if id(storage) in returned:
                end = storage.last
                until = next((i for i, place in enumerate(places) if place >= end), len(places))
                found[self._numbers[id(storage)]] = len(places) if end >= count else until
        return found

    def _value_nodes(self) -> tuple[fx.Node, ...]:
        found: list[fx.Node] = []
        for storage in self._storages:
            owner = storage.owner
            getters = [user for user in owner.users if user.target is operator.getitem]
            mine = [g for g in getters if any(s is storage for s in self._refers[g])]
            found.append(mine[0] if mine else owner)
        return tuple(found)
