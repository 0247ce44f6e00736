"""Runs that follow from decisions that differ in little from others whose runs are known.

What is made again in front of an operation depends on which of a few values are there. Where these are the same as in
the run that is known, so is what is made again: only the other stops are looked at anew. What is there is a whole
number with a bit for each value, so that many values are compared at once.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from graphopt.planning.simulation.edits import Edit
from graphopt.planning.simulation.stops import VOID, Decision, Drops, Stops

__all__ = ["Derived", "StepTrace"]

_FEW = 4
"""Which part of the decisions may differ, at most: one in so many."""


class _Made(NamedTuple):
    """What happens in front of an operation.

    Attributes:
        steps: that are recomputed.
        looked: a bit for each value of which it matters whether it is there; all of them are, afterwards.
        after: what is there afterwards.
    """

    steps: list[int]
    looked: int
    after: int


@dataclass(frozen=True, slots=True)
class _Stop:
    """A stop of the known run.

    Attributes:
        place: in the known plan, at which what is made again begins.
        early: what was to be made again early.
        cleared: a bit for each value that is dropped between the stop before and this one.
        made: what happened.
    """

    place: int
    early: Sequence[int]
    cleared: int
    made: _Made


class StepTrace:
    """The run of some decisions, stop by stop.

    Args:
        stops: of the problem.
        drops: the decisions.

    Attributes:
        drops: the decisions.
        steps: that follow from them.
    """

    def __init__(self, stops: Stops, drops: Drops) -> None:
        self.drops = drops
        self._stops = stops
        self._reads = [_bits(reads) for reads in stops.reads]
        self._remakes = [_bits(remakes) for remakes in stops.remakes]
        found = stops.sorted(drops)
        self._early = found.early
        self._gone = sorted(found.gone)
        self._moments = [decision.moment for decision in self._gone]
        self._indices = sorted(found.stops)
        self._everything = (1 << len(stops.makers)) - 1
        self._known: list[_Stop] = []
        self.steps: list[int] = []
        self._run()
        self._marks = [stop.made.looked | stop.cleared for stop in self._known]

    def _run(self) -> None:
        present, done = self._everything, 0
        steps = self.steps
        for index in self._indices:
            steps.extend(range(done, index))
            cleared = self._cleared(done if self._known else -1, index)
            early = self._early.get(index, ())
            made = self._make(index, early, present & ~cleared)
            self._known.append(_Stop(len(steps), early, cleared, made))
            steps += made.steps
            present, done = made.after, index
        steps.extend(range(done, len(self._reads)))

    def _cleared(self, before: int, index: int, without: Collection[Decision] = ()) -> int:
        """A bit for each value that is dropped behind one operation's moment and up to another's."""
        low, high = bisect_right(self._moments, before), bisect_right(self._moments, index)
        return _bits([decision.value for decision in self._gone[low:high] if decision not in without])

    def _make(self, index: int, early: Iterable[int], present: int) -> _Made:
        """Make again what is wanted early, and what an operation reads."""
        looked = self._reads[index]
        steps: list[int] = []
        makers = self._stops.makers
        wanted = [*early, *self._stops.reads[index]] if early or looked & ~present else ()
        for value in wanted:
            looked |= 1 << value
            if not present >> value & 1:
                present, seen = self._again(makers[value], present, steps)
                looked |= seen
        return _Made(steps, looked, present)

    def _again(self, maker: int, present: int, steps: list[int]) -> tuple[int, int]:
        """Append the runs that recompute an operation; what is there afterwards, and what was looked at."""
        makers, reads, remakes = self._stops.makers, self._reads, self._remakes
        looked = 0
        stack = [maker]
        while stack:
            operation = stack[-1]
            looked |= reads[operation]
            missing = reads[operation] & ~present
            if missing:
                sources = self._stops.reads[operation]
                stack += [makers[source] for source in reversed(sources) if missing >> source & 1]
                continue
            stack.pop()
            looked |= remakes[operation]
            if remakes[operation] & ~present:
                steps.append(operation)
                present |= remakes[operation]
        return present, looked

    def derive(self, drops: Drops) -> Derived | None:
        """The run of other decisions; None where these differ in much."""
        added, removed = drops - self.drops, self.drops - drops
        if _FEW * (len(added) + len(removed)) > len(self.drops) + len(drops):
            return None
        return Derived(self, _Difference(self, added, removed).edits())

    def again(self) -> list[tuple[int, list[int]]]:
        """The operations in front of which others are recomputed, in order, and these."""
        return [(index, stop.made.steps) for index, stop in zip(self._indices, self._known, strict=True)]


@dataclass(frozen=True, slots=True)
class Derived:
    """The run of other decisions.

    Attributes:
        trace: the known run.
        visits: where it differs from that: in front of which operations, and what takes the place of what, in order.
    """

    trace: StepTrace
    visits: list[tuple[int, Edit]]

    @property
    def edits(self) -> list[Edit]:
        """What takes the place of what in the known run, in order."""
        return [edit for _, edit in self.visits]

    def steps(self) -> list[int]:
        """The runs."""
        known = self.trace.steps
        steps: list[int] = []
        done = 0
        for place, removed, instead in self.edits:
            steps += known[done:place]
            steps += instead
            done = place + removed
        steps += known[done:]
        return steps

    def again(self) -> list[tuple[int, list[int]]]:
        """The operations in front of which others are recomputed, in order, and these."""
        if not self.visits:
            return self.trace.again()
        found = dict(self.trace.again())
        found.update((index, edit.steps) for index, edit in self.visits)
        return sorted(found.items())


class _Difference:
    """Finds where the run of other decisions differs from the known one.

    Both runs are walked at once, from visit to visit. Behind the last visited operation (``_at``), ``_there`` has a bit
    for each value that is there in the known run, and ``_differs`` one for each that is there in one of the two runs
    alone. As long as no value differs that matters to a known stop, the two runs do the same there, and it is passed.
    """

    def __init__(self, trace: StepTrace, added: Drops, removed: Drops) -> None:
        self._trace = trace
        stop = trace._stops.stop
        added_here = [decision for decision in added if stop(decision) != VOID]
        self._removed = {decision for decision in removed if stop(decision) != VOID}
        self._added = sorted(decision for decision in added_here if not decision.remake)
        self._moments = [decision.moment for decision in self._added]
        self._early: dict[int, tuple[set[int], set[int]]] = {}
        for which, decisions in enumerate((added_here, self._removed)):
            for decision in decisions:
                if decision.remake:
                    self._early.setdefault(decision.moment, (set(), set()))[which].add(decision.value)
        self._to_visit = self._changed([*added_here, *self._removed])
        self._at, self._there, self._differs = -1, trace._everything, 0
        self._edits: list[tuple[int, Edit]] = []

    def _changed(self, decisions: Iterable[Decision]) -> list[int]:
        """The operations at which decisions begin to matter: where they stop, and the first known stop behind drops."""
        indices, count = self._trace._indices, len(self._trace._reads)
        found = {self._trace._stops.stop(decision) for decision in decisions}
        for decision in decisions:
            if not decision.remake:
                place = bisect_left(indices, decision.moment)
                found.add(indices[place] if place < len(indices) else count)
        found.discard(count)
        return sorted(found)

    def edits(self) -> list[tuple[int, Edit]]:
        """Where they differ: in front of which operations, and what takes the place of what, in order."""
        trace = self._trace
        indices, marks = trace._indices, trace._marks
        number = 0
        for index in [*self._to_visit, len(trace._reads)]:
            end = bisect_left(indices, index)
            while number < end and self._differs:
                if self._differs & marks[number]:
                    self._visit(indices[number])
                number += 1
            number = end
            if index < len(trace._reads):
                self._visit(index)
                number += number < len(indices) and indices[number] == index
        return self._edits

    def _visit(self, index: int) -> None:
        """Make again what is needed in front of an operation, and note where that differs from the known run."""
        trace = self._trace
        number = bisect_left(trace._indices, index)
        stop = trace._known[number] if trace._indices[number : number + 1] == [index] else None
        before = trace._indices[number - 1] if number else -1
        self._pass_stops(number, before)
        cleared = stop.cleared if stop is not None and self._at == before else trace._cleared(self._at, index)
        ours_cleared = trace._cleared(self._at, index, self._removed) if self._removed else cleared
        ours = (self._there ^ self._differs) & ~(ours_cleared | self._dropped(self._at, index))
        there = self._there & ~cleared
        early = self._early_at(index)
        if stop is not None and list(stop.early) == early and not (ours ^ there) & stop.made.looked:
            after = ours | stop.made.looked
        else:
            made = trace._make(index, early, ours)
            after = made.after
            known = stop.made.steps if stop is not None else []
            if made.steps != known:
                self._edits.append((index, Edit(self._place(number, index), len(known), made.steps)))
        self._at, self._there = index, stop.made.after if stop is not None else there
        self._differs = after ^ self._there

    def _pass_stops(self, number: int, before: int) -> None:
        """Go on behind the last of the first known stops, where the last visit is not behind it already.

        What differed in front of stops that are passed still does: it does not matter to them.

        Args:
            number: of the known stops.
            before: the operation of the last of them; -1 where there is none.
        """
        if self._at <= before:
            self._at = before
            self._there = self._trace._known[number - 1].made.after if number else self._trace._everything

    def _dropped(self, before: int, index: int) -> int:
        """A bit for each value that only these decisions drop behind one operation's moment and up to another's."""
        low, high = bisect_right(self._moments, before), bisect_right(self._moments, index)
        return _bits([decision.value for decision in self._added[low:high]])

    def _early_at(self, index: int) -> list[int]:
        known = self._trace._early.get(index, ())
        added, removed = self._early.get(index, ((), ()))
        return sorted({*known, *added}.difference(removed))

    def _place(self, number: int, index: int) -> int:
        """The place in the known plan of what is made again in front of an operation."""
        trace = self._trace
        if trace._indices[number : number + 1] == [index]:
            return trace._known[number].place
        if not number:
            return index
        before = trace._known[number - 1]
        return before.place + len(before.made.steps) + index - trace._indices[number - 1]


def _bits(values: Iterable[int]) -> int:
    found = 0
    for value in values:
        found |= 1 << value
    return found
