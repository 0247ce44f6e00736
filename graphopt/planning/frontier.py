"""The plans of which none is better in both bytes and seconds."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

from graphopt.planning.problem import Simulated
from graphopt.planning.simulation.candidates import Candidate
from graphopt.planning.simulation.stops import Drops

__all__ = ["Frontier", "Point"]


@dataclass(slots=True)
class Point:
    """One plan on the frontier: its peak in bytes, the seconds that it recomputes, and its decisions.

    ``explored`` says how many of the values that are idle at its peak have been tried.

    Example:
        >>> point = planning.find_frontier(problem).within(1000)
        >>> point.peak <= 1000, point.again
        (True, 0.0)
    """

    peak: int
    again: float
    drops: Drops
    explored: int = 0


_PEAK = attrgetter("peak")


class Frontier:
    """Keeps the best plans: from few bytes and many seconds to many bytes and few seconds.

    It is whole at every moment, so that an interruption from the keyboard leaves what was found before.

    Attributes:
        cut_short: what ended the search before its planned effort was spent; empty where nothing did.

    Example:
        >>> frontier = planning.find_frontier(problem)
        >>> frontier.lowest.peak, len(frontier) >= 1
        (180, True)
    """

    def __init__(self) -> None:
        self.cut_short: Literal["", "time limit", "interrupted"] = ""
        self._points: list[Point] = []

    def __iter__(self) -> Iterator[Point]:
        return iter(self._points)

    def __len__(self) -> int:
        return len(self._points)

    def offer(self, drops: Drops, simulated: Simulated | Candidate | Point) -> bool:
        """Take a plan if no other one is as good in both; says whether it was taken."""
        peak, again = simulated.peak, simulated.again
        place = bisect_right(self._points, peak, key=_PEAK)
        if place and self._points[place - 1].again <= again:
            return False
        start = bisect_left(self._points, peak, key=_PEAK)
        end = start
        while end < len(self._points) and self._points[end].again >= again:
            end += 1
        self._points[start:end] = [Point(peak, again, drops)]
        return True

    def within(self, budget: int) -> Point | None:
        """The fastest plan whose peak is at most ``budget`` bytes, or None."""
        place = bisect_right(self._points, budget, key=_PEAK)
        return self._points[place - 1] if place else None

    @property
    def lowest(self) -> Point:
        """The plan with the lowest peak."""
        return self._points[0]
