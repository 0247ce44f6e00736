"""Segments of the forward program: what crosses a few cuts is carried over to backward, the rest is made again.

Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv 1604.06174.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence, Set
from itertools import accumulate, pairwise

from graphopt.planning.simulation.schedule import Decision, Drops, Scheduler

__all__ = ["Forward", "narrow_places", "square_root_segments"]


class Forward:
    """The part of a problem before its boundary, as methods see it that divide it into segments.

    Attributes:
        scheduler: of the problem.
        boundary: the first operation of backward; where the problem has none, that at which the most bytes are alive.
        values: what is made before the boundary.
        last: for each of all values, the last operation before the boundary that reads it, or else its maker.
        pinned: values that the operations after the boundary read and that nothing can make again.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        problem = scheduler.problem
        self.scheduler = scheduler
        self.boundary = problem.boundary
        if not self.boundary and problem.operations:
            plain = scheduler.evaluate(())
            self.boundary = plain.bytes.index(plain.peak)
        self.values = [v for v, maker in enumerate(scheduler.makers) if maker < self.boundary]
        self.last = list(scheduler.makers)
        for index, reads in enumerate(scheduler.reads[: self.boundary]):
            for value in reads:
                self.last[value] = index
        read_later = set[int]().union(*scheduler.reads[self.boundary :])
        self.pinned = {v for v in self.values if v in read_later and not scheduler.droppable[v]}

    def made_bytes(self) -> list[int]:
        """The bytes that each operation of forward makes."""
        sizes = self.scheduler.problem.sizes
        found = [0] * self.boundary
        for value in self.values:
            found[self.scheduler.makers[value]] += sizes[value]
        return found

    def crossing(self, place: int) -> set[int]:
        """The values that are made before an operation of forward, and read by it or by a later one of forward."""
        makers, last = self.scheduler.makers, self.last
        return {v for v in self.values if makers[v] < place <= last[v]}

    def carried(self, cuts: Sequence[int]) -> set[int]:
        """The values that cross any of some places, which ascend."""
        makers, last = self.scheduler.makers, self.last
        ends = [*cuts, self.boundary]
        return {v for v in self.values if ends[bisect_right(cuts, makers[v])] <= last[v]}

    def crossing_bytes(self) -> list[int]:
        """The bytes that cross each place, from the start (0) to the boundary."""
        sizes, makers = self.scheduler.problem.sizes, self.scheduler.makers
        change = [0] * (self.boundary + 2)
        for value in self.values:
            change[makers[value] + 1] += sizes[value]
            change[self.last[value] + 1] -= sizes[value]
        return list(accumulate(change))[: self.boundary + 1]

    def drops(self, carried: Set[int], *, kept_from: int | None = None) -> Drops:
        """The decisions that carry some values over the boundary, and drop all others that can be dropped.

        Args:
            carried: the values.
            kept_from: what this operation and the later ones of forward make is carried as well.
        """
        end = self.boundary if kept_from is None else kept_from
        makers, droppable = self.scheduler.makers, self.scheduler.droppable
        dropped = [v for v in self.values if v not in carried and makers[v] < end and droppable[v]]
        return frozenset(Decision(self.boundary, v) for v in dropped)


def square_root_segments(scheduler: Scheduler) -> Iterator[Drops]:
    """Segments of about equal bytes, cut where few bytes cross, for thresholds around the square-root rule.

    A cut is made at the first narrow place after more bytes than a threshold have been made. The thresholds are spread
    around Chen's ``sqrt(x * y)``: x is the bytes that cross all cuts, and y those of the largest segment, when every
    narrow place is cut. The last segment is dropped like the others, and kept, in turn.

    Yields:
        different decisions, at most about 70.
    """
    forward = Forward(scheduler)
    seen: set[Drops] = set()
    for cuts in _cuts(forward):
        carried = forward.carried(cuts)
        for kept_from in (None, cuts[-1]):
            drops = forward.drops(carried, kept_from=kept_from)
            if drops not in seen:
                seen.add(drops)
                yield drops


def _cuts(forward: Forward) -> Iterator[list[int]]:
    """Places to cut, at least one each time, for thresholds around the square-root rule."""
    sizes, made = forward.scheduler.problem.sizes, forward.made_bytes()
    for places in _more_and_less(forward.crossing_bytes()):
        ends = [0, *places, forward.boundary]
        widest = max(sum(made[start:end]) for start, end in pairwise(ends))
        rule = (sum(sizes[v] for v in forward.carried(places)) * widest) ** 0.5
        for exponent in range(-8, 9):
            cuts = _cut(made, places, rule * 2 ** (exponent / 2))
            if cuts:
                yield cuts


def narrow_places(crossing: Sequence[int]) -> list[int]:
    """Places, without the start and the boundary, where no more bytes cross than at the places beside them.

    Args:
        crossing: bytes that cross each place, from ``Forward.crossing_bytes``.
    """
    return [p for p in range(1, len(crossing) - 1) if crossing[p - 1] >= crossing[p] <= crossing[p + 1]]


def _more_and_less(crossing: Sequence[int]) -> Iterator[list[int]]:
    """All narrow places; then those of them where no more than the median cross."""
    narrow = narrow_places(crossing)
    yield narrow
    if narrow:
        median = sorted(crossing[p] for p in narrow)[len(narrow) // 2]
        yield [p for p in narrow if crossing[p] <= median]


def _cut(made: Sequence[int], places: Sequence[int], threshold: float) -> list[int]:
    """The places to cut so that each segment but the last makes more bytes than a threshold."""
    allowed, cuts, passed = set(places), list[int](), 0
    for place, count in enumerate(made):
        if passed > threshold and place in allowed:
            cuts.append(place)
            passed = 0
        passed += count
    return cuts
