"""The profile of the device that is here, measured once."""

from __future__ import annotations

import os
from functools import partial

import torch

from graphopt.analysis.allocator.rules import CACHING, PLAIN
from graphopt.analysis.costs.bandwidth import COPIES, COPY_BYTES, link_bandwidth
from graphopt.analysis.costs.figures import Figure, device_here, device_name, figures_of
from graphopt.analysis.costs.profiles import DeviceProfile
from graphopt.analysis.costs.timing import shortest_seconds
from graphopt.ir.autocast import plain_precision

__all__ = ["profile_of"]

_CALIBRATED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_SMALL_RUNS = 200


def profile_of(device: torch.device | str, *, cache: bool = True) -> DeviceProfile:
    """The profile of a device of this machine, measured once: matrix products, copies, and an op on one number.

    Args:
        device: cpu or a CUDA device; the CPU is measured with the number of threads of now.
        cache: use figures measured before, and keep new ones.

    Raises:
        GraphoptError: for a device that is not here; `PROFILES` has figures of some.
    """
    place = device_here(device)
    figures = figures_of(place, cache=cache)
    with plain_precision(), torch.no_grad():
        flops = {
            str(dtype).removeprefix("torch."): figures.once("profile", f"flops {dtype}", partial(_flops, dtype, place))
            for dtype in _CALIBRATED
        }
        memory_bandwidth = figures.once("profile", "memory_bandwidth", partial(_memory_bandwidth, place))
        overhead = figures.once("profile", "overhead", partial(_overhead, place))
    figures.save()
    host_bandwidth = link_bandwidth(place, "host", ranks=1, cache=cache)
    return DeviceProfile(
        device_name(place),
        flops,
        memory_bandwidth,
        overhead,
        host_bandwidth,
        _memory_bytes(place),
        kind=place.type,
        allocator=CACHING if place.type == "cuda" else PLAIN,
    )


def _flops(dtype: torch.dtype, device: torch.device) -> Figure:
    width = 4096 if device.type == "cuda" else 384
    one = torch.ones(width, width, dtype=dtype, device=device)
    return shortest_seconds(lambda: one @ one, device).rate(2 * width**3)


def _memory_bandwidth(device: torch.device) -> Figure:
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    return shortest_seconds(lambda: target.copy_(source), device, runs=COPIES).rate(2 * COPY_BYTES)


def _overhead(device: torch.device) -> Figure:
    one = torch.ones(1, device=device)
    return shortest_seconds(lambda: one + one, device, runs=_SMALL_RUNS)


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
