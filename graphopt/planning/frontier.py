"""The plans of which none is better in both bytes and seconds."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from graphopt.planning.problem import Simulated
from graphopt.planning.schedule import Drops

__all__ = ["Frontier", "Point"]


@dataclass(slots=True)
class Point:
    """One plan on the frontier: its peak in bytes, the seconds that it runs again, and its decisions."""

    peak: int
    again: float
    drops: Drops
    explored: bool = False


class Frontier:
    """Keeps the best plans: from few bytes and many seconds to many bytes and few seconds."""

    def __init__(self) -> None:
        self._peaks: list[int] = []
        self._points: list[Point] = []

    def __iter__(self) -> Iterator[Point]:
        return iter(self._points)

    def __len__(self) -> int:
        return len(self._points)

    def offer(self, drops: Drops, simulated: Simulated) -> bool:
        """Take a plan if no other one is as good in both; says whether it was taken."""
        peak, again = simulated.peak, simulated.again
        place = bisect_right(self._peaks, peak)
        if place and self._points[place - 1].again <= again:
            return False
        start = bisect_left(self._peaks, peak)
        end = start
        while end < len(self._points) and self._points[end].again >= again:
            end += 1
        self._peaks[start:end] = [peak]
        self._points[start:end] = [Point(peak, again, drops)]
        return True

    def within(self, budget: int) -> Point | None:
        """The fastest plan whose peak is at most ``budget`` bytes, or None."""
        place = bisect_right(self._peaks, budget)
        return self._points[place - 1] if place else None

    @property
    def lowest(self) -> Point:
        """The plan with the lowest peak."""
        return self._points[0]
