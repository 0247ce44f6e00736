"""When tensors that reside elsewhere are copied in and back, beside a computation, over one link."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

__all__ = ["Visit", "VisitWindow", "schedule_visits", "seconds_waited"]


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
    seconds: Sequence[float], alive: Sequence[int], visits: Sequence[Visit], rate: float, ahead: int | None = None
) -> list[VisitWindow]:
    """Place the starts of copies in and the ends of copies back, so that they raise no peak and hold up little.

    A copy in starts early enough that it is done in time with those that come behind it on the link, as late as that
    allows; later, where its bytes would raise the highest count of bytes. A copy back is waited for when it is expected
    to be done, or where it would else raise that count.

    Args:
        seconds: of each step.
        alive: bytes alive at each step, with each tensor there during its visits from first to last.
        visits: in any order.
        rate: bytes per second of the link.
        ahead: start each copy in when the one that many before it is needed, and wait for each copy back when the one
            that many behind it ends, instead of by time; what they take may raise the highest count.
    """
    order = sorted(range(len(visits)), key=lambda index: visits[index].first)
    begins = [0.0, *accumulate(seconds)]
    level = list(alive)
    highest = max(level, default=0)
    fetched = [visit.first for visit in visits]
    due = begins[-1]
    for place in range(len(order) - 1, -1, -1):
        visit = visits[order[place]]
        if ahead is not None:
            wanted = visits[order[place - ahead]].first if place >= ahead else 0
            fetched[order[place]] = max(wanted, visit.earliest)
            continue
        due = min(begins[visit.first], due) - visit.bytes / rate * (1 + visit.writes)
        fetched[order[place]] = min(max(bisect_right(begins, due) - 1, visit.earliest), visit.first)
    for index in order:
        visit = visits[index]
        if ahead is None:
            fetched[index] = _no_higher(level, highest - visit.bytes, fetched[index], visit.first)
        for step in range(fetched[index], visit.first):
            level[step] += visit.bytes
    freed = _freed(begins, level, highest, visits, fetched, rate, ahead)
    return [VisitWindow(*window) for window in zip(fetched, freed, strict=True)]


def _no_higher(level: Sequence[int], most: int, start: int, end: int) -> int:
    """The first step from ``start`` on from which the level stays within ``most`` up to ``end``."""
    step = end
    while step > start and level[step - 1] <= most:
        step -= 1
    return step


def _freed(
    begins: Sequence[float],
    level: list[int],
    highest: int,
    visits: Sequence[Visit],
    fetched: Sequence[int],
    rate: float,
    ahead: int | None,
) -> list[int]:
    """Before which step each copy back is waited for."""
    last = sorted((index for index, visit in enumerate(visits) if visit.writes), key=lambda index: visits[index].last)
    freed = [visit.last + 1 for visit in visits]
    done = _done_by(begins, visits, fetched, rate)
    end = len(begins) - 1
    for place, index in enumerate(last):
        visit = visits[index]
        if ahead is not None:
            behind = place + ahead
            freed[index] = max(visits[last[behind]].last, visit.last + 1) if behind < len(last) else end
            continue
        step = visit.last + 1
        while step < end and begins[step] < done[index] and level[step] + visit.bytes <= highest:
            level[step] += visit.bytes
            step += 1
        freed[index] = step
    return freed


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
