"""From decisions to steps: values are dropped at given moments, and made again when something needs them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import NamedTuple

from graphopt.planning.problem import Plan, Problem, Simulated

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
        self.overwrites = [operation.overwrites for operation in problem.operations]
        self._overwritten = {value for values in self.overwrites for value in values}
        self.memo = {i: operation.memo for i, operation in enumerate(problem.operations) if operation.memo}
        self.droppable = problem.droppable()
        self._base = problem.seconds
        self._readers = problem.readers

    def readers(self, value: int) -> list[int]:
        """The operations that read a value in the program as it is, in order."""
        return self._readers[value]

    def last_read(self, value: int) -> int:
        """The last operation that reads a value in the program as it is (its maker, where none does)."""
        return self._readers[value][-1] if self._readers[value] else self.makers[value]

    def steps(self, drops: Iterable[Decision]) -> list[int]:
        """The runs that follow from these drops; drops of what may not run again are left out."""
        gone, early = self._by_moment(drops)
        present = bytearray(len(self.problem.sizes))
        reads, makes = self.reads, self.makes
        steps: list[int] = []
        for index, needed in enumerate(reads):
            for value in gone.get(index, ()):
                present[value] = 0
            for value in early.get(index, ()):
                if not present[value]:
                    self._again(value, present, steps)
            for value in needed:
                if not present[value]:
                    self._again(value, present, steps)
            steps.append(index)
            for value in makes[index]:
                present[value] = 1
        return steps

    def _by_moment(self, drops: Iterable[Decision]) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        """What is dropped at each moment, and what is made again there; what may not run again is left out."""
        droppable, makers = self.droppable, self.makers
        gone: dict[int, list[int]] = {}
        early: dict[int, list[int]] = {}
        for moment, value, remake in drops:
            if not droppable[value]:
                continue
            if not remake:
                gone.setdefault(moment, []).append(value)
            elif makers[value] < moment:
                early.setdefault(moment, []).append(value)
        for values in early.values():
            values.sort()
        return gone, early

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
        """Steps, bytes and seconds of these drops."""
        return self.measure(self.steps(drops))

    def measure(self, steps: list[int]) -> Simulated:
        """Bytes and seconds of steps that are known to be valid; the same as ``simulate``, without its checks."""
        problem, sizes = self.problem, self.problem.sizes
        change = [0] * (len(steps) + 1)
        last, overwriting = self._lives(steps, change)
        if problem.held:
            self._hold(steps, last, problem.held)
        for value, place in enumerate(last):
            change[place + 1] -= sizes[value]
        change.pop()
        extra = [self.scratch[step] for step in steps]
        if overwriting:
            self._overwrite(overwriting, last, extra)
        if self.memo:
            self._memos(steps, change, extra)
        alive = [count + more for count, more in zip(accumulate(change), extra, strict=True)]
        if problem.resident:
            alive = [count + problem.resident for count in alive]
        seconds = self.seconds
        total = sum([seconds[step] for step in steps])
        return Simulated(Plan(tuple(steps)), alive, max(alive, default=problem.resident), total, total - self._base)

    def _lives(self, steps: list[int], change: list[int]) -> tuple[list[int], list[tuple[int, int, int]]]:
        """Where lives end; ``change`` gets the sizes of births, and of the ends of all but the newest lives.

        Returns:
            for each value the last step that touches its newest life; and (step, value, end of its life, or 0 where
            that is the newest one) of whatever results may take the place of. Plain lists and tuples, because this is
            the innermost loop of every search.
        """
        reads, makes, remakes, sizes = self.reads, self.makes, self.remakes, self.problem.sizes
        overwrites, overwritten = self.overwrites, self._overwritten
        born, last = [-1] * len(sizes), [-1] * len(sizes)
        again = bytearray(len(sizes))
        overwriting: list[tuple[int, int, int]] = []
        earlier: dict[tuple[int, int], int] = {}
        upcoming = 0
        for place, step in enumerate(steps):
            for value in reads[step]:
                last[value] = place
            first = step == upcoming
            for value in overwrites[step]:
                if again[value] != first:
                    overwriting.append((place, value, born[value]))
            upcoming += first
            for value in makes[step] if first else remakes[step]:
                if born[value] >= 0:
                    change[last[value] + 1] -= sizes[value]
                    if value in overwritten:
                        earlier[value, born[value]] = last[value]
                again[value] = not first
                born[value] = last[value] = place
                change[place] += sizes[value]
        return last, [(place, value, earlier.get((value, since), 0)) for place, value, since in overwriting]

    def _overwrite(self, overwriting: list[tuple[int, int, int]], last: list[int], extra: list[int]) -> None:
        """Take off ``extra`` what steps do not need because their results take the place of what ends there."""
        sizes = self.problem.sizes
        saved = {place: sizes[value] for place, value, end in overwriting if (end or last[value]) == place}
        for place, count in saved.items():
            extra[place] -= count

    def _memos(self, steps: list[int], change: list[int], extra: list[int]) -> None:
        """Add what operations that run again leave behind, until their last runs, and need once more meanwhile."""
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for place, step in enumerate(steps):
            if step in self.memo:
                if step in first:
                    last[step] = place
                    extra[place] += self.memo[step]
                else:
                    first[step] = place
        for step, place in last.items():
            change[first[step]] += self.memo[step]
            if place + 1 < len(change):
                change[place + 1] -= self.memo[step]

    def _hold(self, steps: list[int], last: list[int], held: Mapping[int, int]) -> None:
        """Move the ends of values that are held behind the first runs of what they are held for."""
        position: dict[int, int] = {}
        for place, step in enumerate(steps):
            position.setdefault(step, place)
        for value, until in held.items():
            last[value] = max(last[value], position.get(until, len(steps) - 1))
