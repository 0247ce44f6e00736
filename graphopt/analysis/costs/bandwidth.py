"""How fast bytes leave a device for the host's memory or for a disk, and come back."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Literal

import torch

from graphopt.analysis.costs.figures import Figure, Figures, device_here, figures_of
from graphopt.analysis.costs.timing import SHORTEST, shortest_seconds
from graphopt.errors import GraphoptError
from graphopt.ir.host import local_ranks

__all__ = ["COPIES", "COPY_BYTES", "Tier", "link_bandwidth", "memory_bandwidth"]

Tier = Literal["host", "disk"]

COPY_BYTES, COPIES = 32 * 1024**2, 5
DISK_BYTES = 64 * 1024**2


def link_bandwidth(
    device: torch.device | str,
    tier: Tier,
    *,
    directory: str | os.PathLike[str] | None = None,
    ranks: int | None = None,
    cache: bool = True,
) -> float:
    """Bytes per second between a device and where its tensors can be put aside, in the slower of the two directions.

    To the host, from CUDA, this is a copy through pinned memory; on a CPU it is a copy within memory. To the disk, a
    file without a name is written, synchronised and read back. Each is measured once, by one process: where several
    processes measure at once, the figure holds for what they leave each other.

    Args:
        device: a device of this machine.
        tier: ``"host"`` or ``"disk"``.
        directory: for the disk: a folder on it; by default the one for temporary files.
        ranks: how many processes share the link, which is divided by it; by default ``$LOCAL_WORLD_SIZE``, else 1.
        cache: use figures measured before, and keep new ones.

    Raises:
        GraphoptError: for an unknown tier, a device that is not here, a folder that cannot be written, ranks below 1.
    """
    place = device_here(device)
    sharing = _ranks(ranks)
    figures = figures_of(place, cache=cache)
    if tier == "host":
        if directory is not None:
            raise GraphoptError("directory= says which disk to measure; the tier 'host' has none")
        found = figures.once("bandwidth", "host", lambda: _host_bandwidth(place, figures))
    elif tier == "disk":
        folder = Path(tempfile.gettempdir() if directory is None else directory).resolve()
        found = figures.once("bandwidth", f"disk {folder}", lambda: _disk_bandwidth(folder))
    else:
        raise GraphoptError(f"there is no tier {tier!r}: it is 'host' or 'disk'")
    figures.save()
    return found / sharing


def _ranks(given: int | None) -> int:
    if given is None:
        return local_ranks()
    if not str(given).isdecimal() or int(given) < 1:
        raise GraphoptError(f"ranks is {str(given)!r}: it is the number of processes that share the link, 1 or more")
    return int(given)


def memory_bandwidth(device: torch.device, figures: Figures) -> float:
    """Bytes per second that a device reads and writes in its own memory, of ``figures`` where it is known there."""
    return figures.once("profile", "memory_bandwidth", lambda: _memory_bandwidth(device))


def _memory_bandwidth(device: torch.device) -> Figure:
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    return shortest_seconds(lambda: target.copy_(source), device, runs=COPIES).rate(2 * COPY_BYTES)


def _host_bandwidth(device: torch.device, figures: Figures) -> Figure:
    if device.type == "cpu":  # a copy within its memory, which reads each byte and writes it
        within = memory_bandwidth(device, figures)
        measured = figures.get("profile", "memory_bandwidth")
        return Figure(within / 2, measured is not None and measured.doubtful)
    there = torch.ones(COPY_BYTES, dtype=torch.uint8, device=device)
    here = torch.ones(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    away = shortest_seconds(lambda: here.copy_(there, non_blocking=True), device, runs=COPIES)
    back = shortest_seconds(lambda: there.copy_(here, non_blocking=True), device, runs=COPIES)
    return max(away, back).rate(COPY_BYTES)


def _disk_bandwidth(folder: Path) -> Figure:
    block = os.urandom(1024**2)  # some file systems do not write zeros
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            begin = time.perf_counter()
            for _ in range(DISK_BYTES // len(block)):
                _write(file.fileno(), block)
            os.fsync(file.fileno())
            written = time.perf_counter() - begin
            if hasattr(os, "posix_fadvise"):  # what is in memory still would be read from there
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            begin = time.perf_counter()
            os.lseek(file.fileno(), 0, os.SEEK_SET)
            while os.read(file.fileno(), len(block)):
                pass
            read = time.perf_counter() - begin
    except OSError as error:
        raise GraphoptError(
            f"the disk at {folder} cannot be measured: {error}; {DISK_BYTES} bytes are written there for a moment, "
            "so give directory= a folder that exists, can be written and has room"
        ) from error
    return Figure(DISK_BYTES / max(written, read, SHORTEST))


def _write(file: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]
