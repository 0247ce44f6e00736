"""Edits of a known plan: which runs are left out of it and added to it, and where all others are then."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Edit", "Places"]


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
