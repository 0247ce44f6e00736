"""What is alive but idle in a plan: values that could be dropped, or offloaded, until they are used again."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from graphopt.planning.simulation.schedule import Decision, Scheduler

__all__ = ["Idle", "Touches"]


class Idle(NamedTuple):
    """A value between two touches, during which nothing reads or makes it.

    A named tuple, not a dataclass: searches make very many of them, and a frozen dataclass takes longer to make.

    Attributes:
        value: its index.
        moment: of the touch before: which operation was the next one to run for the first time.
        next_place: the place in the plan of the next touch.
    """

    value: int
    moment: int
    next_place: int

    @property
    def drop(self) -> Decision:
        """To drop the value as soon as it is idle."""
        return Decision(self.moment + 1, self.value)


class Touches:
    """Where every instance of every value is touched by the steps of a plan: made, or read.

    A value has one instance for each step that makes it. The two lists of instances run in parallel, because they are
    built and read in the inner loop of searches.

    Attributes:
        moments: for each place in the plan, the operation that was the next one to run for the first time.
        values: the value of each instance; with ``droppable``, of those alone that can be dropped.
        places: the places in the plan that touch each instance, ascending; the first one makes it.
    """

    def __init__(self, scheduler: Scheduler, steps: Sequence[int], *, droppable: bool = False) -> None:
        self.moments: list[int] = []
        self.values: list[int] = []
        self.places: list[list[int]] = []
        current: dict[int, list[int]] = {}
        reads, makes, remakes = (
            scheduler.touches if droppable else (scheduler.reads, scheduler.makes, scheduler.remakes)
        )
        upcoming = 0
        for place, step in enumerate(steps):
            self.moments.append(upcoming)
            made = remakes[step]
            if step == upcoming:
                upcoming += 1
                made = makes[step]
            for value in reads[step]:
                current[value].append(place)
            for value in made:
                current[value] = [place]
                self.values.append(value)
                self.places.append(current[value])

    def idle_at(self, place: int) -> list[Idle]:
        """What is alive at a place in the plan but idle, until a later moment."""
        found = []
        moments = self.moments
        for value, places in zip(self.values, self.places, strict=True):
            if places[0] < place < places[-1]:
                index = bisect_left(places, place)
                if places[index] != place:
                    before = moments[places[index - 1]]
                    if before < moments[places[index]]:
                        found.append(Idle(value, before, places[index]))
        return found

    def idle(self) -> list[Idle]:
        """What is idle anywhere, until a later moment."""
        moments = self.moments
        return [
            Idle(value, moments[before], after)
            for value, places in zip(self.values, self.places, strict=True)
            for before, after in pairwise(places)
            if moments[before] < moments[after]
        ]
