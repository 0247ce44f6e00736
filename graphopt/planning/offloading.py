"""Moving values away on top of a plan: what waits for a later step can wait elsewhere while a copy has the time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from graphopt.planning.problem import Simulated
from graphopt.planning.schedule import Scheduler
from graphopt.planning.search import Lives
from graphopt.planning.transfers import Copy, Window, schedule_copies

__all__ = ["Away", "Lanes", "Moved", "move_away", "move_most"]


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


def move_away(scheduler: Scheduler, simulated: Simulated, budget: int, lanes: Lanes) -> Moved | None:
    """Move values away until a plan takes at most ``budget`` bytes; None where that is not enough.

    What is idle at the plan's peak goes first, largest first; then the rest that is idle while backward begins. That
    order does not depend on the budget: with more bytes to spend, fewer values are moved.
    """
    if simulated.peak <= budget:
        return Moved(simulated, (), simulated.bytes, simulated.peak, 0.0)
    candidates = _candidates(scheduler, simulated, lanes)
    low, high, found = 1, len(candidates), None
    while low <= high:
        middle = (low + high) // 2
        trial = _moved(scheduler, simulated, candidates[:middle], lanes)
        if trial.peak <= budget:
            found, high = trial, middle - 1
        else:
            low = middle + 1
    return found


def move_most(scheduler: Scheduler, simulated: Simulated, lanes: Lanes) -> Moved:
    """A plan with everything moved away that can be, in as far as that lowers the peak."""
    candidates = _candidates(scheduler, simulated, lanes)
    plain = Moved(simulated, (), simulated.bytes, simulated.peak, 0.0)
    trials = [
        _moved(scheduler, simulated, candidates[:count], lanes) for count in {len(candidates), len(candidates) // 2}
    ]
    return min([plain, *trials], key=lambda moved: moved.peak)


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
    change = [0] * (len(steps) + 1)
    for _, copy in chosen:
        change[copy.last + 1] -= copy.bytes
        change[copy.needed] += copy.bytes
    away = list(accumulate(change))
    alive = [count + gone for count, gone in zip(simulated.bytes, away, strict=False)]
    windows = schedule_copies(
        seconds, alive, [copy for _, copy in chosen], out=lanes.out, back=lanes.back, not_freed_after=boundary,
        not_fetched_before=0 if boundary is None else boundary + 1,
    )  # fmt: skip
    for (_, copy), window in zip(chosen, windows, strict=True):
        for step in range(copy.last + 1, window.freed):
            alive[step] += copy.bytes
        for step in range(window.fetched, copy.needed):
            alive[step] += copy.bytes
    items = tuple(Away(value, copy, window) for (value, copy), window in zip(chosen, windows, strict=True))
    late = sum(window.late for window in windows)
    return Moved(simulated, items, alive, max(alive), late)
