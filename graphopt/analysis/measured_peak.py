"""Measuring what the memory model predicts."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from graphopt import _torch
from graphopt.errors import GraphoptError, public, wrong_argument
from graphopt.ir.host import device_argument

__all__ = ["MeasuredPeak", "measure_peak"]


@dataclass(frozen=True, slots=True)
class MeasuredPeak:
    """What running a function allocated.

    Attributes:
        allocated_peak_bytes: the most bytes above what was allocated when the function started.
        retained_bytes: bytes still allocated when it ended (results, gradients), above the start.
        device: the device that was measured.
        result: what the function returned.

    Example:
        >>> peak = graphopt.measure_peak(lambda: torch.zeros(1000, dtype=torch.float32))
        >>> peak.allocated_peak_bytes, peak.device
        (4000, 'cpu')
    """

    allocated_peak_bytes: int
    retained_bytes: int
    device: str
    result: Any


@public
def measure_peak(fn: Callable[[], Any], *, device: str | torch.device = "cpu") -> MeasuredPeak:
    """Run ``fn`` once and measure the peak of torch's allocator, to the byte.

    On a CPU the allocator's own events are counted (``torch.profiler``, which slows the run down); on CUDA its
    statistics are read. Memory that other libraries allocate is not seen, nor, on a CPU, that memory from before the
    start is given back meanwhile: free it first (``optimizer.zero_grad()``).

    Args:
        fn: a function without arguments.
        device: ``"cpu"`` or a CUDA device.

    Raises:
        ArgumentError: for what cannot be called, and for what is no device.
        GraphoptError: for a device of another kind.

    Example:
        >>> graphopt.measure_peak(lambda: torch.zeros(256)).allocated_peak_bytes
        1024
    """
    given: object = fn
    if not callable(given):
        hint = "the call has run already: write measure_peak(lambda: ...) around it"
        raise wrong_argument("measure_peak's fn", given, "a function without arguments", hint)
    kind = device_argument("measure_peak's device", device)
    gc.collect()
    if kind.type == "cuda":
        torch.cuda.synchronize(kind)
        torch.cuda.reset_peak_memory_stats(kind)
        start = torch.cuda.memory_allocated(kind)
        result = fn()
        torch.cuda.synchronize(kind)
        peak, end = torch.cuda.max_memory_allocated(kind), torch.cuda.memory_allocated(kind)
        return MeasuredPeak(peak - start, end - start, str(kind), result)
    if kind.type != "cpu":
        raise GraphoptError(f"cannot measure the peak on {kind}: only cpu and cuda allocators report what they do")
    with _torch.profile_memory() as profile:
        result = fn()
    alive = peak = 0
    for _, where, count in _torch.allocator_events(profile):
        if where == "cpu":
            alive += count
            peak = max(peak, alive)
    return MeasuredPeak(peak, alive, "cpu", result)
