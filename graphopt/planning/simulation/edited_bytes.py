"""Bytes alive at each step of plans that differ in few runs from one whose bytes are known.

A run that is left out or added touches few values. All others are alive where they were; only the lives of these few
are found anew, so that a candidate costs what differs in it, and not what it has in common with the known plan.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from graphopt.planning.problem import Problem
from graphopt.planning.simulation.edits import Edit, Places

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from graphopt.planning.simulation.step_bytes import Lives

    Integers = NDArray[np.int64]

__all__ = ["EditedBytes", "RunTables"]


class RunTables:
    """What the runs of a problem's operations touch and need, as lists."""

    def __init__(self, problem: Problem) -> None:
        operations = problem.operations
        self.reads = [operation.reads for operation in operations]
        self.remakes = [operation.made_again for operation in operations]
        self.touched_again = [(*operation.reads, *operation.made_again) for operation in operations]
        self.memo = [operation.memo for operation in operations]
        self.needed_again = [operation.scratch + operation.memo for operation in operations]
        self.overwrites = [operation.overwrites for operation in operations]
        self.overwritten = {value for values in self.overwrites for value in values}
        self.sizes = problem.sizes
        self.held = problem.held


@dataclass(slots=True)
class _Touched:
    """A value that is touched by what is left out or added.

    Attributes:
        value: its index.
        first: the number of the first edit that touches it.
        last: of the last one.
        added: its touches by what is added: twice the place, and one more where the value is made there.
    """

    value: int
    first: int
    last: int
    added: list[int]


def _touched(found: dict[int, _Touched], value: int, number: int) -> _Touched:
    """What is known of a value that an edit touches, which is the last one so far."""
    touched = found.get(value)
    if touched is None:
        touched = found[value] = _Touched(value, number, number, [])
    touched.last = number
    return touched


class EditedBytes:
    """The bytes of a known plan, and of those that differ from it in few repeated runs.

    Args:
        tables: of the problem.
        lives: of what the known plan makes.
    """

    def __init__(self, tables: RunTables, lives: Lives) -> None:
        self._tables = tables
        self._steps: list[int] = lives.runs.tolist()
        self._first: list[bool] = lives.first.tolist()
        self._started: list[int] = np.flatnonzero(lives.first).tolist()
        self._total = lives.alive
        self._carried = lives.carried
        width, count = 2 * len(self._steps), len(tables.sizes)
        self._touches: list[int] = (lives.touches % max(width, 1)).tolist()
        self._touches_from: list[int] = np.searchsorted(lives.touches, np.arange(count + 1) * width).tolist()
        self._begins: list[int] = lives.begins.tolist()
        self._ends: list[int] = lives.ends.tolist()
        self._lives_from: list[int] = np.searchsorted(lives.values, np.arange(count + 1)).tolist()
        self._taken: dict[int, set[int]] = {}
        self._taken_at: dict[int, list[int]] = {}
        for place, value in zip(lives.taking.tolist(), lives.taken.tolist(), strict=True):
            self._taken.setdefault(place, set()).add(value)
            self._taken_at.setdefault(value, []).append(place)

    def of(self, edits: Sequence[Edit]) -> Integers:
        """The bytes alive at each step of the known plan with edits, which are in order and apart from each other."""
        if not edits:
            return self._total
        places = Places(edits)
        alive = self._others(places)
        change = _Change(self, places)
        tables = self._tables
        for touched in change.touched():
            if tables.sizes[touched.value]:
                change.live_anew(touched)
        for operation in change.with_memo():
            change.remember_anew(operation)
        return change.applied(alive)

    def alive_across(self, value: int, place: int) -> bool:
        """Whether one life of a value has begun before a place of the known plan, and ends there or later."""
        start = self._lives_from[value]
        number = bisect_left(self._begins, place, start, self._lives_from[value + 1]) - 1
        return number >= start and self._ends[number] >= place

    def _others(self, places: Places) -> Integers:
        """The bytes with the lives of the known plan, what is left out cut from them, and scratch of what is added."""
        needed = self._tables.needed_again
        alive = np.empty(len(self._steps) + places.shift, dtype=np.int64)
        done = at = 0
        for place, removed, steps in places.edits:
            alive[at : at + place - done] = self._total[done:place]
            at += place - done
            if steps:
                carried = int(self._carried[place])
                alive[at : at + len(steps)] = [carried + needed[step] for step in steps]
            done, at = place + removed, at + len(steps)
        alive[at:] = self._total[done:]
        return alive


