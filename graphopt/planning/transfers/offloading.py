"""Moving values away on top of a plan: what waits for a later step can wait elsewhere while a copy has the time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from graphopt.planning.problem import Simulated
from graphopt.planning.simulation.idle import Touches
from graphopt.planning.simulation.schedule import Scheduler
from graphopt.planning.transfers.copies import Copy, CopyOptions, Window, schedule_copies

__all__ = ["Away", "Lanes", "Moved", "moved_away"]

_STEPS = 24
"""How many numbers of values to move are tried for a plan."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """What copies can do.

    Attributes:
        out: bytes per second away.
        back: bytes per second back.
        room: bytes that can be away at once.
        smallest: values of fewer bytes stay.
        movable: whether each value can be moved.
        parted: whether forward and backward run apart, so that no copy ends or starts across the boundary.
    """

    out: float
    back: float
    room: int
    smallest: int
    movable: Sequence[bool]
    parted: bool = False


@dataclass(frozen=True, slots=True)
class Away:
    """One value that waits elsewhere between two steps of a plan."""

    value: int
    copy: Copy
    window: Window


@dataclass(frozen=True, slots=True)
class Moved:
    """A plan with values offloaded.

    Attributes:
        simulated: the plan.
        away: what is moved, and when.
        bytes: alive at each step, copies in flight included.
        peak: the most of them.
        late: seconds for which the computation waits for copies.
    """

    simulated: Simulated
    away: tuple[Away, ...]
    bytes: list[int]
    peak: int
    late: float


def moved_away(scheduler: Scheduler, simulated: Simulated, lanes: Lanes) -> list[Moved]:
    """A plan with more and more of its values offloaded, each time in as far as that lowers the peak.

    What is idle at the plan's peak goes first, largest first; then the rest that is idle while backward begins. No
    budget decides about it, so that a larger one never has fewer plans to choose from.
    """
    candidates = _candidates(scheduler, simulated, lanes)
    stride = max(1, -(-len(candidates) // _STEPS))
    counts = sorted({*range(stride, len(candidates), stride), len(candidates)} - {0})
    found: list[Moved] = []
    lowest = simulated.peak
    for count in counts:
        moved = _moved(scheduler, simulated, candidates[:count], lanes)
        if moved.peak < lowest:
            found.append(moved)
            lowest = moved.peak
    return found


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A value that could wait elsewhere; whether it does so at the plan's peak."""

    value: int
    copy: Copy
    at_peak: bool


def _candidates(scheduler: Scheduler, simulated: Simulated, lanes: Lanes) -> list[_Candidate]:
    """What waits from forward for backward, in the order in which it is moved, as much as there is room for."""
    found = _waiting(scheduler, simulated, lanes)
    found.sort(key=lambda candidate: (not candidate.at_peak, -candidate.copy.bytes, candidate.value))
    chosen = []
    room = lanes.room
    for candidate in found:
        if candidate.copy.bytes <= room:
            room -= candidate.copy.bytes
            chosen.append(candidate)
    return chosen


def _waiting(scheduler: Scheduler, simulated: Simulated, lanes: Lanes) -> list[_Candidate]:
    """What can be moved and waits from forward for backward, where its first run makes it."""
    steps = simulated.plan.steps
    touches = Touches(scheduler, simulated.plan.steps)
    peak = simulated.bytes.index(simulated.peak)
    boundary = scheduler.problem.boundary
    start = next((place for place, moment in enumerate(touches.moments) if moment >= boundary), peak)
    found = []
    for value, places in zip(touches.values, touches.places, strict=True):
        if _movable(scheduler, value, lanes) and scheduler.makers[value] == steps[places[0]]:
            copy = _copy(scheduler.problem.sizes[value], places, start)
            if copy is not None:
                found.append(_Candidate(value, copy, copy.last < peak < copy.needed))
    return found


def _movable(scheduler: Scheduler, value: int, lanes: Lanes) -> bool:
    large = scheduler.problem.sizes[value] >= max(1, lanes.smallest)
    return large and lanes.movable[value] and value not in scheduler.problem.held


def _copy(size: int, places: Sequence[int], start: int) -> Copy | None:
    """The copy of a value that waits for backward to start; None where it does not, or for no step in between.

    Args:
        size: bytes of the value.
        places: that touch it, ascending.
        start: the place at which backward starts.
    """
    index = bisect_left(places, start)
    if not 0 < index < len(places) or places[index] - places[index - 1] <= 1:
        return None
    return Copy(size, places[0], places[index - 1], places[index])


def _moved(scheduler: Scheduler, simulated: Simulated, chosen: Sequence[_Candidate], lanes: Lanes) -> Moved:
    steps = simulated.plan.steps
    copies = [candidate.copy for candidate in chosen]
    alive = _changed(simulated.bytes, [_Change(-copy.bytes, copy.last + 1, copy.needed) for copy in copies])
    boundary = steps.index(scheduler.problem.boundary) if lanes.parted else None
    options = CopyOptions(out=lanes.out, back=lanes.back, boundary=boundary)
    windows = schedule_copies([scheduler.seconds[step] for step in steps], alive, copies, options)
    there: list[_Change] = []
    for copy, window in zip(copies, windows, strict=True):
        there.append(_Change(copy.bytes, copy.last + 1, window.freed))
        there.append(_Change(copy.bytes, window.fetched, copy.needed))
    alive = _changed(alive, there)
    away = tuple(Away(item.value, item.copy, window) for item, window in zip(chosen, windows, strict=True))
    late = sum(window.late for window in windows)
    return Moved(simulated, away, alive, max(alive), late)


class _Change(NamedTuple):
    """So many bytes more are alive from a step on, up to the step before another one."""

    bytes: int
    start: int
    end: int


def _changed(alive: Sequence[int], changes: Iterable[_Change]) -> list[int]:
    """Bytes alive at each step, after changes."""
    change = [0] * (len(alive) + 1)
    for size, start, end in changes:
        change[start] += size
        change[end] -= size
    return [count + more for count, more in zip(alive, accumulate(change[:-1]), strict=True)]
