"""Steps that take their batch in slices: one slice is planned, and all do the same."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from graphopt.planning.frontier import Frontier, Point
from graphopt.planning.problem import Operation, Problem
from graphopt.planning.search.refinement import Refinement
from graphopt.planning.simulation.schedule import Scheduler
from graphopt.planning.simulation.stops import Decision, Drops

__all__ = ["OfSlice", "SlicedPlans", "Span"]


Key = tuple[str, int]


class OfSlice(NamedTuple):
    """What an operation is in a step with slices: alike operations of all slices have one key.

    Attributes:
        number: which slice it is for, from 0.
        key: what it does there.
        forward: whether that belongs to the slice's forward.
    """

    number: int
    key: Key
    forward: bool


class Span(NamedTuple):
    """The operations of a slice, with what runs among them: from ``start`` to ``stop``; backward from ``boundary``."""

    start: int
    boundary: int
    stop: int


class SlicedPlans:
    """Plans for all slices out of plans for one of them, ``part``.

    Slices differ in what else is alive, the gradients of those before them, so each takes the fastest of the plans with
    which it stays within the bytes that all of them may take.

    Args:
        scheduler: of the whole problem.
        slices: what each of its operations is for.

    Attributes:
        count: how many slices there are.
        number: of the slice that is planned: the one in which the most bytes are alive.
        span: its operations.
        part: the problem of that slice. What is alive when it begins is made by its first operation.
    """

    def __init__(self, scheduler: Scheduler, slices: Sequence[OfSlice | None]) -> None:
        self._scheduler = scheduler
        places: dict[int, list[int]] = {}
        self._by_key: dict[int, dict[Key, int]] = {}
        for index, found in enumerate(slices):
            if found is not None:
                places.setdefault(found.number, []).append(index)
                self._by_key.setdefault(found.number, {})[found.key] = index
        self._ends = {number: (of_slice[0], of_slice[-1]) for number, of_slice in places.items()}
        self.count = len(places)
        peaks = self._peaks(frozenset())
        self.number = max(peaks, key=lambda one: peaks[one])
        start, end = self._ends[self.number]
        boundary = next((i for i in places[self.number] if not _forward(slices, i)), end + 1)
        self.span = Span(start, boundary, end + 1)
        keyed = [(index, found.key) for index in places[self.number] if (found := slices[index]) is not None]
        self._keys = dict(keyed)
        self._keyed = [index for index, _ in keyed]
        self._made = {value: (m, place) for m, makes in enumerate(scheduler.makes) for place, value in enumerate(makes)}
        self.part, self._values = _part(scheduler.problem, self.span)
        self._plans: list[_SlicedPlan] = []
        self._refinement: Refinement | None = None

    def frontier(self, found: Frontier) -> Frontier:
        """The frontier of the whole problem out of that of ``part``."""
        most = max(_FEWEST, _WORK // len(self._scheduler.reads))
        self._plans = [self._sliced(point) for point in _spread(list(found), most)]
        self._refinement = Refinement(Scheduler(self.part), found)
        whole = Frontier()
        whole.cut_short = found.cut_short
        whole.offer(frozenset(), self._scheduler.evaluate(frozenset()))
        for point in self._together(self._plans, self._plans):
            whole.offer(point.drops, self._scheduler.evaluate(point.drops))
        return whole

    def around(self, budget: int) -> list[Point]:
        """Plans between two neighbours; see ``Refinement``."""
        if self._refinement is None:
            return []
        plans = [self._sliced(point) for point in self._refinement.around(budget)]
        return self._together(plans, [*self._plans, *plans])

    def _together(self, plans: Sequence[_SlicedPlan], known: Sequence[_SlicedPlan]) -> list[Point]:
        """For the bytes of each of some plans, the fastest known one for each slice."""
        points = []
        for budget in sorted({max(plan.peaks.values()) for plan in plans}):
            drops: set[Decision] = set()
            for number in self._by_key:
                fitting = [plan for plan in known if plan.peaks[number] <= budget]
                drops |= min(fitting, key=lambda plan: plan.again).drops[number]
            simulated = self._scheduler.evaluate(drops)
            points.append(Point(simulated.peak, simulated.again, frozenset(drops)))
        return points

    def _sliced(self, point: Point) -> _SlicedPlan:
        drops = {number: frozenset(self._decisions(point.drops, number)) for number in self._by_key}
        return _SlicedPlan(point.again, drops, self._peaks(frozenset().union(*drops.values())))

    def _peaks(self, drops: Drops) -> dict[int, int]:
        """The most bytes that are alive in each slice under decisions for all of them."""
        simulated = self._scheduler.evaluate(drops)
        first = {step: place for place, step in reversed(list(enumerate(simulated.plan.steps)))}
        starts = {number: first[start] for number, (start, _) in self._ends.items()}
        return {
            number: max(simulated.bytes[starts[number] : first[end] + 1]) for number, (_, end) in self._ends.items()
        }

    def _decisions(self, drops: Drops, number: int) -> Iterable[Decision]:
        """Decisions for ``part`` as those for a slice, without those about what only other slices read from then on."""
        of_slice = self._by_key[number]
        _, end = self._ends[number]
        for moment, value, remake in drops:
            maker, place = self._made[self._values[value]]
            index = of_slice.get(self._keys[maker]) if maker in self._keys else None
            when = self._moment(self.span.start + moment - 1, of_slice)
            if index is None or when is None:
                continue
            own = self._scheduler.makes[index][place]
            readers = self._scheduler.readers(own)
            behind = bisect_left(readers, when)
            if behind == len(readers) or readers[behind] <= end:
                yield Decision(when, own, remake)

    def _moment(self, at: int, of_slice: Mapping[Key, int]) -> int | None:
        """The operation of a slice that is like one of the planned slice, or like the next that it has."""
        behind = range(bisect_left(self._keyed, at), len(self._keyed))
        return next((of_slice[key] for i in behind if (key := self._keys[self._keyed[i]]) in of_slice), None)


def _spread(points: Sequence[Point], most: int) -> Sequence[Point]:
    """Some of the points, evenly spread from first to last, where there are more than so many."""
    if len(points) <= most:
        return points
    return [points[place * (len(points) - 1) // (most - 1)] for place in range(most)]


_FEWEST = 32
"""Plans of one slice that are tried in all slices, at least."""

_WORK = 1_000_000
"""Beyond these, about how many operations of the whole problem are gone through for each."""


@dataclass(frozen=True, slots=True)
class _SlicedPlan:
    """A plan for one slice, done in all: its decisions, and the most bytes alive, by slice.

    Attributes:
        again: seconds that one slice recomputes.
    """

    again: float
    drops: Mapping[int, Drops]
    peaks: Mapping[int, int]


def _forward(slices: Sequence[OfSlice | None], index: int) -> bool:
    found = slices[index]
    return found is not None and found.forward


def _part(problem: Problem, span: Span) -> tuple[Problem, list[int]]:
    """The problem of a slice, and which value of the whole problem each of its values is."""
    end = len(problem.operations)
    makers, readers = problem.makers, problem.readers
    last = [max([maker, *readers[value], problem.held.get(value, 0)]) for value, maker in enumerate(makers)]
    there = [value for value, maker in enumerate(makers) if maker < span.start <= last[value]]
    inside = [value for operation in problem.operations[span.start : span.stop] for value in operation.makes]
    values = [*there, *inside]
    number = {value: index for index, value in enumerate(values)}
    before = Operation((), tuple(range(len(there))), 0.0, repeatable=False, name="what was there before")
    operations = [before, *(_inside(op, number) for op in problem.operations[span.start : span.stop])]
    held = {
        number[value]: min(last[value], end) - span.start + 1 if last[value] < span.stop else len(operations)
        for value in values
        if value in problem.held or last[value] >= span.stop
    }
    part = Problem(
        operations=tuple(operations),
        sizes=tuple(problem.sizes[value] for value in values),
        resident=problem.resident,
        held=held,
        boundary=span.boundary - span.start + 1,
        names=tuple(problem.names[value] for value in values if problem.names),
    )
    return part, values


def _inside(operation: Operation, number: dict[int, int]) -> Operation:
    """An operation of a slice, by the numbers that values have there."""

    def known(values: Iterable[int]) -> tuple[int, ...]:
        return tuple(number[value] for value in values if value in number)

    return Operation(
        reads=known(operation.reads),
        makes=known(operation.makes),
        seconds=operation.seconds,
        scratch=operation.scratch,
        repeatable=operation.repeatable,
        remakes=None if operation.remakes is None else known(operation.remakes),
        memo=operation.memo,
        overwrites=known(operation.overwrites),
        name=operation.name,
    )
