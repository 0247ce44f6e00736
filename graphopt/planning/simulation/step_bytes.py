"""Bytes alive at each step of a plan that is known to be valid: what every candidate of a search is judged by.

Both ways give what ``problem.simulate`` gives, without its checks. Lists are faster for few steps, since calls into
numpy have a fixed price; arrays are several times faster for the thousands of steps of a deep program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from graphopt.planning.problem import Problem

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]

__all__ = ["ArrayBytes", "ListBytes", "Lives"]


class ListBytes:
    """Bytes of steps, with plain lists and tuples."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._reads = [operation.reads for operation in problem.operations]
        self._makes = [operation.makes for operation in problem.operations]
        self._remakes = [operation.made_again for operation in problem.operations]
        self._scratch = [operation.scratch for operation in problem.operations]
        self._overwrites = [operation.overwrites for operation in problem.operations]
        self._overwritten = {value for values in self._overwrites for value in values}
        self._memo = {i: operation.memo for i, operation in enumerate(problem.operations) if operation.memo}

    def __call__(self, steps: Sequence[int]) -> list[int]:
        """The bytes alive at each step."""
        problem, sizes = self._problem, self._problem.sizes
        change = [0] * (len(steps) + 1)
        last, overwriting = self._lives(steps, change)
        if problem.held:
            self._hold(steps, last, problem.held)
        for value, place in enumerate(last):
            change[place + 1] -= sizes[value]
        change.pop()
        extra = [self._scratch[step] for step in steps]
        for place, value, end in overwriting:
            if (end or last[value]) == place:
                extra[place] = self._scratch[steps[place]] - sizes[value]
        if self._memo:
            self._memos(steps, change, extra)
        alive = [count + more for count, more in zip(accumulate(change), extra, strict=True)]
        return [count + problem.resident for count in alive] if problem.resident else alive

    def _lives(self, steps: Sequence[int], change: list[int]) -> tuple[list[int], list[tuple[int, int, int]]]:
        """Where lives end; ``change`` gets the sizes of births, and of the ends of all but the newest lives.

        Returns:
            for each value the last step that touches its newest life; and (step, value, end of its life, or 0 where
            that is the newest one) of whatever results may take the place of.
        """
        reads, makes, remakes, sizes = self._reads, self._makes, self._remakes, self._problem.sizes
        overwrites, overwritten = self._overwrites, self._overwritten
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

    def _memos(self, steps: Sequence[int], change: list[int], extra: list[int]) -> None:
        """Add what operations that are recomputed leave behind, until their last runs, and need once more meanwhile."""
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for place, step in enumerate(steps):
            if step in self._memo:
                if step in first:
                    last[step] = place
                    extra[place] += self._memo[step]
                else:
                    first[step] = place
        for step, place in last.items():
            change[first[step]] += self._memo[step]
            if place + 1 < len(change):
                change[place + 1] -= self._memo[step]

    def _hold(self, steps: Sequence[int], last: list[int], held: Mapping[int, int]) -> None:
        """Move the ends of values that are held behind the first runs of what they are held for."""
        position: dict[int, int] = {}
        for place, step in enumerate(steps):
            position.setdefault(step, place)
        for value, until in held.items():
            last[value] = max(last[value], position.get(until, len(steps) - 1))


class _Rows:
    """Rows of whole numbers of different lengths, one behind the other in one array."""

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        self.lengths = np.array([len(row) for row in rows], dtype=np.int64)
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)[:-1]]).astype(np.int64)
        self.items = np.array([item for row in rows for item in row], dtype=np.int64)

    def of(self, numbers: Integers) -> tuple[Integers, Integers]:
        """The items of some rows, one row behind the other, and for each item which of ``numbers`` it belongs to."""
        lengths = self.lengths[numbers]
        owners = np.repeat(np.arange(len(numbers)), lengths)
        before = np.cumsum(lengths) - lengths
        return self.items[np.arange(len(owners)) + (self.starts[numbers] - before)[owners]], owners


@dataclass(frozen=True, slots=True)
class Lives:
    """What happens to values in a plan, and the bytes that follow.

    Attributes:
        runs: the operation at each place.
        first: whether it runs for the first time there.
        touches: by value and place: value * 2 * places + 2 * place + whether the value is made there, ascending.
        values: of each life.
        begins: the place at which each life begins.
        ends: the last place of each life.
        alive: bytes at each place.
        carried: bytes at each place that were alive at the place before as well.
        taking: places at which a result takes the place of a value.
        taken: that value; of several at one place, any one of which would do, each.
    """

    runs: Integers
    first: NDArray[np.bool_]
    touches: Integers
    values: Integers
    begins: Integers
    ends: Integers
    alive: Integers
    carried: Integers
    taking: Integers
    taken: Integers


