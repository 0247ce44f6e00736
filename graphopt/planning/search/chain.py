"""Nested recomputation on chains: forward as stages, one after the other, that may be recomputed many times.

Source: the dynamic programme of rotor (Beaumont et al., Optimal checkpointing for heterogeneous chains: how to train
deep neural networks with limited memory, Inria RR-9302, 2019).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from graphopt.planning.search.segments import Forward, narrow_places
from graphopt.planning.simulation.schedule import Decision, Drops, Scheduler

__all__ = ["chain_plans"]

Array = npt.NDArray[Any]

_SLOTS = 500
_SHIFT = _SLOTS + 1
_MOST_STAGES = 60
_MARGIN = 1.25
"""How much more than the budget the slots stand for: what stages take is estimated."""

_NEAR = 12
_FAR = 20
"""How many schedules are taken whose memory is close to the budget, and how many from the whole range."""


@dataclass(frozen=True, slots=True)
class _Stage:
    """Operations of forward that are run, and recomputed, together.

    A value that backward reads belongs to the stage that reads it first in forward, or to its maker's where none does.

    Attributes:
        begin: its first operation.
        end: the operation after its last one.
        enters: the values that are made before it, and read by it or by later stages.
        saved: bytes of what it makes for later stages, and of the values inside: those that belong to it, that it makes
            itself, and that backward reads.
        seconds: to make all that is saved.
        onwards: seconds to make what later stages read.
        inwards: seconds to make the values inside.
        running: the most bytes of its own at once while it makes all that is saved.
        passing: the most bytes of its own at once while it makes what later stages read.
        returning: the most bytes of its own at once while it makes the values inside alone, or its backward runs.
        finished: the operation after the last one of backward that reads what belongs to this stage or to a later one.
    """

    begin: int
    end: int
    enters: frozenset[int]
    saved: int
    seconds: float
    onwards: float
    inwards: float
    running: int
    passing: int
    returning: int
    finished: int


def chain_plans(scheduler: Scheduler, *budgets: int) -> Iterator[Drops]:
    """Plans that are optimal for the chain of stages that forward is cut into at narrow places.

    The values of a stage are all saved for backward, or only the input of a stage is, and the stages from there on run
    again when backward comes to them: recursively, so that a stage may run many times. Stages are at most 60, memory is
    counted in 500 slots, and what is no chain (a value that is read far away) is taken to be there all the time in
    between; so plans for several limits of memory are given, from 1.25 times a budget down to the smallest feasible.

    Args:
        scheduler: of the problem.
        budgets: bytes that a plan may take, resident bytes included. All are answered by one dynamic programme, whose
            slots are for the largest of them.

    Yields:
        different decisions, budget by budget, those for more memory first, at most 32 for each.
    """
    forward = Forward(scheduler)
    lasting = {v for v in forward.values if v in scheduler.problem.held} | forward.pinned
    taken = scheduler.problem.resident + sum(scheduler.problem.sizes[v] for v in lasting)
    stages = _stages(forward)
    room = max(budgets) - taken
    if room <= 0 or len(stages) < 2:
        return
    chain = _Chain(forward, stages, _MARGIN * room / _SLOTS)
    steps = chain.steps()
    seen: set[Drops] = set()
    for budget in budgets:
        for slots in _spread(steps, round(_SLOTS / _MARGIN * (budget - taken) / room)) if budget > taken else ():
            drops = chain.drops(slots)
            if drops not in seen:
                seen.add(drops)
                yield drops


def _spread(steps: list[int], target: int) -> list[int]:
    """Some of ascending numbers: the ones next to a target, and others spread evenly over all; largest first."""
    near = sorted(steps, key=lambda step: (abs(step - target), step))[:_NEAR]
    chosen = set(near)
    if steps:
        chosen |= {steps[index * (len(steps) - 1) // (_FAR - 1)] for index in range(_FAR)}
    return sorted(chosen, reverse=True)


# --- stages ----------------------------------------------------------------------------------------------------------


def _stages(forward: Forward) -> list[_Stage]:
    """Forward, cut at its narrow places, and where fewer bytes cross than elsewhere; at most 60 stages.

    Where the narrow places are more than that, neighbours with the fewest bytes are merged.
    """
    crossing = forward.crossing_bytes()
    narrow = set(narrow_places(crossing))
    wide = sorted(set(range(1, forward.boundary)) - narrow, key=lambda place: (crossing[place], place))
    cuts = sorted([*narrow, *wide[: max(0, _MOST_STAGES - 1 - len(narrow))]])
    return _Reader(forward).read(
        _merged([0, *cuts, forward.boundary], list(accumulate(forward.made_bytes(), initial=0)))
    )


def _merged(cuts: list[int], before: list[int]) -> list[int]:
    """At most 61 of ascending cuts, the first and the last among them.

    Args:
        cuts: places.
        before: bytes that are made before each place.
    """
    following, preceding = dict(pairwise(cuts)), {b: a for a, b in pairwise(cuts)}
    queue = [(before[following[cut]] - before[preceding[cut]], cut) for cut in cuts[1:-1]]
    heapify(queue)
    while len(following) > _MOST_STAGES:
        size, cut = heappop(queue)
        start, end = preceding[cut], following[cut]
        if before[end] - before[start] > size:  # it has grown since
            heappush(queue, (before[end] - before[start], cut))
            continue
        following[start], preceding[end] = end, start
        del following[cut]
    return [*following, cuts[-1]]


class _Reader:
    """Reads what each stage takes out of the problem."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._scheduler = scheduler = forward.scheduler
        self._sizes = scheduler.problem.sizes
        self._gradients = self._backward_bytes()
        self._owner = list(scheduler.makers)
        for index in reversed(range(forward.boundary)):
            for value in scheduler.reads[index]:
                self._owner[value] = index

    def _backward_bytes(self) -> list[int]:
        """Bytes that operations of backward made and that are alive at each of them, with its scratch."""
        scheduler, boundary = self._scheduler, self._forward.boundary
        problem = scheduler.problem
        change = [0] * (len(problem.operations) + 1)
        for value, size in enumerate(problem.sizes):
            if scheduler.makers[value] >= boundary:
                change[scheduler.makers[value]] += size
                last = max(scheduler.last_read(value), problem.held.get(value, 0))
                change[min(last + 1, len(change) - 1)] -= size
        return [count + more for count, more in zip(accumulate(change[:-1]), scheduler.scratch, strict=True)]

    def read(self, cuts: list[int]) -> list[_Stage]:
        """The stages between cuts, the start and the boundary among these."""
        finished = self._finished(cuts)
        enters = [frozenset(self._forward.crossing(cut) - self._forward.pinned) for cut in cuts]
        return [
            self._stage(a, b, enters[number], enters[number + 1], (finished[number + 1], finished[number]))
            for number, (a, b) in enumerate(pairwise(cuts))
        ]

    def _finished(self, cuts: list[int]) -> list[int]:
        """For each stage the operation after the last one that reads what belongs to it or to later ones."""
        scheduler, boundary = self._scheduler, self._forward.boundary
        stage_of = [number for number, (a, b) in enumerate(pairwise(cuts)) for _ in range(a, b)]
        finished = [boundary] * len(cuts)
        for index in range(boundary, len(scheduler.reads)):
            for value in scheduler.reads[index]:
                if scheduler.makers[value] < boundary:
                    finished[stage_of[self._owner[value]]] = index + 1
        for number in reversed(range(len(cuts) - 1)):
            finished[number] = max(finished[number], finished[number + 1])
        return finished

    def _stage(
        self, begin: int, end: int, enters: frozenset[int], leaves: frozenset[int], window: tuple[int, int]
    ) -> _Stage:
        scheduler, boundary, sizes = self._scheduler, self._forward.boundary, self._sizes
        made = {v for makes in scheduler.makes[begin:end] for v in makes} - self._forward.pinned
        inside = {v for v in made if self._owner[v] < end and scheduler.last_read(v) >= boundary}
        inwards = self._needed(begin, end, inside)
        returning = self._peak(inwards, inside)
        for index in range(*window):
            alive = sum(sizes[v] for v in inside if scheduler.last_read(v) >= index)
            returning = max(returning, alive + self._gradients[index])
        return _Stage(
            begin=begin,
            end=end,
            enters=enters,
            saved=sum(sizes[v] for v in inside | (made & leaves)),
            seconds=self._sum(self._needed(begin, end, inside | (made & leaves))),
            onwards=self._sum(self._needed(begin, end, made & leaves)),
            inwards=self._sum(inwards),
            running=self._peak(range(begin, end), inside | leaves),
            passing=self._peak(range(begin, end), leaves),
            returning=returning,
            finished=window[1],
        )

    def _needed(self, begin: int, end: int, values: set[int]) -> list[int]:
        """The operations of a stage that make some values from what enters it."""
        wanted, found = set(values), list[int]()
        for index in reversed(range(begin, end)):
            if not wanted.isdisjoint(self._scheduler.makes[index]):
                found.append(index)
                wanted.update(self._scheduler.reads[index])
        return found[::-1]

    def _sum(self, operations: list[int]) -> float:
        return sum(self._scheduler.seconds[index] for index in operations)

    def _peak(self, operations: Sequence[int], kept: Set[int]) -> int:
        """The most bytes at once that operations make and need for themselves, when some of their values are kept."""
        scheduler, last = self._scheduler, self._forward.last
        alive = most = 0
        dying: dict[int, int] = {}
        for index in operations:
            for value in scheduler.makes[index]:
                alive += self._sizes[value]
                if value not in kept:
                    dying[last[value]] = dying.get(last[value], 0) + self._sizes[value]
            most = max(most, alive + scheduler.scratch[index])
            alive -= dying.pop(index, 0)
        return most


