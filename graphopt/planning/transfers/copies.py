"""When copies start and end beside a computation: one lane out, one lane back, each in order."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from heapq import heappop, heappush
from itertools import accumulate
from typing import Literal

import numpy as np

__all__ = ["Copy", "CopyOptions", "Window", "schedule_copies"]

CopyStep = Literal["made", "last", "needed"]


@dataclass(frozen=True, slots=True)
class Copy:
    """A value that is offloaded and brought back.

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


@dataclass(frozen=True, slots=True)
class CopyOptions:
    """How fast copies are, and when they may start and end.

    Attributes:
        out: bytes per second of the lane away.
        back: bytes per second of the lane back.
        boundary: the first step of backward, where forward and backward run apart: values are freed before it at the
            latest, and no copy back starts before the step after it. None where copies may cross it.
        ahead: start each copy back when the one that is needed ``ahead`` copies earlier is needed, instead of by time;
            what these copies take counts towards the highest count of bytes, and so may raise the peak.
    """

    out: float
    back: float
    boundary: int | None = None
    ahead: int | None = None

    @property
    def not_fetched_before(self) -> int:
        """The first step before which a copy back may start."""
        return 0 if self.boundary is None else self.boundary + 1


def schedule_copies(
    seconds: Sequence[float], alive: Sequence[int], copies: Sequence[Copy], options: CopyOptions
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
        options: the lanes, and what limits them.

    Returns:
        A window for each copy. What the windows are late adds up to all the time for which the computation waits.
    """
    ahead = options.ahead
    wanted = _in_time(seconds, copies, options.back) if ahead is None else _ahead(copies, ahead)
    earliest = options.not_fetched_before
    fetched = [max(start, earliest, copy.last + 1) for start, copy in zip(wanted, copies, strict=True)]
    level = list(alive)
    if ahead is not None:
        for copy, start in zip(copies, fetched, strict=True):
            _occupy(level, copy, range(start, copy.needed))
    freed = _away(seconds, level, copies, options)
    fetched = [max(start, end) for start, end in zip(fetched, freed, strict=True)]
    if ahead is None:
        fetched = _within(level, copies, fetched)
    late = _late(seconds, copies, freed, fetched, options)
    return [Window(*times) for times in zip(freed, fetched, late, strict=True)]


def _occupy(level: list[int], copy: Copy, steps: Iterable[int]) -> None:
    for step in steps:
        level[step] += copy.bytes


def _by(copies: Sequence[Copy], step: CopyStep) -> list[int]:
    """The copies' indices in the order of one of their steps."""
    return sorted(range(len(copies)), key=lambda index: int(getattr(copies[index], step)))


def _away(seconds: Sequence[float], level: list[int], copies: Sequence[Copy], options: CopyOptions) -> list[int]:
    """Before which step each value is freed; what is not freed yet is added to ``level``, and does not raise it."""
    highest = max(level, default=0)
    made, idle, due = _at_steps(copies, "made"), _at_steps(copies, "last"), _at_steps(copies, "needed")
    latest = options.boundary
    if latest is not None:
        due.setdefault(latest, []).extend(index for index, copy in enumerate(copies) if copy.needed > latest)
    lane = _LaneAway(copies, options.out)
    for step, duration in enumerate(seconds):
        for index in idle.get(step - 1, ()):
            lane.hold(index)
        lane.wait_for(due.get(step, ()))
        lane.free(step, highest - level[step])
        level[step] += lane.unfreed
        lane.now += duration
        for index in made.get(step, ()):
            lane.start(index)
    return lane.freed


class _LaneAway:
    """The lane away while the computation runs, step by step.

    Attributes:
        now: seconds since the start of the computation.
        unfreed: bytes of the values that nothing needs any more, and that are not freed yet.
        freed: the step before which each value is freed; 0 as long as it is not.
    """

    def __init__(self, copies: Sequence[Copy], rate: float) -> None:
        self.now = 0.0
        self.unfreed = 0
        self.freed = [0] * len(copies)
        self._copies, self._rate = copies, rate
        self._busy_until = 0.0
        self._done = [0.0] * len(copies)
        self._queue: list[tuple[float, int]] = []

    def start(self, index: int) -> None:
        """Start a copy behind those that have started before."""
        self._busy_until = max(self._busy_until, self.now) + self._copies[index].bytes / self._rate
        self._done[index] = self._busy_until

    def hold(self, index: int) -> None:
        """From now on a value is only there for its copy."""
        heappush(self._queue, (self._done[index], index))
        self.unfreed += self._copies[index].bytes

    def wait_for(self, due: Iterable[int]) -> None:
        """Wait for the copies of values that have to be freed now."""
        overdue = [self._done[index] for index in due if not self.freed[index]]
        self.now = max([self.now, *overdue])

    def free(self, step: int, room: int) -> None:
        """Free what is copied; as long as more bytes are unfreed than there is room for, wait for the next copy."""
        while self._queue and (self._queue[0][0] <= self.now or self.unfreed > room):
            end, index = heappop(self._queue)
            self.now = max(self.now, end)
            self.unfreed -= self._copies[index].bytes
            self.freed[index] = step


def _at_steps(copies: Sequence[Copy], step: CopyStep) -> dict[int, list[int]]:
    """The copies' indices by one of their steps."""
    found: dict[int, list[int]] = {}
    for index in _by(copies, step):
        found.setdefault(getattr(copies[index], step), []).append(index)
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
    """The steps at which the copy so many copies earlier is needed; 0 for the first ones."""
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


class _Event(IntEnum):
    """What happens to a copy, in the order in which it happens before a step."""

    STARTS_OUT = 0
    FREED = 1
    STARTS_BACK = 2
    NEEDED = 3


def _late(
    seconds: Sequence[float], copies: Sequence[Copy], freed: Sequence[int], fetched: Sequence[int], options: CopyOptions
) -> list[float]:
    """Seconds for which the computation waits for each copy, when every wait holds up all that follows."""
    clock = list(accumulate(seconds, initial=0.0))
    late, away, returned = [0.0] * len(copies), [0.0] * len(copies), [0.0] * len(copies)
    waited = lane_out = lane_back = 0.0
    for step, event, index in _events(copies, freed, fetched):
        now, size = clock[step] + waited, copies[index].bytes
        if event == _Event.STARTS_OUT:
            lane_out = away[index] = max(lane_out, now) + size / options.out
        elif event == _Event.STARTS_BACK:
            lane_back = returned[index] = max(lane_back, now) + size / options.back
        else:
            done = away if event == _Event.FREED else returned
            wait = max(0.0, done[index] - now)
            late[index] += wait
            waited += wait
    return late


def _events(copies: Sequence[Copy], freed: Sequence[int], fetched: Sequence[int]) -> list[tuple[int, _Event, int]]:
    """(step, what happens before it, index of the copy), in the order in which they happen."""
    events: list[tuple[int, _Event, int]] = []
    for index, copy in enumerate(copies):
        events.append((copy.made + 1, _Event.STARTS_OUT, index))
        events.append((freed[index], _Event.FREED, index))
        events.append((fetched[index], _Event.STARTS_BACK, index))
        events.append((copy.needed, _Event.NEEDED, index))
    return sorted(events)
