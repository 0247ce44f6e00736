"""Devices with allocators like CUDA's, small enough that tiny models leave holes in their segments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from graphopt import Program
from graphopt.analysis.allocator import AllocatorRules
from graphopt.analysis.costs.profiles import DeviceProfile

__all__ = ["SMALL_SEGMENTS", "on_device", "toy_device"]

SMALL_SEGMENTS = AllocatorRules(
    small_request=2048, small_segment=4096, large_segment=40_960, large_request=20_480, round_large=4096
)
"""torch's rules, with segments 512 times as small."""


def toy_device(**more: Any) -> DeviceProfile:
    """A device of 64 MiB whose allocator keeps what is freed."""
    figures: dict[str, Any] = {
        "name": "toy",
        "flops": {"float32": 1e12},
        "memory_bandwidth": 1e11,
        "overhead": 1e-6,
        "host_bandwidth": 1e10,
        "memory_bytes": 64 * 2**20,
        "kind": "cuda",
        "allocator": SMALL_SEGMENTS,
    }
    return DeviceProfile(**figures | more)


def on_device(program: Program, profile: DeviceProfile) -> Program:
    """A copy of a program that is planned for a device."""
    copied = program.copy()
    copied.context = replace(copied.context, device=profile)
    return copied