# --- dynamic programme -----------------------------------------------------------------------------------------------


class _Chain:
    """The fewest seconds recomputed for every run of stages and every number of slots, and the schedules.

    Args:
        forward: that the stages divide.
        stages: at least one.
        slot: bytes.
    """

    def __init__(self, forward: Forward, stages: list[_Stage], slot: float) -> None:
        self._forward, self._stages, self._slot = forward, stages, slot
        self._count = count = len(stages)
        # [i, j, 501 + m]: seconds to run stages i to j and to recompute of them what has to be, with m slots beside the
        # input of i; of stage j only what its own backward needs. [i, count, 501 + m]: what is recomputed after the
        # first run of stages i to the last. The first 501 entries stand for less than no slots.
        self._seconds = np.full((count, count + 1, _SHIFT + _SLOTS + 1), np.inf)
        self._choice = np.zeros((count, count + 1, _SLOTS + 1), dtype=np.int64)
        self._entering = self._entering_slots()
        self._passing = [self._slots(stage.passing) for stage in stages]
        self._running = [self._slots(max(stage.running, stage.returning)) for stage in stages]
        self._returning = [self._slots(stage.returning) for stage in stages]
        self._saved = [self._slots(stage.saved) for stage in stages]
        for first in reversed(range(count)):
            for last in range(first, count):
                self._solve(first, last)
        for first in reversed(range(count)):
            self._solve(first, count)

    def _slots(self, count: float) -> int:
        """How many slots some bytes take; one more than there are stands for all that is larger."""
        return min(int(np.ceil(count / self._slot)), _SHIFT)

    def _entering_slots(self) -> Array:
        """What the input of stage k (column) takes in addition to that of stage i (row)."""
        sizes = self._forward.scheduler.problem.sizes
        inputs = [stage.enters for stage in self._stages]
        found = np.zeros((self._count, self._count), dtype=np.int64)
        for row, early in enumerate(inputs):
            for column, late in enumerate(inputs):
                found[row, column] = self._slots(sum(sizes[v] for v in late - early))
        return found

    def _solve(self, first: int, last: int) -> None:
        """Seconds and choices for stages ``first`` to ``last``, from those of shorter runs; see ``_seconds``."""
        initial = last == self._count
        end = self._count - 1 if initial else last
        if first == end:
            self._solve_one(first, initial=initial)
            return
        stage, room = self._stages[first], np.arange(_SLOTS + 1)
        saving = self._seconds[first + 1, last, _SHIFT + room - self._saved[first]]
        saving = np.where(room >= self._running[first], saving + (0.0 if initial else stage.seconds), np.inf)
        splits = np.arange(first + 1, end + 1)
        entering = self._entering[first]
        later = self._seconds[splits[:, None], last, _SHIFT + room[None, :] - entering[splits, None]]
        earlier = self._seconds[first, splits - 1, _SHIFT:]
        passing = np.maximum.accumulate([entering[k] + self._passing[k] for k in range(first, end)])
        runs = np.cumsum([stage.onwards for stage in self._stages[first:end]])
        if initial:
            runs = np.zeros_like(runs)
        split = np.where(room[None, :] >= passing[:, None], runs[:, None] + later + earlier, np.inf)
        options = np.concatenate([saving[None, :], split])
        choice = options.argmin(axis=0)
        self._seconds[first, last, _SHIFT:] = options[choice, room]
        self._choice[first, last] = choice

    def _solve_one(self, stage: int, *, initial: bool) -> None:
        """Seconds of a stage by itself: of its backward, or of the first run of the last stage, which are none."""
        last, needed, seconds = stage, self._returning[stage], self._stages[stage].inwards
        if initial:
            last, needed, seconds = self._count, self._running[stage], 0.0
        self._seconds[stage, last, _SHIFT:] = np.where(np.arange(_SLOTS + 1) >= needed, seconds, np.inf)

    def steps(self) -> list[int]:
        """The numbers of slots with which less is recomputed than with one less, from the fewest that are enough."""
        seconds = self._seconds[0, self._count, _SHIFT - 1 :]
        return [int(slots) for slots in np.flatnonzero(seconds[1:] < seconds[:-1])]

    def drops(self, slots: int) -> Drops:
        """The decisions of the schedule that runs least again within so many slots, which have to be enough."""
        found: set[Decision] = set()
        # first stage, last stage, slots, and the moment at which what the run of these stages leaves is dropped
        pending = [(0, self._count, slots, self._forward.boundary)]
        while pending:
            first, last, free, moment = pending.pop()
            if first == min(last, self._count - 1):
                continue
            choice = int(self._choice[first, last, free])
            if not choice:
                pending.append((first + 1, last, free - self._saved[first], moment))
                continue
            split = first + choice
            dropped = self._dropped(first, split)
            found |= {Decision(moment, value) for value in dropped}
            pending.append((split, last, free - int(self._entering[first, split]), moment))
            again = self._first_need(dropped, self._stages[split].finished)
            if again is not None:
                pending.append((first, split - 1, free, again + 1))
        return frozenset(found)

    def _dropped(self, first: int, split: int) -> set[int]:
        """What stages ``first`` to ``split - 1`` make, without the input of ``split``."""
        scheduler = self._forward.scheduler
        made = scheduler.makes[self._stages[first].begin : self._stages[split].begin]
        kept = self._stages[split].enters
        return {v for makes in made for v in makes if v not in kept and scheduler.droppable[v]}

    def _first_need(self, values: set[int], start: int) -> int | None:
        """The first operation from ``start`` on that reads one of some values."""
        reads = self._forward.scheduler.reads
        return next((index for index in range(start, len(reads)) if not values.isdisjoint(reads[index])), None)
