"""Moving values away on top of a plan: what waits for a later step can wait elsewhere while a copy has the time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from graphopt.planning.copies import Copy, Window, schedule_copies
from graphopt.planning.local_search import Lives
from graphopt.planning.problem import Simulated
from graphopt.planning.schedule import Scheduler

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
    """A plan with values moved away.

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
    """A plan with more and more of its values moved away, each time in as far as that lowers the peak.

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


def _candidates(scheduler: Scheduler, simulated: Simulated, lanes: Lanes) -> list[tuple[int, Copy]]:
    """What waits from forward for backward, in the order in which it is moved, as much as there is room for."""
    sizes, held = scheduler.problem.sizes, scheduler.problem.held
    lives = Lives(scheduler, simulated)
    place = simulated.bytes.index(simulated.peak)
    start = next((i for i, moment in enumerate(lives.moments) if moment >= scheduler.problem.boundary), place)
    found: list[tuple[bool, int, int, Copy]] = []
    for value, touches in zip(lives.values, lives.touches, strict=True):
        if sizes[value] < max(1, lanes.smallest) or not lanes.movable[value] or value in held:
            continue
        before = [at for at in touches if at < start]
        after = [at for at in touches if at >= start]
        first_run = scheduler.makers[value] == simulated.plan.steps[touches[0]]
        if before and after and after[0] - before[-1] > 1 and first_run:
            copy = Copy(sizes[value], touches[0], before[-1], after[0])
            found.append((not before[-1] < place < after[0], -sizes[value], value, copy))
    chosen = []
    room = lanes.room
    for _, _, value, copy in sorted(found, key=lambda item: item[:3]):
        if copy.bytes <= room:
            room -= copy.bytes
            chosen.append((value, copy))
    return chosen


def _moved(scheduler: Scheduler, simulated: Simulated, chosen: Sequence[tuple[int, Copy]], lanes: Lanes) -> Moved:
    steps = simulated.plan.steps
    boundary = steps.index(scheduler.problem.boundary) if lanes.parted else None
    seconds = [scheduler.seconds[step] for step in steps]
    away = _changed(len(steps), [(-copy.bytes, copy.last + 1, copy.needed) for _, copy in chosen])
    alive = [count + gone for count, gone in zip(simulated.bytes, away, strict=True)]
    windows = schedule_copies(
        seconds, alive, [copy for _, copy in chosen], out=lanes.out, back=lanes.back, not_freed_after=boundary,
        not_fetched_before=0 if boundary is None else boundary + 1,
    )  # fmt: skip
    spans = []
    for (_, copy), window in zip(chosen, windows, strict=True):
        spans += [(copy.bytes, copy.last + 1, window.freed), (copy.bytes, window.fetched, copy.needed)]
    alive = [count + held for count, held in zip(alive, _changed(len(steps), spans), strict=True)]
    items = tuple(Away(value, copy, window) for (value, copy), window in zip(chosen, windows, strict=True))
    late = sum(window.late for window in windows)
    return Moved(simulated, items, alive, max(alive), late)


def _changed(steps: int, spans: Iterable[tuple[int, int, int]]) -> list[int]:
    """How many bytes more are alive at each step, with (bytes, first step, step behind the last) of each change."""
    change = [0] * (steps + 1)
    for size, start, end in spans:
        change[start] += size
        change[end] -= size
    return list(accumulate(change[:-1]))
