"""Decisions, and the runs that follow: first runs in order, stopped where something may have to be made again."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from graphopt.planning.problem import Problem

__all__ = ["VOID", "Decision", "Drops", "Sorted", "Stops"]


class Decision(NamedTuple):
    """What happens to a value just before an operation runs for the first time: it is dropped, or made again early.

    A named tuple, not a dataclass: searches hash and compare decisions all the time.

    Attributes:
        moment: the index of the operation.
        value: the index of the value.
        remake: make the value again if it is not there, although nothing needs it yet, in place of dropping it.
    """

    moment: int
    value: int
    remake: bool = False


Drops = frozenset[Decision]
"""All that is decided for a plan."""

VOID = -1
"""Stands for the stop of a decision that changes nothing."""


@dataclass(slots=True)
class Sorted:
    """Decisions that have an effect, by what they do.

    Attributes:
        gone: what is dropped.
        early: what is made again early, by moment.
        stops: the operations before which something may have to be made again.
    """

    gone: list[Decision]
    early: dict[int, list[int]]
    stops: set[int]


class Stops:
    """Turns decisions into runs."""

    def __init__(self, problem: Problem) -> None:
        self.makers = problem.makers
        self.reads = [operation.reads for operation in problem.operations]
        self.remakes = [operation.made_again for operation in problem.operations]
        self._readers = problem.readers
        self._droppable = problem.droppable()
        self._known: dict[Decision, int] = {}

    def steps(self, drops: Iterable[Decision]) -> list[int]:
        """The runs that follow from decisions; those about what may not be recomputed are left out."""
        found = self.sorted(drops)
        gone = sorted(found.gone, reverse=True)
        present = bytearray(b"\1") * len(self.makers)
        reads = self.reads
        steps: list[int] = []
        done = 0
        for index in sorted(found.stops):
            steps.extend(range(done, index))
            done = index
            while gone and gone[-1][0] <= index:
                present[gone.pop()[1]] = 0
            for value in found.early.get(index, ()):
                if not present[value]:
                    self._again(value, present, steps)
            for value in reads[index]:
                if not present[value]:
                    self._again(value, present, steps)
        steps.extend(range(done, len(reads)))
        return steps

    def sorted(self, drops: Iterable[Decision]) -> Sorted:
        """Decisions by what they do, without those that have no effect."""
        gone: list[Decision] = []
        early: dict[int, list[int]] = {}
        stops: set[int] = set()
        known = self._known
        for decision in drops:
            stop = known.get(decision)
            if stop is None:
                stop = self.stop(decision)
            if stop == VOID:
                continue
            if decision.remake:
                early.setdefault(stop, []).append(decision.value)
            else:
                gone.append(decision)
            stops.add(stop)
        stops.discard(len(self.reads))
        for values in early.values():
            values.sort()
        return Sorted(gone, early, stops)

    def stop(self, decision: Decision) -> int:
        """The first operation at which a decision may let something be recomputed; `VOID` for one without an effect.

        For a drop of what nothing of the program reads any more, that is the number of operations.
        """
        found = self._known.get(decision)
        if found is None:
            found = self._known[decision] = self._find_stop(decision)
        return found

    def _find_stop(self, decision: Decision) -> int:
        moment, value, remake = decision
        count = len(self.reads)
        if not self._droppable[value] or self.makers[value] >= moment or moment >= count:
            return VOID
        if remake:
            return moment
        readers = self._readers[value]
        place = bisect_left(readers, moment)
        return readers[place] if place < len(readers) else count

    def _again(self, value: int, present: bytearray, steps: list[int]) -> None:
        """Append the steps that make a value again, from what is there."""
        reads, remakes, makers = self.reads, self.remakes, self.makers
        stack = [makers[value]]
        while stack:
            operation = stack[-1]
            missing = [makers[source] for source in reads[operation] if not present[source]]
            if missing:
                stack += reversed(missing)
                continue
            stack.pop()
            if 0 not in [present[made] for made in remakes[operation]]:  # faster than all() of a generator
                continue
            steps.append(operation)
            for made in remakes[operation]:
                present[made] = 1
