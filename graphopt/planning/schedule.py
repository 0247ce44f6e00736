"""From decisions to steps: values are dropped at given moments, and made again when something needs them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

from graphopt.planning.problem import Plan, Problem, Simulated, repeated_seconds
from graphopt.planning.step_bytes import step_bytes

__all__ = ["Decision", "Drops", "Scheduler"]


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

_VOID = -1
"""Stands for the stop of a decision that changes nothing."""


class Scheduler:
    """Turns drops into steps and bytes, fast: the inner loop of every search.

    At each operation of the program, what it reads and is not there is made again first, from what is there. What was
    made again stays until its next drop, or its last use.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.makers = problem.makers
        self.reads = [operation.reads for operation in problem.operations]
        self.makes = [operation.makes for operation in problem.operations]
        self.seconds = [operation.seconds for operation in problem.operations]
        self.scratch = [operation.scratch for operation in problem.operations]
        self.remakes = [operation.made_again for operation in problem.operations]
        self.droppable = problem.droppable()
        self._base = problem.seconds
        self._readers = problem.readers
        self._bytes = step_bytes(problem)
        self._stops: dict[Decision, int] = {}

    def readers(self, value: int) -> list[int]:
        """The operations that read a value in the program as it is, in order."""
        return self._readers[value]

    def last_read(self, value: int) -> int:
        """The last operation that reads a value in the program as it is (its maker, where none does)."""
        return self._readers[value][-1] if self._readers[value] else self.makers[value]

    def steps(self, drops: Iterable[Decision]) -> list[int]:
        """The runs that follow from these drops; drops of what may not run again are left out.

        Between the operations at which something may have to be made again, first runs follow each other.
        """
        gone, early, stops = self._by_moment(drops)
        gone.sort(reverse=True)
        present = bytearray(b"\1") * len(self.problem.sizes)
        reads = self.reads
        steps: list[int] = []
        done = 0
        for index in sorted(stops):
            steps.extend(range(done, index))
            done = index
            while gone and gone[-1][0] <= index:
                present[gone.pop()[1]] = 0
            for value in early.get(index, ()):
                if not present[value]:
                    self._again(value, present, steps)
            for value in reads[index]:
                if not present[value]:
                    self._again(value, present, steps)
        steps.extend(range(done, len(reads)))
        return steps

    def _by_moment(self, drops: Iterable[Decision]) -> tuple[list[Decision], dict[int, list[int]], set[int]]:
        """What is dropped, what is made again at each moment, and at which moments something may be missing.

        What may not run again is left out, and what is decided about a value that is not made yet.
        """
        gone: list[Decision] = []
        early: dict[int, list[int]] = {}
        stops: set[int] = set()
        known = self._stops
        for decision in drops:
            stop = known.get(decision)
            if stop is None:
                stop = known[decision] = self._stop(decision)
            if stop == _VOID:
                continue
            if decision.remake:
                early.setdefault(stop, []).append(decision.value)
            else:
                gone.append(decision)
            stops.add(stop)
        stops.discard(len(self.reads))
        for values in early.values():
            values.sort()
        return gone, early, stops

    def _stop(self, decision: Decision) -> int:
        """The first operation at which a decision may make something run again; `_VOID` for one without an effect."""
        moment, value, remake = decision
        count = len(self.reads)
        if not self.droppable[value] or self.makers[value] >= moment or moment >= count:
            return _VOID
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

    def evaluate(self, drops: Iterable[Decision]) -> Simulated:
        """Steps, bytes and seconds of these drops; the same as ``simulate`` gives for the steps."""
        steps = self.steps(drops)
        alive = self._bytes(steps)
        again = repeated_seconds(steps, self.seconds)
        return Simulated(
            Plan(tuple(steps)), alive, max(alive, default=self.problem.resident), self._base + again, again
        )
