"""What a device can do: published figures of common ones, and calibration of the one that is here."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from graphopt.analysis.allocator.rules import CACHING, PLAIN, AllocatorRules
from graphopt.analysis.costs.bandwidth import COPIES, COPY_BYTES, link_bandwidth
from graphopt.analysis.costs.figures import Figure, device_here, device_name, figures_of
from graphopt.analysis.costs.timing import shortest_seconds
from graphopt.errors import GraphoptError
from graphopt.ir.autocast import plain_precision

__all__ = ["EFFICIENCY", "PROFILES", "DeviceProfile", "profile_of"]

EFFICIENCY = 0.75
"""The share of the published peaks that programs get, in `PROFILES`.

Vendors state what the clock and the units allow; large matrix products, copies and transfers reach between 60 and 90 %
of it. 0.75 is also what torch's own estimate of run times takes (``torch.utils._runtime_estimation``).
"""

_LAUNCH = 5e-6
"""Seconds between two small kernels of an eager PyTorch program on CUDA, where Python and the launch are the limit."""


@dataclass(frozen=True)
class DeviceProfile:
    """What a device can do, for estimating times without running anything.

    Attributes:
        name: for people.
        flops: floating-point operations per second of matrix products by dtype (``"float32"``, ``"bfloat16"``);
            ``"float32"`` must be there and stands for dtypes that are not.
        memory_bandwidth: bytes per second that ops read and write in the device's memory.
        overhead: seconds that every op takes beyond that.
        host_bandwidth: bytes per second between the device and the host's memory, in each direction.
        memory_bytes: bytes of the device's memory.
        kind: type of the device as torch names it (``"cuda"`` also for ROCm, ``"cpu"``).
        peer_bandwidth: bytes per second between two devices of one host, in each direction; 0 where it is not known.
        network_bandwidth: bytes per second and device between hosts, in each direction; 0 where it is not known.
        devices_per_host: how many devices share a host.
        allocator: how torch's allocator for this device lays out blocks.
        workspaces: bytes that libraries keep for themselves out of the allocator's memory, by library (``"cublas"``).
        context_bytes: bytes that the device's driver and libraries take outside of the allocator.
        sources: where the figures are published.

    Raises:
        GraphoptError: for a figure that is not positive (``overhead`` may be 0), or without ``"float32"``.
    """

    name: str
    flops: Mapping[str, float] = field(hash=False)
    memory_bandwidth: float
    overhead: float
    host_bandwidth: float
    memory_bytes: int
    kind: str = "cpu"
    peer_bandwidth: float = 0.0
    network_bandwidth: float = 0.0
    devices_per_host: int = 1
    allocator: AllocatorRules = PLAIN
    workspaces: Mapping[str, int] = field(default_factory=dict, hash=False)
    context_bytes: int = 0
    sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if "float32" not in self.flops:
            raise GraphoptError(f"the profile {self.name!r} lacks flops['float32'], which other dtypes fall back to")
        figures = {f"flops[{dtype!r}]": value for dtype, value in self.flops.items()}
        figures |= {"memory_bandwidth": self.memory_bandwidth, "host_bandwidth": self.host_bandwidth}
        figures["memory_bytes"] = self.memory_bytes
        wrong = [f"{key} is {value!r}" for key, value in figures.items() if not 0 < value < math.inf]
        wrong += [f"overhead is {self.overhead!r}"] if not 0 <= self.overhead < math.inf else []
        if wrong:
            raise GraphoptError(f"the profile {self.name!r} needs positive figures: {', '.join(wrong)}")

    @property
    def usable_bytes(self) -> int:
        """Bytes that are left for tensors, beside what the driver and libraries take."""
        return self.memory_bytes - self.context_bytes - sum(self.workspaces.values())

    def peak_flops(self, dtype: torch.dtype) -> float:
        """Floating-point operations per second in ``dtype``."""
        return self.flops.get(str(dtype).removeprefix("torch."), self.flops["float32"])


def _published(
    name: str, tera: Mapping[str, float], memory_bandwidth: float, host_bandwidth: float, memory_bytes: int
) -> DeviceProfile:
    return DeviceProfile(
        name=name,
        flops={dtype: EFFICIENCY * value * 1e12 for dtype, value in tera.items()},
        memory_bandwidth=EFFICIENCY * memory_bandwidth,
        overhead=_LAUNCH,
        host_bandwidth=EFFICIENCY * host_bandwidth,
        memory_bytes=memory_bytes,
        kind="cuda",
        allocator=CACHING,
    )


_VOLTA = {"float64": 7.8, "float32": 15.7, "float16": 125.0}
_AMPERE = {"float64": 19.5, "float32": 19.5, "float16": 312.0, "bfloat16": 312.0}
_HOPPER = {
    "float64": 67.0,
    "float32": 67.0,
    "float16": 989.4,
    "bfloat16": 989.4,
    "float8_e4m3fn": 1978.9,
    "float8_e5m2": 1978.9,
}

PROFILES: Mapping[str, DeviceProfile] = {
    profile.name: profile
    for profile in (
        _published("v100-32gb", _VOLTA, 900e9, 16e9, 32 * 10**9),
        _published("a100-40gb", _AMPERE, 1555e9, 32e9, 40 * 10**9),
        _published("a100-80gb", _AMPERE, 2039e9, 32e9, 80 * 10**9),
        _published("h100-80gb", _HOPPER, 3350e9, 64e9, 80 * 10**9),
        _published("h200", _HOPPER, 4800e9, 64e9, 141 * 10**9),
    )
}
"""NVIDIA's data sheets for the SXM modules (PCIe 3, 4 or 5 with 16 lanes to the host), times `EFFICIENCY`.

Matrix products in float16, bfloat16, float64 and float8 run on tensor cores (float64 not on the V100), without
sparsity. Those in float32 do not, as torch has it by default (``torch.backends.cuda.matmul.allow_tf32``). The V100 has
no units for bfloat16. Bytes of memory are the decimal ones of the product's name, a little less than is there.
"""

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
    return DeviceProfile(device_name(place), flops, memory_bandwidth, overhead, host_bandwidth, _memory_bytes(place))


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
