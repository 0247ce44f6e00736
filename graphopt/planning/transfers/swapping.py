"""When tensors that reside elsewhere are copied in and back, beside a computation, over one link."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

__all__ = ["Visit", "VisitWindow", "schedule_visits", "seconds_waited"]


_MARGIN = 3.0
"""How many times as long as expected a copy in may take and still be done in time, where memory allows it."""


@dataclass(frozen=True, slots=True)
class Visit:
    """A time for which a tensor is copied in.

    Attributes:
        bytes: of the tensor.
        first: the first step that needs it.
        last: the last one.
        writes: whether it is copied back afterwards.
        earliest: the first step before which the copy in may start: behind a visit before that wrote the tensor.
    """

    bytes: int
    first: int
    last: int
    writes: bool
    earliest: int = 0


@dataclass(frozen=True, slots=True)
class VisitWindow:
    """When a tensor takes memory for a visit.

    Attributes:
        fetched: the step before which the copy in starts.
        freed: the step before which the copy back is waited for; the number of steps for the end. For a tensor that is
            not copied back, the step behind the last one that needs it.
    """

    fetched: int
    freed: int


def schedule_visits(
    seconds: Sequence[float],
    alive: Sequence[int],
    visits: Sequence[Visit],
    rate: float,
    *,
    ahead: int | None = None,
    limit: int = 0,
) -> list[VisitWindow]:
    """Place the starts of copies in and the ends of copies back, so that they raise no peak and hold up little.

    A copy in starts early enough that it is done in time with those that come behind it on the link, even where each
    takes three times as long as is expected, and as late as that allows; later, where its bytes would raise the highest
    count of bytes. A copy back is waited for when it is expected to be done, or where it would else raise that count.

    Args:
        seconds: of each step.
        alive: bytes alive at each step, with each tensor there during its visits from first to last.
        visits: in any order.
        rate: bytes per second of the link.
        limit: bytes up to which copies may be alive at any step, where that is more than the highest count.
        ahead: start each copy in when the one that many before it is needed, and wait for each copy back when the one
            that many behind it ends, instead of by time; what they take may raise the highest count.
    """
    placing = _Placing(seconds, alive, visits, rate, limit)
    fetched = placing.starts() if ahead is None else placing.starts_ahead(ahead)
    freed = placing.ends(fetched) if ahead is None else placing.ends_ahead(ahead)
    return [VisitWindow(*window) for window in zip(fetched, freed, strict=True)]


class _Placing:
    """Places copies one by one; what they take is added to the level of bytes."""

    def __init__(
        self, seconds: Sequence[float], alive: Sequence[int], visits: Sequence[Visit], rate: float, limit: int
    ) -> None:
        self._begins = [0.0, *accumulate(seconds)]
        self._level = list(alive)
        self._highest = max(limit, max(alive, default=0))
        self._visits = visits
        self._rate = rate
        self._order = sorted(range(len(visits)), key=lambda index: visits[index].first)

    def starts(self) -> list[int]:
        """The step before which each copy in starts."""
        wanted = [visit.first for visit in self._visits]
        due = self._begins[-1]
        for index in reversed(self._order):
            visit = self._visits[index]
            due = min(self._begins[visit.first], due) - _MARGIN * visit.bytes / self._rate * (1 + visit.writes)
            wanted[index] = min(max(bisect_right(self._begins, due) - 1, visit.earliest), visit.first)
        for index in self._order:
            visit = self._visits[index]
            step = visit.first
            while step > wanted[index] and self._level[step - 1] + visit.bytes <= self._highest:
                step -= 1
                self._level[step] += visit.bytes
            wanted[index] = step
        return wanted

    def starts_ahead(self, ahead: int) -> list[int]:
        """The same, for each copy when the one so many before it is needed."""
        wanted = [0] * len(self._visits)
        for place, index in enumerate(self._order):
            before = self._visits[self._order[place - ahead]].first if place >= ahead else 0
            wanted[index] = max(before, self._visits[index].earliest)
        return wanted

    def ends(self, fetched: Sequence[int]) -> list[int]:
        """The step before which each copy back is waited for."""
        freed = [visit.last + 1 for visit in self._visits]
        done = _done_by(self._begins, self._visits, fetched, self._rate)
        end = len(self._begins) - 1
        for index in self._written():
            visit, step = self._visits[index], freed[index]
            while step < end and self._begins[step] < done[index] and self._level[step] + visit.bytes <= self._highest:
                self._level[step] += visit.bytes
                step += 1
            freed[index] = step
        return freed

    def ends_ahead(self, ahead: int) -> list[int]:
        """The same, for each copy when the one so many behind it ends."""
        freed = [visit.last + 1 for visit in self._visits]
        written = self._written()
        for place, index in enumerate(written):
            behind = place + ahead
            last = self._visits[written[behind]].last if behind < len(written) else len(self._begins) - 1
            freed[index] = max(last, freed[index])
        return freed

    def _written(self) -> list[int]:
        """The visits that are copied back, in the order in which they end."""
        written = [index for index, visit in enumerate(self._visits) if visit.writes]
        return sorted(written, key=lambda index: self._visits[index].last)


def _done_by(begins: Sequence[float], visits: Sequence[Visit], fetched: Sequence[int], rate: float) -> list[float]:
    """When each copy back is expected to be done, the link taking one copy after the other as they are started."""
    starts = [(begins[fetched[index]], 0, index) for index in range(len(visits))]
    starts += [(begins[visit.last + 1], 1, index) for index, visit in enumerate(visits) if visit.writes]
    done = [0.0] * len(visits)
    free = 0.0
    for begin, _, index in sorted(starts):
        free = max(free, begin) + visits[index].bytes / rate
        done[index] = free
    return done


def seconds_waited(
    seconds: Sequence[float], visits: Sequence[Visit], windows: Sequence[VisitWindow], rate: float
) -> float:
    """How long a computation is expected to wait for copies, each taking the link for itself in turn."""
    fetch: dict[int, list[int]] = {}
    need: dict[int, list[int]] = {}
    back: dict[int, list[int]] = {}
    free: dict[int, list[int]] = {}
    for index, (visit, window) in enumerate(zip(visits, windows, strict=True)):
        fetch.setdefault(window.fetched, []).append(index)
        need.setdefault(visit.first, []).append(index)
        if visit.writes:
            back.setdefault(visit.last + 1, []).append(index)
            free.setdefault(window.freed, []).append(index)
    now, waited, link = 0.0, 0.0, 0.0
    arrived: dict[int, float] = {}
    returned: dict[int, float] = {}
    for step in range(len(seconds) + 1):
        for index in back.get(step, ()):
            returned[index] = link = max(link, now) + visits[index].bytes / rate
        for index in free.get(step, ()):
            waited, now = waited + max(0.0, returned[index] - now), max(now, returned[index])
        for index in fetch.get(step, ()):
            arrived[index] = link = max(link, now) + visits[index].bytes / rate
        for index in need.get(step, ()):
            waited, now = waited + max(0.0, arrived[index] - now), max(now, arrived[index])
        now += seconds[step] if step < len(seconds) else 0.0
    return waited
