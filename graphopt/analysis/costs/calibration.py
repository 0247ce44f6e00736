"""The profile of the device that is here, measured once."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import replace
from datetime import date
from functools import partial

import torch
from torch import fx

from graphopt.analysis.allocator.rules import CACHING, PLAIN
from graphopt.analysis.costs.bandwidth import COPIES, COPY_BYTES, link_bandwidth, memory_bandwidth
from graphopt.analysis.costs.figures import Figure, device_here, device_name, figures_of
from graphopt.analysis.costs.profiles import DeviceProfile
from graphopt.analysis.costs.roofline import call_device, call_precision
from graphopt.analysis.costs.timing import shortest_seconds
from graphopt.ir.graphs.autocast import plain_precision
from graphopt.ir.version import VERSION

__all__ = ["ProfilesHere", "measured_profile", "profile_of"]

_CALIBRATED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_SMALL_RUNS = 200
_MIB = 1024 * 1024


def profile_of(
    device: torch.device | str, *, cache: bool = True, dtypes: Collection[torch.dtype] = _CALIBRATED
) -> DeviceProfile:
    """The profile of a device of this machine, measured once: matrix products, copies, and an op on one number.

    Args:
        device: cpu or a CUDA device; the CPU is measured with the number of threads of now.
        cache: use figures measured before, and keep new ones.
        dtypes: whose matrix products the profile has, beside those in float32.

    Raises:
        GraphoptError: for a device that is not here; `PROFILES` has figures of some.
    """
    place = device_here(device)
    figures = figures_of(place, cache=cache)
    with plain_precision(), torch.no_grad():
        flops = {
            str(dtype).removeprefix("torch."): figures.once("profile", f"flops {dtype}", partial(_flops, dtype, place))
            for dtype in _CALIBRATED
            if dtype is torch.float32 or dtype in dtypes
        }
        if place.type == "cuda":
            flops["tf32"] = figures.once("profile", "flops tf32", partial(_flops, torch.float32, place, "high"))
        within = memory_bandwidth(place, figures)
        overhead = figures.once("profile", "overhead", partial(_overhead, place))
    figures.save()
    host_bandwidth = link_bandwidth(place, "host", ranks=1, cache=cache)
    return DeviceProfile(
        device_name(place),
        flops,
        within,
        overhead,
        host_bandwidth,
        _memory_bytes(place),
        kind=place.type,
        allocator=CACHING if place.type == "cuda" else PLAIN,
    )


class ProfilesHere:
    """The profiles of the devices that calls run on, each measured for the dtypes that the calls compute in."""

    def __init__(self, cache: bool) -> None:
        self._cache = cache
        self._known: dict[tuple[torch.device, torch.dtype], DeviceProfile] = {}

    def of(self, node: fx.Node) -> DeviceProfile:
        """The profile for one call."""
        wanted = device, dtype = call_device(node), call_precision(node)
        if wanted not in self._known:
            self._known[wanted] = profile_of(device, cache=self._cache, dtypes=(dtype,))
        return self._known[wanted]


def measured_profile(device: torch.device | str, *, cache: bool = True) -> DeviceProfile:
    """``profile_of`` with all that can be measured: the disk, the link between two devices, what libraries take.

    Args:
        device: cpu or a CUDA device of this machine.
        cache: use figures measured before, and keep new ones.

    Raises:
        GraphoptError: for a device that is not here, and for a disk that cannot be measured.
    """
    place = device_here(device)
    found = profile_of(place, cache=cache)
    disk = link_bandwidth(place, "disk", ranks=1, cache=cache)
    how = (
        f"measured by graphopt {VERSION} with torch {torch.__version__} and {torch.get_num_threads()} threads "
        f"on {date.today().isoformat()}"
    )
    found = replace(found, disk_bandwidth=disk, sources=(how,))
    if place.type != "cuda":
        return found
    count = torch.cuda.device_count()
    return replace(
        found,
        devices_per_host=count,
        peer_bandwidth=_peer_bandwidth(place, cache) if count > 1 else 0.0,
        workspaces=_workspaces(place),
        context_bytes=_context_bytes(place),
    )


def _peer_bandwidth(device: torch.device, cache: bool) -> float:
    """Bytes per second from a device to the next one of the host."""
    other = torch.device("cuda", ((device.index or 0) + 1) % torch.cuda.device_count())
    figures = figures_of(device, cache=cache)

    def measured() -> Figure:
        source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=device)
        target = torch.ones(COPY_BYTES, dtype=torch.uint8, device=other)
        return shortest_seconds(lambda: target.copy_(source), device, runs=COPIES).rate(COPY_BYTES)

    found = figures.once("bandwidth", f"peer {other.index}", measured)
    figures.save()
    return found


def _workspaces(device: torch.device) -> dict[str, int]:
    """What torch asks its allocator for on behalf of cuBLAS, for a handle and a stream.

    ``parseChosenWorkspaceSize`` and ``parseCUDABlasLtWorkspaceSize`` in torch's ``CublasHandlePool.cpp``.
    """
    hopper = torch.cuda.get_device_capability(device) == (9, 0)
    return {"cublas": 32 * _MIB if hopper else (2 * 4096 + 8 * 16) * 1024, "cublaslt": _MIB}


def _context_bytes(device: torch.device) -> int:
    """Bytes of a device that are in use now and not torch's: contexts, also those of other processes."""
    free, total = torch.cuda.mem_get_info(device)
    return max(total - free - torch.cuda.memory_reserved(device), 0)


def _flops(dtype: torch.dtype, device: torch.device, precision: str = "highest") -> Figure:
    width = 4096 if device.type == "cuda" else 384
    one = torch.ones(width, width, dtype=dtype, device=device)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        return shortest_seconds(lambda: one @ one, device).rate(2 * width**3)
    finally:
        torch.set_float32_matmul_precision(before)


def _overhead(device: torch.device) -> Figure:
    one = torch.ones(1, device=device)
    return shortest_seconds(lambda: one + one, device, runs=_SMALL_RUNS)


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
