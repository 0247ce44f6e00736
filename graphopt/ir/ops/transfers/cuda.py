"""Copies between a CUDA device and blocks: two side streams per device, events, pinned host memory.

One stream copies to the host and one copies back: devices have an engine for each direction, and on a single stream
what backward needs next would queue behind all that forward still sends away.

Rules (they prevent the failures that other implementations had): tensors are allocated on the compute stream only and
``record_stream`` is never used; a side stream waits for the compute stream before each copy; what a copy reads or
writes on the device lives until the compute stream has been told to wait for the copy, or the copy is done.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from graphopt.ir.ops.transfers.disk import DiskSpace
from graphopt.ir.ops.transfers.lanes import Space, Transfer
from graphopt.ir.ops.transfers.slab import HostSlab, HostSpace, TensorSpace
from graphopt.ir.ops.transfers.worker import Worker

__all__ = ["CudaLane", "StreamCopy", "pin", "unpin"]

_cuda: Any = torch.cuda  # torch leaves much of it untyped

STAGING = 16 * 1024**2
"""Bytes of pinned memory through which copies between the device and a file go."""

_PORTABLE = 1
"""``cudaHostRegisterPortable``: pinned for every device."""


def pin(address: int, nbytes: int) -> bool:
    """Register host memory for copies by CUDA devices; whether that worked."""
    code = int(_cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE))
    if code:
        _clear_error()
    return code == 0


def unpin(address: int) -> None:
    """Take back what ``pin`` did."""
    if int(_cuda.cudart().cudaHostUnregister(address)):
        _clear_error()


def _clear_error() -> None:
    """Take note of the error that CUDA remembers; the next kernel, which is not to blame, would report it."""
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError:
        return


class StreamCopy:
    """A copy that was put on a side stream.

    Args:
        device: whose compute stream ``wait`` holds back.
        event: recorded behind the copy.
        keep: what must live until the compute stream waits for the copy, or the copy is done.
    """

    __slots__ = ("_device", "_keep", "event")

    def __init__(self, device: torch.device, event: Any, keep: object) -> None:
        self._device = device
        self._keep: object = keep
        self.event = event

    @property
    def finished(self) -> bool:
        """Whether the copy is done."""
        done = bool(self.event.query())
        if done:
            self._keep = None
        return done

    def wait(self) -> None:
        """Let the stream that is current when this is called wait for the copy; the thread goes on."""
        _cuda.current_stream(self._device).wait_event(self.event)
        self._keep = None

    def join(self) -> None:
        """Block until the copy is done."""
        self.event.synchronize()
        self._keep = None


class CudaLane:
    """The copies of one CUDA device.

    Args:
        device: with its index.
        worker: the thread that writes and reads files.
        slab: pinned host memory.
    """

    def __init__(self, device: torch.device, worker: Worker, slab: HostSlab) -> None:
        self._device = device
        self._worker = worker
        self._slab = slab
        self._outward = _cuda.Stream(device)
        self._inward = _cuda.Stream(device)

    def save(self, storage: torch.UntypedStorage, nbytes: int, space: Space) -> Transfer:
        """Start copying ``nbytes`` bytes of a storage to a block, after what the current stream has to do by now."""
        ready = _cuda.current_stream(self._device).record_event()
        if isinstance(space, (HostSpace, TensorSpace)):
            return self._copy(self._outward, space.tensor(nbytes), _bytes(storage, nbytes), ready)
        assert isinstance(space, DiskSpace)
        return self._worker.submit(partial(self._to_disk, _bytes(storage, nbytes), space, ready), keep=storage)

    def restore(self, space: Space, storage: torch.UntypedStorage, nbytes: int, after: Transfer) -> Transfer:
        """Start copying ``nbytes`` bytes back, once ``after``, the copy to the block, is done.

        The storage's memory may have had another owner before, so the copy waits for what the current stream has to do
        by now.
        """
        ready = _cuda.current_stream(self._device).record_event()
        if isinstance(space, (HostSpace, TensorSpace)):
            if isinstance(after, StreamCopy):
                self._inward.wait_event(after.event)
            else:
                after.join()
            return self._copy(self._inward, _bytes(storage, nbytes), space.tensor(nbytes), ready)
        assert isinstance(space, DiskSpace)
        return self._worker.submit(partial(self._from_disk, space, _bytes(storage, nbytes), ready, after), keep=storage)

    def _copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor, ready: torch.cuda.Event) -> StreamCopy:
        with _cuda.stream(stream):
            stream.wait_event(ready)
            target.copy_(source, non_blocking=True)
            return StreamCopy(self._device, stream.record_event(), (target, source))

    def _to_disk(self, source: torch.Tensor, space: DiskSpace, ready: torch.cuda.Event) -> None:
        staging = self._slab.allocate(min(source.numel(), STAGING))
        try:
            for start, piece in _pieces(source):
                self._copy(self._outward, staging.tensor(piece.numel()), piece, ready).join()
                space.write(staging.address, piece.numel(), start)
        finally:
            staging.free()

    def _from_disk(self, space: DiskSpace, target: torch.Tensor, ready: torch.cuda.Event, after: Transfer) -> None:
        after.join()
        staging = self._slab.allocate(min(target.numel(), STAGING))
        try:
            for start, piece in _pieces(target):
                space.read(staging.address, piece.numel(), start)
                self._copy(self._inward, piece, staging.tensor(piece.numel()), ready).join()
        finally:
            staging.free()


def _bytes(storage: torch.UntypedStorage, nbytes: int) -> torch.Tensor:
    """The first bytes of a storage as a tensor: uint8, of shape [nbytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[:nbytes]


def _pieces(data: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """The parts of a flat tensor that fit into the staging memory, with their offsets."""
    return [(start, data[start : start + STAGING]) for start in range(0, data.numel(), STAGING)]
