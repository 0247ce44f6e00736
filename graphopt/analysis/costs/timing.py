"""Running something a few times and taking the shortest of its times; other work on the machine is noticed.

What disturbs a run makes it longer, so that the shortest of several is the nearest to what it takes by itself. With one
thread, the thread's own clock counts, which stands while others have the processor. With several threads, runs in which
one lost the processor for a while do not count towards how many are wanted; where there are no others, the figure is
marked.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import fx

from graphopt.analysis.costs.figures import Figure
from graphopt.analysis.costs.isolated_call import prepare

__all__ = ["SHORTEST", "Lap", "lap", "measured_seconds", "shortest_seconds"]

RUNS = 5
"""How often something is run on a CPU after a first run that is not counted."""

LONG = 0.005
"""Seconds from which the first run counts as well: what it takes to begin is little beside them."""

CUDA_RUNS = 30
"""The same on CUDA, where runs are short and many of them are under way at once."""

FEWEST = 3
"""How many of them there are at least, unless `LONGEST` is over."""

_MOST = 2
"""How many times as many runs there are at most, where some of them are disturbed."""

BUDGET, LONGEST = 0.05, 0.15
"""Seconds after which no further run begins: once there are `FEWEST`, and at any number above none."""

SHORTEST = 1e-9
"""Seconds that are never gone below, so that every figure is positive."""

_LOST = 0.05
_LOST_SECONDS = 2e-5
"""What a run may lose to other work and still count: this share of its time, or these seconds."""

_SLICE = 0.004
"""Seconds for which a thread that had to give its processor away waits."""

_SCATTER = 2.0
"""On CUDA, how much longer than the shortest run the one in the middle is where other work is running."""

_BLOCK = 65536


@dataclass(frozen=True, slots=True)
class Lap:
    """One run: its seconds, and whether it was disturbed."""

    seconds: float
    disturbed: bool


def lap(run: Callable[[], object]) -> Lap:
    """Run something once on the CPU.

    With one thread, its seconds are those for which the thread had a processor. With several, the processor is wanted
    by one of them all the time, and how often one was made to leave it says whether it was disturbed.
    """
    if torch.get_num_threads() == 1:
        worked = time.thread_time()
        run()
        return Lap(time.thread_time() - worked, False)
    switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
    begin = time.perf_counter()
    run()
    seconds = time.perf_counter() - begin
    lost = _SLICE * (resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw - switches)
    return Lap(seconds, lost > max(_LOST * seconds, _LOST_SECONDS))


def measured_seconds(node: fx.Node, device: torch.device, longest: float = LONGEST) -> Figure:
    """Seconds that one call of a program takes by itself, on arguments made up for it.

    Floating-point arguments are uniform in [0, 1), which probabilities, roots and logarithms take: on CUDA, a check of
    values that fails takes the whole process with it. Whole numbers are 0, masks are False.

    Args:
        node: a call for which ``isolated_call.refusal`` is empty; the op's own errors come through.
        device: where it runs.
        longest: seconds after which no further run begins.
    """
    target, args, kwargs = prepare(node, _uniform)
    return shortest_seconds(lambda: target(*args, **kwargs), device, longest=longest)


def shortest_seconds(
    run: Callable[[], object], device: torch.device, *, runs: int | None = None, longest: float = LONGEST
) -> Figure:
    """The shortest time that ``run`` takes, and that it takes to free what it returns.

    Args:
        run: what is measured; its first run is not counted, unless it takes `LONG` seconds.
        device: where it runs; on CUDA the device's own clock is read.
        runs: how often it is run undisturbed, within the limits on time; `RUNS` or `CUDA_RUNS` by default.
        longest: seconds after which no further run begins.

    Returns:
        the seconds, doubtful where no run was undisturbed.
    """
    if device.type == "cuda":
        return _shortest_cuda(run, device, runs or CUDA_RUNS, longest)
    first = lap(run)
    laps = [first] if first.seconds >= LONG else []
    quiet, elapsed = sum(not each.disturbed for each in laps), first.seconds
    wanted = runs or RUNS
    while quiet < wanted and len(laps) < _MOST * wanted and _may_go_on(len(laps), quiet, elapsed, longest):
        laps.append(lap(run))
        quiet += not laps[-1].disturbed
        elapsed += laps[-1].seconds
    return Figure(max(min(found.seconds for found in laps), SHORTEST), doubtful=not quiet)


def _may_go_on(done: int, quiet: int, elapsed: float, longest: float) -> bool:
    return done == 0 or elapsed < min(longest, BUDGET if quiet >= FEWEST else LONGEST)


def _shortest_cuda(run: Callable[[], object], device: torch.device, runs: int, longest: float) -> Figure:
    with torch.cuda.device(device):
        run()
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        once = max(time.perf_counter() - started, 1e-6)
        event: Any = torch.cuda.Event  # torch leaves it untyped
        marks = []
        for _ in range(max(1, min(runs, int(min(LONGEST, longest) / once)))):
            begin, end = event(enable_timing=True), event(enable_timing=True)
            begin.record()
            run()
            end.record()
            marks.append((begin, end))
        torch.cuda.synchronize()
        taken = [float(begin.elapsed_time(end)) / 1000 for begin, end in marks]
        return Figure(max(min(taken), SHORTEST), doubtful=median(taken) > _SCATTER * max(min(taken), SHORTEST))


def _uniform(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``count`` numbers; the same few thousand over and over, since drawing each would take longer than most ops."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.zeros(count, dtype=dtype, device=device)
    drawn = torch.rand(min(count, _BLOCK), generator=torch.Generator().manual_seed(0), device="cpu")
    drawn = drawn.to(device, dtype)
    if count <= _BLOCK:
        return drawn
    made = torch.empty(count, dtype=dtype, device=device)
    rest = count % _BLOCK
    made[: count - rest].view(-1, _BLOCK).copy_(drawn)
    made[count - rest :].copy_(drawn[:rest])
    return made