class ArrayBytes:
    """Bytes of steps, with arrays.

    Every touch of a value is one number, made of the value, the place in the plan, and whether it is read or made
    there. Sorted, they show each life: from where the value is made to the touch in front of where it is made next.
    """

    def __init__(self, problem: Problem) -> None:
        operations = problem.operations
        reads = [tuple(2 * value for value in operation.reads) for operation in operations]
        makes = [tuple(2 * value + 1 for value in operation.makes) for operation in operations]
        remakes = [tuple(2 * value + 1 for value in operation.made_again) for operation in operations]
        self._count = len(operations)
        self._touches = _Rows([a + b for a, b in zip((*reads, *reads), (*makes, *remakes), strict=True)])
        self._overwrites = _Rows([operation.overwrites for operation in operations])
        self._sizes = np.array(problem.sizes, dtype=np.int64)
        self._scratch = np.array([operation.scratch for operation in operations], dtype=np.int64)
        self._memo = np.array([operation.memo for operation in operations], dtype=np.int64)
        self._held = np.array(list(problem.held), dtype=np.int64)
        self._until = np.array(list(problem.held.values()), dtype=np.int64)
        self._resident = problem.resident

    def __call__(self, steps: Sequence[int]) -> list[int]:
        """The bytes alive at each step."""
        alive: list[int] = self.lives(steps).alive.tolist()
        return alive

    def lives(self, steps: Sequence[int]) -> Lives:
        """The lives of all that steps make, and the bytes that follow from them."""
        runs = np.array(steps, dtype=np.int64)
        first = np.diff(np.maximum.accumulate(runs), prepend=-1) > 0
        born, gone = np.zeros((2, len(runs) + 1), dtype=np.int64)
        extra = self._scratch[runs]
        touches, values, begins, ends = self._lives(runs, first)
        sizes = self._sizes[values]
        np.add.at(born, begins, sizes)
        np.add.at(gone, ends + 1, sizes)
        taking, taken = self._take(runs, first, (values, begins, ends))
        extra[taking] -= self._sizes[taken]
        self._memos(runs, first, (born, gone), extra)
        alive = np.cumsum(born - gone)[:-1] + self._resident
        return Lives(runs, first, touches, values, begins, ends, alive + extra, alive - born[:-1], taking, taken)

    def _lives(self, runs: Integers, first: NDArray[np.bool_]) -> tuple[Integers, Integers, Integers, Integers]:
        """All touches; and of each life, by value and place: the value, and the places at which it begins and ends."""
        touched, places = self._touches.of(np.where(first, runs, runs + self._count))
        width = 2 * len(runs)
        touches = np.sort((touched >> 1) * width + 2 * places + (touched & 1))
        made = np.flatnonzero(touches & 1)
        places = touches % width >> 1
        values, begins = touches[made] // width, places[made]
        ends = places[np.append(made[1:], len(touches)) - 1]
        if len(self._held):
            held = np.searchsorted(values, self._held)
            started = np.append(np.flatnonzero(first), len(runs) - 1)
            ends[held] = np.maximum(ends[held], started[self._until])
        return touches, values, begins, ends

    def _take(
        self, runs: Integers, first: NDArray[np.bool_], lives: tuple[Integers, Integers, Integers]
    ) -> tuple[Integers, Integers]:
        """Places at which a result takes the place of a value whose life ends there, and these values."""
        over, places = self._overwrites.of(runs)
        if not len(over):
            return over, places
        values, begins, ends = lives
        keys = values * len(runs) + ends
        found = np.searchsorted(keys, over * len(runs) + places)
        found = np.minimum(found, len(keys) - 1)
        there = (keys[found] == over * len(runs) + places) & (first[begins[found]] == first[places])
        return places[there], over[there]

    def _memos(
        self, runs: Integers, first: NDArray[np.bool_], change: tuple[Integers, Integers], extra: Integers
    ) -> None:
        """Add what operations that are recomputed leave behind, until their last runs, and need once more meanwhile."""
        again = np.flatnonzero(~first & (self._memo[runs] > 0))
        if not len(again):
            return
        extra[again] += self._memo[runs[again]]
        steps = np.unique(runs[again])
        last = np.zeros(self._count, dtype=np.int64)
        last[runs[again]] = again  # of several places, the last one
        born, gone = change
        np.add.at(born, np.flatnonzero(first)[steps], self._memo[steps])
        np.add.at(gone, last[steps] + 1, self._memo[steps])
