"""Running something several times and taking the median of its seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import fx

from graphopt.analysis.costs.isolated_call import prepare

__all__ = ["measured_seconds", "median_seconds"]

RUNS = 7
"""How often something is run on a CPU after a first run that is not counted."""

CUDA_RUNS = 30
"""The same on CUDA, where runs are short and many of them are under way at once."""

FEWEST = 3
"""How many of them there are at least, unless `LONGEST` is over."""

BUDGET, LONGEST = 0.05, 0.15
"""Seconds after which no further run begins: once there are `FEWEST`, and at any number above none."""

SHORTEST = 1e-9
"""Seconds that are never gone below, so that every figure is positive."""

_BLOCK = 65536


def measured_seconds(node: fx.Node, device: torch.device) -> float:
    """Seconds that one call of a program takes by itself, on arguments made up for it.

    Floating-point arguments are uniform in [0, 1), which probabilities, roots and logarithms take: on CUDA, a check of
    values that fails takes the whole process with it. Whole numbers are 0, masks are False.

    Args:
        node: a call for which ``isolated_call.refusal`` is empty; the op's own errors come through.
        device: where it runs.
    """
    target, args, kwargs = prepare(node, _uniform)
    return median_seconds(lambda: target(*args, **kwargs), device)


def median_seconds(run: Callable[[], object], device: torch.device, *, runs: int | None = None) -> float:
    """The median of the seconds that ``run`` takes, and that it takes to free what it returns.

    Args:
        run: what is measured; its first run is not counted.
        device: where it runs; on CUDA the device's own clock is read.
        runs: how often it is run, within the limits on time; `RUNS` or `CUDA_RUNS` by default.
    """
    if device.type == "cuda":
        return _median_cuda(run, device, runs or CUDA_RUNS)
    run()
    taken: list[float] = []
    while len(taken) < (runs or RUNS) and _may_go_on(len(taken), sum(taken)):
        begin = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begin)
    return max(median(taken), SHORTEST)


def _may_go_on(done: int, elapsed: float) -> bool:
    return done == 0 or elapsed < (BUDGET if done >= FEWEST else LONGEST)


def _median_cuda(run: Callable[[], object], device: torch.device, runs: int) -> float:
    with torch.cuda.device(device):
        run()
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        once = max(time.perf_counter() - started, 1e-6)
        event: Any = torch.cuda.Event  # torch leaves it untyped
        marks = []
        for _ in range(max(1, min(runs, int(LONGEST / once)))):
            begin, end = event(enable_timing=True), event(enable_timing=True)
            begin.record()
            run()
            end.record()
            marks.append((begin, end))
        torch.cuda.synchronize()
        return max(float(median(begin.elapsed_time(end) for begin, end in marks)) / 1000, SHORTEST)


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
