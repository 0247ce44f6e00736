"""When copies start and end beside a computation: one lane out, one lane back, each in order."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

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
        late: seconds for which the computation waits.
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
    """Place the ends of copies away and the starts of copies back.

    A copy away ends as soon as the lane has done it, but not before the value's last read. A copy back starts so that
    it is done in time with the lane to itself, as late as that allows; and later where the bytes it takes would raise
    the highest count of bytes.

    Args:
        seconds: of each step.
        alive: bytes alive at each step, with the values of ``copies`` away from the step after their last read to the
            step that needs them.
        copies: in any order.
        out: bytes per second of the lane away.
        back: bytes per second of the lane back.
        not_freed_after: the last step before which a value may be freed.
        not_fetched_before: the first step before which a copy back may start.
        ahead: start each copy back when the one that is needed ``ahead`` copies earlier is needed, instead of by time.

    Returns:
        A window for each copy.
    """
    clock = list(accumulate(seconds, initial=0.0))
    freed, waits = _away(clock, copies, out, not_freed_after)
    fetched = _back(clock, copies, back) if ahead is None else _ahead(copies, ahead)
    level = list(alive)
    highest = max(level, default=0)
    windows: dict[int, Window] = {}
    for index in sorted(range(len(copies)), key=lambda i: -copies[i].needed):
        copy = copies[index]
        earliest = max(fetched[index], freed[index], not_fetched_before, copy.last + 1)
        start = copy.needed
        while start > earliest and (ahead is not None or level[start - 1] + copy.bytes <= highest):
            start -= 1
        for step in range(start, copy.needed):
            level[step] += copy.bytes
        late = max(0.0, copy.bytes / back - (clock[copy.needed] - clock[start]))
        windows[index] = Window(freed[index], start, late + waits[index])
    return [windows[index] for index in range(len(copies))]


def _away(
    clock: Sequence[float], copies: Sequence[Copy], rate: float, latest: int | None
) -> tuple[list[int], list[float]]:
    freed, waits = [0] * len(copies), [0.0] * len(copies)
    free_at = 0.0
    for index in sorted(range(len(copies)), key=lambda i: copies[i].made):
        copy = copies[index]
        free_at = max(free_at, clock[copy.made + 1]) + copy.bytes / rate
        step = max(bisect_left(clock, free_at), copy.last + 1)
        limit = copy.needed if latest is None else min(copy.needed, latest)
        freed[index] = min(step, limit)
        waits[index] = max(0.0, free_at - clock[freed[index]])
    return freed, waits


def _back(clock: Sequence[float], copies: Sequence[Copy], rate: float) -> list[int]:
    """The latest starts with which everything is back in time."""
    starts = [0] * len(copies)
    busy_from = float("inf")
    for index in sorted(range(len(copies)), key=lambda i: -copies[i].needed):
        copy = copies[index]
        busy_from = min(clock[copy.needed], busy_from) - copy.bytes / rate
        starts[index] = max(0, bisect_right(clock, busy_from) - 1) if busy_from > 0 else 0
    return starts


def _ahead(copies: Sequence[Copy], ahead: int) -> list[int]:
    order = sorted(range(len(copies)), key=lambda i: copies[i].needed)
    starts = [0] * len(copies)
    for place, index in enumerate(order):
        starts[index] = copies[order[place - ahead]].needed if place >= ahead else 0
    return starts
