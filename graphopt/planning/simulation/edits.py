"""Edits of a known plan: which runs are left out of it and added to it, and where all others are then.

Roles: which values and operations of a program do the same in another of its identical blocks.

Two operations play the same role where they look the same from near: the same seconds and bytes, and so do what they
read, what reads their results, and so on for a few steps. A decision that is good in one block is then tried in all
blocks at once, so that the search takes as many trials for a deep program as for a shallow one.

Source of the refinement: Weisfeiler and Leman's colouring of graphs, stopped after a few rounds, so that blocks in the
middle of a deep program differ from those at its ends only near the ends.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from graphopt.planning.problem import Operation, Problem

__all__ = ["Edit", "Places", "Roles", "find_roles"]


class Edit(NamedTuple):
    """Runs of a known plan that others take the place of; all of them are repeated runs.

    Attributes:
        place: in the known plan, of the first run that is left out; others begin there.
        removed: how many runs are left out.
        steps: the operations that run instead.
    """

    place: int
    removed: int
    steps: list[int]

    def trimmed(self, known: Sequence[int]) -> Edit:
        """The same edit without what both have in common at their beginnings and ends.

        Args:
            known: the plan's steps.
        """
        place, removed, steps = self
        ahead, most = 0, min(removed, len(steps))
        while ahead < most and known[place + ahead] == steps[ahead]:
            ahead += 1
        behind, most = 0, most - ahead
        while behind < most and known[place + removed - 1 - behind] == steps[-1 - behind]:
            behind += 1
        return Edit(place + ahead, removed - ahead - behind, steps[ahead : len(steps) - behind])


class Places:
    """Places of a known plan in one that is made from it by edits, which are in order and apart from each other."""

    def __init__(self, edits: Sequence[Edit]) -> None:
        self.edits = edits
        self._begins = [edit.place for edit in edits]
        self._shifts = [0]
        for edit in edits:
            self._shifts.append(self._shifts[-1] + len(edit.steps) - edit.removed)
        self.shift = self._shifts[-1]

    def kept(self, place: int) -> int:
        """Where a run of the known plan is now; -1 where it is left out."""
        number = bisect_right(self._begins, place)
        if number:
            edit = self.edits[number - 1]
            if place < edit.place + edit.removed:
                return -1
        return place + self._shifts[number]

    def beginning(self, place: int) -> int:
        """Where the life begins, of a value that is not touched by what is added, that began at a known run."""
        number = bisect_right(self._begins, place)
        if number:
            edit = self.edits[number - 1]
            place = max(place, edit.place + edit.removed)
        return place + self._shifts[number]

    def behind(self, place: int) -> int:
        """The place behind the end of such a life, that ended with a known run."""
        number = bisect_right(self._begins, place)
        if number:
            edit = self.edits[number - 1]
            if place < edit.place + edit.removed:
                return edit.place + edit.removed + self._shifts[number]
        return place + 1 + self._shifts[number]

    def kept_touches(self, touches: Sequence[int]) -> list[int]:
        """Where ascending touches of runs that are kept are now; a touch is twice the place, and one more or not."""
        found: list[int] = []
        begins, shifts = self._begins, self._shifts
        done, number = 0, bisect_right(begins, touches[0] >> 1)
        if number and touches[0] >> 1 < begins[number - 1] + self.edits[number - 1].removed:
            number -= 1
        while number < len(begins) and 2 * begins[number] <= touches[-1]:
            place, removed, _ = self.edits[number]
            end = bisect_left(touches, 2 * place, done)
            shift = 2 * shifts[number]
            found += [touch + shift for touch in touches[done:end]]
            done = bisect_left(touches, 2 * (place + removed), end)
            number += 1
        shift = 2 * shifts[number]
        found += [touch + shift for touch in touches[done:]]
        return found

    def added(self, number: int) -> int:
        """The place of the first run that an edit adds."""
        return self._begins[number] + self._shifts[number]

    def origin(self, place: int) -> tuple[int, int]:
        """The place in the known plan of a run and -1; or -1 and the operation, of one that is added."""
        for number, edit in enumerate(self.edits):
            begin = self.added(number)
            if place < begin:
                return place - self._shifts[number], -1
            if place < begin + len(edit.steps):
                return -1, edit.steps[place - begin]
        return place - self.shift, -1


_ROUNDS = 3
"""How many operations away a difference is still seen."""

_DIGITS = 3
"""Significant digits of the seconds that are compared: measured times of equal operations differ a little."""


@dataclass(frozen=True, slots=True)
class Roles:
    """Numbers that are equal for what plays the same role.

    Attributes:
        values: the role of each value.
        operations: the role of each operation.
        repeats: how many identical blocks there are: how often an operation's role occurs (the median over the
            operations).
    """

    values: tuple[int, ...]
    operations: tuple[int, ...]
    repeats: int


def find_roles(problem: Problem) -> Roles:
    """The roles of a problem's values and operations."""
    makers, readers = problem.makers, problem.readers
    places = {v: place for operation in problem.operations for place, v in enumerate(operation.makes)}
    operations = _numbered(_from_near(problem, operation) for operation in problem.operations)
    values: list[int] = []
    for _ in range(_ROUNDS):
        values = _numbered(
            (operations[makers[value]], places[value], _of(operations, readers[value]))
            for value in range(len(problem.sizes))
        )
        operations = _numbered(
            (role, _of(values, operation.reads), _of(values, operation.makes))
            for role, operation in zip(operations, problem.operations, strict=True)
        )
    return Roles(tuple(values), tuple(operations), _repeats(operations))


def _from_near(problem: Problem, operation: Operation) -> Hashable:
    """What an operation looks like by itself."""
    sizes = problem.sizes
    return (
        f"{operation.seconds:.{_DIGITS}g}",
        operation.scratch,
        operation.memo,
        operation.repeatable,
        len(operation.overwrites),
        _of(sizes, operation.reads),
        _of(sizes, operation.makes),
    )


def _of(numbers: Sequence[int], values: Iterable[int]) -> tuple[int, ...]:
    """The numbers that belong to some values."""
    return tuple([numbers[value] for value in values])


def _numbered(labels: Iterable[Hashable]) -> list[int]:
    """Equal labels get equal numbers, in the order in which they appear."""
    known: dict[Hashable, int] = {}
    return [known.setdefault(label, len(known)) for label in labels]


def _repeats(operations: Sequence[int]) -> int:
    """How often the role of the operation in the middle occurs, when operations are sorted by that."""
    counts = Counter(operations)
    often = sorted(counts[role] for role in operations)
    return often[len(often) // 2] if often else 0
