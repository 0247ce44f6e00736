"""When copies start and end beside a computation: one lane out, one lane back, each in order."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate

import numpy as np

__all__ = ["Copy", "Window", "schedule_copies"]


@dataclass(frozen=True, slots=True)
class Copy:
    """A value that is moved away and brought back.

    Attributes:
        bytes: of the value.
        made: the step that makes it; the copy away can start after it.
        last: the last step that reads it before it is brought back.
        needed: the step that reads it again.
    """

    bytes: int
    made: int
    last: int
    needed: int


@dataclass(frozen=True, slots=True)
class Window:
    """When a value is away.

    Attributes:
        freed: the step before which the copy away is waited for, and the value freed.
        fetched: the step before which the copy back starts, and bytes for it are taken.
        late: seconds for which the computation waits for the two copies.
    """

    freed: int
    fetched: int
    late: float


def schedule_copies(
    seconds: Sequence[float],
    alive: Sequence[int],
    copies: Sequence[Copy],
    *,
    out: float,
    back: float,
    not_freed_after: int | None = None,
    not_fetched_before: int = 0,
    ahead: int | None = None,
) -> list[Window]:
    """Place the ends of copies away and the starts of copies back so that none of them raises the peak.

    A copy away ends as soon as the lane has done it, but not before the value's last read; where the value would raise
    the highest count of bytes until then, the computation waits for the copy. A copy back starts so that it is done in
    time with the lane to itself, as late as that allows; and later where the bytes it takes would raise the highest
    count of bytes. The computation waits for a copy back that is not done when its value is needed.

    Args:
        seconds: of each step.
        alive: bytes alive at each step, with the values of ``copies`` away from the step after their last read to the
            step that needs them. Its maximum is the highest count of bytes.
        copies: in any order.
        out: bytes per second of the lane away.
        back: bytes per second of the lane back.
        not_freed_after: the last step before which a value may be freed.
        not_fetched_before: the first step before which a copy back may start.
        ahead: start each copy back when the one that is needed ``ahead`` copies earlier is needed, instead of by time;
            what these copies take counts towards the highest count of bytes, and so may raise the peak.

    Returns:
        A window for each copy. What the windows are late adds up to all the time for which the computation waits.
    """
    fetched = _in_time(seconds, copies, back) if ahead is None else _ahead(copies, ahead)
    fetched = [max(start, not_fetched_before, copy.last + 1) for start, copy in zip(fetched, copies, strict=True)]
    level = list(alive)
    if ahead is not None:
        for copy, start in zip(copies, fetched, strict=True):
            _occupy(level, copy, range(start, copy.needed))
    freed = _away(seconds, level, copies, out, not_freed_after)
    fetched = [max(start, end) for start, end in zip(fetched, freed, strict=True)]
    if ahead is None:
        fetched = _within(level, copies, fetched)
    late = _late(seconds, copies, freed, fetched, out, back)
    return [Window(*times) for times in zip(freed, fetched, late, strict=True)]


def _occupy(level: list[int], copy: Copy, steps: Iterable[int]) -> None:
    for step in steps:
        level[step] += copy.bytes


def _by(copies: Sequence[Copy], key: str) -> list[int]:
    """The copies' indices in the order of one of their steps."""
    return sorted(range(len(copies)), key=lambda index: int(getattr(copies[index], key)))


def _away(
    seconds: Sequence[float], level: list[int], copies: Sequence[Copy], rate: float, latest: int | None
) -> list[int]:
    """Before which step each value is freed; what is held until then is added to ``level``, and does not raise it."""
    highest = max(level, default=0)
    freed, done = [0] * len(copies), [0.0] * len(copies)
    made, idle, due = (_at_steps(copies, key) for key in ("made", "last", "needed"))
    if latest is not None:
        due.setdefault(latest, []).extend(index for index, copy in enumerate(copies) if copy.needed > latest)
    queue: list[tuple[float, int]] = []
    held = 0
    now = lane = 0.0
    for step, duration in enumerate(seconds):
        for index in idle.get(step - 1, ()):
            heappush(queue, (done[index], index))
            held += copies[index].bytes
        overdue = [done[index] for index in due.get(step, ()) if not freed[index]]
        now = max([now, *overdue])
        while queue and (queue[0][0] <= now or level[step] + held > highest):
            end, index = heappop(queue)
            now = max(now, end)
            held -= copies[index].bytes
            freed[index] = step
        level[step] += held
        now += duration
        for index in made.get(step, ()):
            lane = done[index] = max(lane, now) + copies[index].bytes / rate
    return freed


def _at_steps(copies: Sequence[Copy], key: str) -> dict[int, list[int]]:
    """The copies' indices by one of their steps."""
    found: dict[int, list[int]] = {}
    for index in _by(copies, key):
        found.setdefault(getattr(copies[index], key), []).append(index)
    return found


def _in_time(seconds: Sequence[float], copies: Sequence[Copy], rate: float) -> list[int]:
    """The latest starts with which everything is back in time."""
    clock = list(accumulate(seconds, initial=0.0))
    starts = [0] * len(copies)
    busy_from = float("inf")
    for index in reversed(_by(copies, "needed")):
        copy = copies[index]
        busy_from = min(clock[copy.needed], busy_from) - copy.bytes / rate
        starts[index] = max(0, bisect_right(clock, busy_from) - 1) if busy_from > 0 else 0
    return starts


def _ahead(copies: Sequence[Copy], ahead: int) -> list[int]:
    order = _by(copies, "needed")
    starts = [0] * len(copies)
    for place, index in enumerate(order):
        starts[index] = copies[order[place - ahead]].needed if place >= ahead else 0
    return starts


def _within(level: Sequence[int], copies: Sequence[Copy], earliest: Sequence[int]) -> list[int]:
    """Starts no earlier than ``earliest`` whose bytes do not raise the highest level."""
    alive = np.array(level, dtype=np.int64)
    highest = alive.max(initial=0)
    starts = list(earliest)
    for index in reversed(_by(copies, "needed")):
        copy = copies[index]
        window = alive[starts[index] : copy.needed]
        full = np.flatnonzero(window + copy.bytes > highest)
        if len(full):
            starts[index] += int(full[-1]) + 1
        alive[starts[index] : copy.needed] += copy.bytes
    return starts


def _late(
    seconds: Sequence[float],
    copies: Sequence[Copy],
    freed: Sequence[int],
    fetched: Sequence[int],
    out: float,
    back: float,
) -> list[float]:
    """Seconds for which the computation waits for each copy, when every wait holds up all that follows."""
    events: list[tuple[int, int, int]] = []
    for index, copy in enumerate(copies):
        steps = (copy.made + 1, freed[index], fetched[index], copy.needed)
        events += [(step, kind, index) for kind, step in enumerate(steps)]
    clock = list(accumulate(seconds, initial=0.0))
    late, away, returned = [0.0] * len(copies), [0.0] * len(copies), [0.0] * len(copies)
    waited = lane_out = lane_back = 0.0
    for step, kind, index in sorted(events):
        now, size = clock[step] + waited, copies[index].bytes
        if kind == 0:
            lane_out = away[index] = max(lane_out, now) + size / out
        elif kind == 2:
            lane_back = returned[index] = max(lane_back, now) + size / back
        else:
            wait = max(0.0, (away if kind == 1 else returned)[index] - now)
            late[index] += wait
            waited += wait
    return late