class _Change:
    """What edits change in the bytes of a known plan."""

    def __init__(self, known: EditedBytes, places: Places) -> None:
        self._known = known
        self._tables = known._tables
        self._places = places
        self._steps: dict[int, int] = {}
        self._taken: dict[int, tuple[int, set[int]]] = {}

    def touched(self) -> Iterator[_Touched]:
        """The values whose lives may change.

        What is added does not change the life of a value that it reads only, where the known plan reads the value
        later too.
        """
        again, reads, remakes = self._tables.touched_again, self._tables.reads, self._tables.remakes
        steps = self._known._steps
        found: dict[int, _Touched] = {}
        changed = set[int]()
        for number, (place, removed, added) in enumerate(self._places.edits):
            key = 2 * self._places.added(number)
            for step in steps[place : place + removed]:
                for value in again[step]:
                    _touched(found, value, number)
                changed.update(again[step])
            for step in added:
                for value in reads[step]:
                    _touched(found, value, number).added.append(key)
                    if value not in changed and not self._known.alive_across(value, place):
                        changed.add(value)
                for value in remakes[step]:
                    _touched(found, value, number).added.append(key + 1)
                changed.update(remakes[step])
                key += 2
        return (touched for value, touched in found.items() if value in changed)

    def _add(self, begin: int, behind: int, size: int) -> None:
        steps = self._steps
        steps[begin] = steps.get(begin, 0) + size
        steps[behind] = steps.get(behind, 0) - size

    def live_anew(self, touched: _Touched) -> None:
        """Take off the known lives of a value, and add those that it has with touches by what is added.

        Lives that end before the first edit that touches the value, or begin behind the last one, stay as they are.
        """
        known, places, tables, value = self._known, self._places, self._tables, touched.value
        size, begins, ends = tables.sizes[value], known._begins, known._ends
        low, high = known._lives_from[value], known._lives_from[value + 1]
        first, last = places.edits[touched.first], places.edits[touched.last]
        start = max(low, bisect_left(begins, first.place, low, high) - 1)
        stop = bisect_left(begins, last.place + last.removed, start, high)
        for number in range(start, stop):
            self._add(places.beginning(begins[number]), places.behind(ends[number]), -size)
        window = range(begins[start], begins[stop] if stop < high else len(known._steps))
        low, high = known._touches_from[value], known._touches_from[value + 1]
        low = bisect_left(known._touches, 2 * window.start, low, high)
        high = bisect_left(known._touches, 2 * window.stop, low, high)
        lives = self._lives(sorted(places.kept_touches(known._touches[low:high]) + touched.added))
        until = tables.held.get(value)
        if until is not None:  # made once only
            lives[-1] = lives[-1][0], max(lives[-1][1], self._held_until(until))
        for begin, end in lives:
            self._add(begin, end + 1, size)
        if value in tables.overwritten:
            self._take_anew(value, window, lives)

    def _held_until(self, operation: int) -> int:
        started = self._known._started
        return self._places.kept(started[operation] if operation < len(started) else len(self._known._steps) - 1)

    @staticmethod
    def _lives(touches: Iterable[int]) -> list[tuple[int, int]]:
        """First and last place of each life of a value."""
        found: list[tuple[int, int]] = []
        begin = end = -1
        for touch in touches:
            if touch & 1:
                if begin >= 0:
                    found.append((begin, end))
                begin = touch >> 1
            end = touch >> 1
        found.append((begin, end))
        return found

    def _take_anew(self, value: int, window: range, lives: Iterable[tuple[int, int]]) -> None:
        """Note at which places a result takes the place of a value, where that may change.

        Args:
            value: its index.
            window: of the known plan, within which its lives change.
            lives: the new ones.
        """
        for known in self._known._taken_at.get(value, ()):
            place = self._places.kept(known) if known in window else -1
            if place >= 0:
                self._taken_now(place)[1].discard(value)
        for begin, end in lives:
            step, first = self._run_at(end)
            if value in self._tables.overwrites[step] and first == self._run_at(begin)[1]:
                self._taken_now(end)[1].add(value)
                self._taken[end] = (self._tables.sizes[value], self._taken[end][1])

    def _taken_now(self, place: int) -> tuple[int, set[int]]:
        """The size, and the values, any of which a result takes the place of at a place of the new plan."""
        found = self._taken.get(place)
        if found is None:
            values = self._known._taken.get(self._places.origin(place)[0], set())
            size = self._tables.sizes[next(iter(values))] if values else 0
            found = self._taken[place] = (size, set(values))
        return found

    def _run_at(self, place: int) -> tuple[int, bool]:
        """The operation that runs at a place of the new plan, and whether it is its first run."""
        origin, step = self._places.origin(place)
        return (step, False) if origin < 0 else (self._known._steps[origin], self._known._first[origin])

    def with_memo(self) -> set[int]:
        """The operations that leave something behind for their repetition, whose runs change."""
        memo, steps = self._tables.memo, self._known._steps
        return {
            step
            for place, removed, added in self._places.edits
            for step in (*steps[place : place + removed], *added)
            if memo[step]
        }

    def remember_anew(self, operation: int) -> None:
        """What an operation leaves behind for its repetition, from its first run to its last."""
        known, places, size = self._known, self._places, self._tables.memo[operation]
        start = known._started[operation]
        again = [place for place in range(start + 1, len(known._steps)) if known._steps[place] == operation]
        begin = places.kept(start)
        if again:
            self._add(begin, places.behind(again[-1]), -size)
        now = [places.kept(place) for place in again]
        for number, edit in enumerate(places.edits):
            now += [places.added(number) + at for at, step in enumerate(edit.steps) if step == operation]
        last = max(now, default=-1)
        if last >= 0:
            self._add(begin, last + 1, size)

    def applied(self, alive: Integers) -> Integers:
        """Bytes with the lives that changed."""
        if any(self._steps.values()):
            change = np.zeros(len(alive) + 1, dtype=np.int64)
            change[list(self._steps)] = list(self._steps.values())
            alive += change[:-1].cumsum()
        for place, (size, values) in self._taken.items():
            before = bool(self._known._taken.get(self._places.origin(place)[0]))
            if before != bool(values):
                alive[place] += size if before else -size
        return alive
