"""How much room there is: on a device, on the host, on the disk of the transfers."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from graphopt.errors import GraphoptError
from graphopt.ir.ops.transfers import available_host_bytes
from graphopt.ir.ops.transfers.disk import VARIABLE

__all__ = ["free_bytes", "free_disk_bytes", "free_host_bytes"]


def free_host_bytes() -> int | None:
    """Bytes of memory that can be had on this machine; None where the system does not say."""
    return available_host_bytes()


def free_disk_bytes(folder: str = "") -> int:
    """Bytes that are free where offloaded tensors go on disk.

    Args:
        folder: on the disk, there or not yet; by default the one for offloaded tensors.

    Raises:
        GraphoptError: where ``GRAPHOPT_DISK`` names no folder.
    """
    if folder:
        there = Path(folder).absolute()
        return shutil.disk_usage(next(path for path in (there, *there.parents) if path.exists())).free
    chosen = os.environ.get(VARIABLE)
    try:
        return shutil.disk_usage(chosen or tempfile.gettempdir()).free
    except OSError as error:
        named = f"{VARIABLE}={chosen}" if chosen else f"the folder of temporary files, {tempfile.gettempdir()}"
        raise GraphoptError(f"{named} cannot be used for offloaded tensors: {error.strerror or error}") from error


def free_bytes(device: torch.device) -> int:
    """Bytes that could be allocated on a device now.

    On CUDA that is what its driver has free, and what of torch's cache is free for any request: whole segments. Free
    parts of segments that are in use (``inactive_split_bytes``) hold only what is smaller, and are not counted. On a
    CPU it is what the system and this process's limits leave.

    Raises:
        GraphoptError: for another kind of device.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + _whole_cached_segments(torch.cuda.memory_stats(device)))
    if device.type == "cpu":
        found = free_host_bytes()
        if found is not None:
            return found
    raise GraphoptError(f"it is not known how much memory is free on {device}: give the budget in bytes")


def _whole_cached_segments(statistics: Mapping[str, int]) -> int:
    """Bytes that torch's allocator can give back to the driver; no statistics before its first request.

    Blocks that are freed and wait for another stream are active still.
    """
    reserved, active, split = (
        statistics.get(f"{name}.all.current", 0) for name in ("reserved_bytes", "active_bytes", "inactive_split_bytes")
    )
    return max(reserved - active - split, 0)
