"""Moving tensors out of the way and back: what the ops of ``graphopt.ir.ops.storage.transfer`` run on.

A process has one engine. Its host tier is memory beside torch's allocator (pinned, for CUDA tensors), its disk tier one
temporary file without a name. Copies run beside computing: on a CPU in one thread, on CUDA on a side stream.

In reading order: ``engine``, ``handle``, ``worker``, ``lanes``, ``slab``, ``freelist``, ``hostmemory``, ``disk``,
``paged_file``, ``stored_tensor``, ``residents``, ``cuda``.
"""

from __future__ import annotations

import gc
import os
import threading

import torch

from graphopt.errors import GraphoptError
from graphopt.ir.ops.transfers.engine import TIERS, Engine, Statistics, Tier, checked_tier
from graphopt.ir.ops.transfers.freelist import slab_bytes
from graphopt.ir.ops.transfers.hostmemory import available_host_bytes
from graphopt.ir.ops.transfers.paged_file import PagedFile
from graphopt.ir.ops.transfers.residents import Residents
from graphopt.ir.ops.transfers.stored_tensor import StoredTensor

__all__ = [
    "TIERS",
    "Engine",
    "PagedFile",
    "Residents",
    "Statistics",
    "StoredTensor",
    "Tier",
    "available_host_bytes",
    "checked_tier",
    "configure",
    "engine",
    "reserve",
    "reset_statistics",
    "residents",
    "slab_bytes",
    "statistics",
    "trim",
]


class _Process:
    """The engine of this process, and how to make it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.engine: Engine | None = None
        self.residents: Residents | None = None
        self.disk_directory: str | os.PathLike[str] | None = None
        self.disk_limit: int | None = None

    def after_fork(self) -> None:
        """Start anew in a forked child: it has neither the thread nor the right to the parent's blocks and file."""
        self.lock = threading.Lock()
        self.engine = self.residents = None


_process = _Process()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_process.after_fork)


def engine() -> Engine:
    """The engine of this process; it is made when first asked for, and again in a forked child."""
    with _process.lock:
        if _process.engine is None:
            _process.engine = Engine(disk_directory=_process.disk_directory, disk_limit=_process.disk_limit)
        return _process.engine


def residents() -> Residents:
    """The tensors of this process that reside elsewhere; a forked child has none, and copies what it is given."""
    current = engine()
    with _process.lock:
        if _process.residents is None:
            file = PagedFile(_process.disk_directory, limit=_process.disk_limit)
            _process.residents = Residents(current, file)
        return _process.residents


def configure(*, disk_directory: str | os.PathLike[str] | None = None, disk_limit: int | None = None) -> None:
    """Say where tensors that are offloaded to disk go.

    Args:
        disk_directory: an existing directory; by default what the environment variable ``GRAPHOPT_DISK`` says, else the
            system's directory for temporary files.
        disk_limit: bytes that the file there may grow to; by default as many as the disk has.

    Raises:
        GraphoptError: where the directory is not there or not writable, the limit is negative, or tensors are
        offloaded.
    """
    if disk_directory is not None and not (os.path.isdir(disk_directory) and os.access(disk_directory, os.W_OK)):
        raise GraphoptError(f"disk_directory {os.fspath(disk_directory)!r} is not a directory that can be written to")
    if disk_limit is not None and disk_limit < 0:
        raise GraphoptError(f"disk_limit is a number of bytes, and {disk_limit} is negative")
    with _process.lock:
        if _process.engine is not None:
            stored = _process.engine.statistics().stored_bytes
            if stored:
                raise GraphoptError(
                    f"{stored} bytes of offloaded tensors are stored: configure transfers before the first step, or "
                    "after what refers to them (a loss with its graph) is gone"
                )
            _refuse_residents(_process.residents)
            _process.engine.close()
        _process.engine = _process.residents = None
        _process.disk_directory, _process.disk_limit = disk_directory, disk_limit


def _refuse_residents(known: Residents | None) -> None:
    """Raise where tensors reside in the file that is to be another one."""
    if known is not None and known.count:
        gc.collect()  # steps refer to themselves
    if known is not None and known.count:
        raise GraphoptError(
            f"{known.count} tensors of models and optimizers reside elsewhere: configure transfers before the first "
            "step, or after what refers to them is gone"
        )


def reserve(nbytes: int, *, device: str | torch.device = "cpu", ranks: int = 1, available: int | None = None) -> None:
    """Take host memory for the host tier ahead, so that a step neither grows it nor finds out that there is too little.

    Afterwards there is one mapping of at least ``nbytes`` bytes: exactly that many, rounded up to 64, unless there is a
    larger one already. It stays until ``trim``. ``slab_bytes`` says how many bytes a known order of blocks needs.

    Args:
        nbytes: bytes that this process will hold at once.
        device: where the tensors are that will be offloaded; for ``"cuda"`` the memory is pinned.
        ranks: processes on this machine that reserve as much at the same time.
        available: bytes that are available to all of them together; asked from the system by default. Ranks should
            agree on it before the first of them reserves.

    Raises:
        GraphoptError: where ``nbytes`` times ``ranks`` is more than is available, or the system refuses the memory.
    """
    engine().reserve(nbytes, device=device, ranks=ranks, available=available)


def trim() -> None:
    """Give host memory and disk space in which nothing is stored back to the system."""
    engine().trim()


def statistics(tier: str | None = None) -> Statistics:
    """What was moved since the last reset, to and from the tier ``"host"`` or ``"disk"``, or both (None)."""
    return engine().statistics(tier)


def reset_statistics() -> None:
    """Start counting anew; what is stored stays stored, and is where the new peak starts."""
    engine().reset_statistics()
