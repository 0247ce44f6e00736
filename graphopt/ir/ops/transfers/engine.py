"""The engine behind the transfer ops: blocks, the handles that own them, and the copies to and from them."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch

from graphopt.errors import GraphoptError, did_you_mean
from graphopt.ir.ops.transfers.disk import DiskFile
from graphopt.ir.ops.transfers.handle import block_id, make_handle
from graphopt.ir.ops.transfers.hostmemory import available_host_bytes
from graphopt.ir.ops.transfers.lanes import CpuLane, Lane, Settled, Space, Transfer
from graphopt.ir.ops.transfers.slab import HostSlab
from graphopt.ir.ops.transfers.stored_tensor import Layout, StoredTensor
from graphopt.ir.ops.transfers.worker import Worker

__all__ = ["TIERS", "Engine", "Statistics", "Tier", "checked_tier"]

Tier = Literal["host", "disk"]

TIERS: tuple[Tier, ...] = get_args(Tier)

_ids = itertools.count(1)
"""Ids of blocks; never used twice in a process or in one that it is forked from, and never 0."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """What an engine has moved since the last reset.

    Attributes:
        offloads: copies started away from the compute side.
        offloaded_bytes: their bytes.
        prefetches: copies started back to the compute side.
        prefetched_bytes: their bytes.
        stored_bytes: bytes stored now, in blocks whose handles live or whose copies are under way.
        peak_stored_bytes: the most bytes stored at once.
        seconds_waited: time for which ``offload_wait`` and ``prefetch_wait`` blocked their threads, added up. On CUDA
            the host tier blocks streams instead, which is not seen here.
        capacity_bytes: bytes taken from the system now, to hold blocks in: memory mapped, disk space of the file.
    """

    offloads: int = 0
    offloaded_bytes: int = 0
    prefetches: int = 0
    prefetched_bytes: int = 0
    stored_bytes: int = 0
    peak_stored_bytes: int = 0
    seconds_waited: float = 0.0
    capacity_bytes: int = 0


@dataclass(slots=True)
class _Block:
    """Stored bytes: where they are, how the tensor lay in them, and the copies to and from there."""

    tier: Tier
    nbytes: int
    layout: Layout
    space: Space | None = None
    outward: Transfer = field(default_factory=Settled)
    inward: dict[int, Transfer] = field(default_factory=dict)
    """The copies back that are still to be waited for, by the address that they go to."""
    pending: list[Transfer] = field(default_factory=list)

    @property
    def busy(self) -> bool:
        """Whether a copy still uses the space, waited for or not."""
        self.pending = [transfer for transfer in self.pending if not transfer.finished]
        return bool(self.pending)

    def settle(self) -> None:
        """Block until no copy uses the space."""
        for transfer in self.pending:
            with contextlib.suppress(GraphoptError):
                transfer.join()


class Engine:
    """Holds the bytes of tensors in host memory or on disk while their handles live. Any thread may call it.

    Args:
        disk_directory: where the file of the disk tier is; by default what ``GRAPHOPT_DISK`` says, else the system's
            directory for temporary files.
        disk_limit: bytes that the file may grow to; by default as many as the disk has.
        available: gives the bytes of host memory available to this process, or None where that is not known.
    """

    def __init__(
        self,
        *,
        disk_directory: str | os.PathLike[str] | None = None,
        disk_limit: int | None = None,
        available: Callable[[], int | None] = available_host_bytes,
    ) -> None:
        # A signal handler or a finalizer can come back in while this thread has the lock.
        self._lock = threading.RLock()
        self._available = available
        self._worker = Worker()
        self._disk = DiskFile(disk_directory, disk_limit)
        self._slabs: dict[str, HostSlab] = {}
        self._lanes: dict[torch.device, Lane] = {}
        self._blocks: dict[int, _Block] = {}
        self._dead: deque[int] = deque()
        self._dying: list[_Block] = []
        self._statistics = {key: Statistics() for key in ("", *TIERS)}

    # --- the four ops ------------------------------------------------------------------------------------------------

    def offload(self, x: torch.Tensor, tier: str) -> torch.Tensor:
        """Start copying the storage of ``x`` to a tier; see ``graphopt.ir.ops.storage.transfer``.

        Returns:
            The handle, int64 of shape [1] on the CPU.

        Raises:
            GraphoptError: for an unknown tier or device. Where there is no room, ``offload_wait`` raises.
        """
        known = checked_tier(tier)
        storage = x.untyped_storage()
        nbytes = storage.nbytes()
        with self._lock:
            lane = self.lane(x.device)
            self._collect()
            number = next(_ids)
            handle = make_handle(number, self._dead.append)
            block = self._blocks[number] = _Block(known, nbytes, Layout.of(x))
            if nbytes:
                self._start(block, lane, storage)
        return handle

    def _start(self, block: _Block, lane: Lane, storage: torch.UntypedStorage) -> None:
        area = self._disk if block.tier == "disk" else self._slab(storage.device.type)
        try:
            block.space = area.allocate(block.nbytes)
        except (GraphoptError, OSError) as error:
            block.outward = Settled(str(error))
            return
        self.count(block.tier, offloads=1, offloaded_bytes=block.nbytes, stored_bytes=block.nbytes)
        block.outward = lane.save(storage, block.nbytes, block.space)
        block.pending.append(block.outward)

    def offload_wait(self, handle: torch.Tensor) -> None:
        """Wait until the copy away is done; on CUDA and to the host, let the current stream wait instead.

        Raises:
            GraphoptError: where the copy failed, or the handle holds nothing.
        """
        block = self._find(handle, "offload_wait")
        self.wait(block.outward, block.tier)

    def prefetch(self, handle: torch.Tensor, wanted: StoredTensor) -> torch.Tensor:
        """Allocate the storage of ``wanted`` and start copying the stored bytes into it.

        A tensor comes back with the strides that it went with. Those that are wanted are of an example value, and
        kernels may lay out a tensor otherwise, most often where a dimension has one element.

        Returns:
            The wanted tensor on that storage; its values are there after ``prefetch_wait``.

        Raises:
            GraphoptError: where the handle holds nothing, the tensor does not fit into the storage, or the storage is
                larger than what is stored.
        """
        block = self._find(handle, "prefetch")
        wanted.check()
        if wanted.nbytes > block.nbytes:
            raise GraphoptError(
                f"graphopt::prefetch: {wanted.storage_size} elements of {wanted.dtype} are {wanted.nbytes} bytes, and "
                f"{block.nbytes} are stored; pass developer: give the storage size of the tensor that was offloaded"
            )
        result = wanted.laid_out(block.layout).allocate()
        if wanted.nbytes:
            self._start_back(block, result, wanted.nbytes)
        return result

    def _start_back(self, block: _Block, result: torch.Tensor, nbytes: int) -> None:
        if block.space is None:
            block.outward.wait()  # raises why there is nothing
        assert block.space is not None
        storage = result.untyped_storage()
        with self._lock:
            transfer = self.lane(result.device).restore(block.space, storage, nbytes, block.outward)
            block.inward[storage.data_ptr()] = transfer
            block.pending = [*(other for other in block.pending if not other.finished), transfer]
            self.count(block.tier, prefetches=1, prefetched_bytes=nbytes)

    def prefetch_wait(self, x: torch.Tensor, handle: torch.Tensor) -> None:
        """Wait until the copy to ``x`` is done; on CUDA and from the host, let the current stream wait instead.

        Raises:
            GraphoptError: where the copy failed, or ``x`` is not from a prefetch of this handle that is still to be
                waited for.
        """
        block = self._find(handle, "prefetch_wait")
        storage = x.untyped_storage()
        if not storage.nbytes():
            return
        address = storage.data_ptr()
        transfer = block.inward.get(address)
        if transfer is None:
            raise GraphoptError(
                f"graphopt::prefetch_wait: no copy to this tensor of shape {list(x.shape)} is under way; pass "
                "developer: give it what graphopt::prefetch returned for the same handle, once"
            )
        self.wait(transfer, block.tier)
        block.inward.pop(address, None)

    # --- settings and figures ----------------------------------------------------------------------------------------

    def reserve(
        self, nbytes: int, *, device: str | torch.device = "cpu", ranks: int = 1, available: int | None = None
    ) -> None:
        """Take host memory for the host tier ahead; see ``graphopt.ir.ops.transfers.reserve``."""
        if nbytes < 0 or ranks < 1:
            raise GraphoptError(f"reserve({nbytes}, ranks={ranks}): bytes must be at least 0, and ranks at least 1")
        kind = torch.device(device).type
        if kind not in ("cpu", "cuda") or (kind == "cuda" and not torch.cuda.is_available()):
            raise GraphoptError(
                f"reserve({nbytes}, device={str(device)!r}): there is no such device to offload from here"
            )
        with self._lock:
            self._collect()
            self._slab(kind).reserve(nbytes, ranks, available)

    def trim(self) -> None:
        """Give host memory and disk space in which nothing is stored back to the system."""
        with self._lock:
            self._collect()
            for slab in self._slabs.values():
                slab.trim()
            self._disk.trim()

    def statistics(self, tier: str | None = None) -> Statistics:
        """What was moved since the last reset, to and from one tier, or both (None)."""
        key = "" if tier is None else checked_tier(tier)
        with self._lock:
            self._collect()
            host = sum(slab.capacity_bytes for slab in self._slabs.values())
            capacity = {"host": host, "disk": self._disk.capacity_bytes}
            return replace(self._statistics[key], capacity_bytes=capacity.get(key, sum(capacity.values())))

    def reset_statistics(self) -> None:
        """Start counting anew; what is stored stays stored, and is where the new peak starts."""
        with self._lock:
            self._collect()
            for key, now in self._statistics.items():
                self._statistics[key] = Statistics(stored_bytes=now.stored_bytes, peak_stored_bytes=now.stored_bytes)

    def close(self) -> None:
        """Finish the copies under way, end the thread, and give everything back; handles hold nothing afterwards."""
        self._worker.close()
        with self._lock:
            for block in [*self._blocks.values(), *self._dying]:
                block.settle()
            self._dead.extend(self._blocks)
            self.trim()
            self._disk.close()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _find(self, handle: torch.Tensor, op: str) -> _Block:
        number = block_id(handle)
        with self._lock:
            self._collect()
            block = self._blocks.get(number)
        if block is None:
            raise GraphoptError(
                f"graphopt::{op}: the handle {number} holds nothing: it is not from graphopt::offload, was copied from "
                "a handle that is gone, is from before this process was forked, or the engine was closed meanwhile"
            )
        return block

    def wait(self, transfer: Transfer, tier: Tier) -> None:
        """Wait for a copy to or from a tier, and count the time.

        Raises:
            GraphoptError: where it failed.
        """
        started = time.perf_counter()
        try:
            transfer.wait()
        finally:
            with self._lock:
                self.count(tier, seconds_waited=time.perf_counter() - started)

    def count(self, tier: Tier, **more: Any) -> None:
        """Add to the statistics of a tier, and of both together."""
        for key in ("", tier):
            now = self._statistics[key]
            now = replace(now, **{name: getattr(now, name) + value for name, value in more.items()})
            self._statistics[key] = replace(now, peak_stored_bytes=max(now.peak_stored_bytes, now.stored_bytes))

    def _collect(self) -> None:
        """Free the blocks whose handles are gone, once no copy uses them any more.

        Finalizers of handles run anywhere, also while this thread holds locks; all they do is to note the id.
        """
        while self._dead:
            found = self._blocks.pop(self._dead.popleft(), None)
            if found is not None:
                self._dying.append(found)
        waiting, self._dying = self._dying, []
        for dying in waiting:
            if dying.busy:
                self._dying.append(dying)
            elif dying.space is not None:
                dying.space.free()
                self.count(dying.tier, stored_bytes=-dying.nbytes)

    def _slab(self, kind: str) -> HostSlab:
        """The host memory for tensors of a kind of device."""
        if kind not in self._slabs:
            if kind == "cuda":
                from graphopt.ir.ops.transfers.cuda import pin, unpin

                self._slabs[kind] = HostSlab(self._available, pin, unpin)
            else:
                self._slabs[kind] = HostSlab(self._available)
        return self._slabs[kind]

    def lane(self, device: torch.device) -> Lane:
        """What copies to and from a device.

        Raises:
            GraphoptError: for a device of another kind than cpu and cuda.
        """
        if device not in self._lanes:
            if device.type == "cuda":
                from graphopt.ir.ops.transfers.cuda import CudaLane

                self._lanes[device] = CudaLane(device, self._worker, self._slab("cuda"))
            elif device.type == "cpu":
                self._lanes[device] = CpuLane(self._worker)
            else:
                raise GraphoptError(f"nothing can be moved to or from {device}: only to and from cpu and cuda")
        return self._lanes[device]


def checked_tier(name: str) -> Tier:
    """A tier by its name.

    Raises:
        GraphoptError: for another name, with the near ones.
    """
    for tier in TIERS:
        if name == tier:
            return tier
    raise GraphoptError(
        f"there is no tier {name!r}; the tiers are {', '.join(TIERS)}. {did_you_mean(name, TIERS)}".strip()
    )
