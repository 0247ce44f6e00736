"""Blocks of host memory beside torch's allocator: anonymous mappings, pinned where a CUDA device copies from them."""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from graphopt.errors import GraphoptError
from graphopt.ir.ops.transfers.freelist import FreeList, aligned

__all__ = ["HostSlab", "HostSpace", "TensorSpace"]

logger = logging.getLogger(__name__)

GROWTH = 32 * 1024**2
"""Bytes by which a slab grows at least; on a CPU, pages that are never touched take no memory."""


class _Chunk:
    """One mapping, its address, and what is free in it."""

    def __init__(self, nbytes: int, pin: Callable[[int, int], bool] | None, touch: bool) -> None:
        # Private: a forked child sees a copy. Touched: the memory is there, and not only promised.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (getattr(mmap, "MAP_POPULATE", 0) if touch else 0)
        self.memory = mmap.mmap(-1, nbytes, flags=flags)
        self._anchor = ctypes.c_char.from_buffer(self.memory)
        self.address = ctypes.addressof(self._anchor)
        self.ranges = FreeList(nbytes)
        self.pinned = pin is not None and pin(self.address, nbytes)


@dataclass(frozen=True, slots=True)
class HostSpace:
    """A block of a slab.

    Attributes:
        nbytes: how many bytes it holds.
        address: where they are.
    """

    nbytes: int
    address: int
    _offset: int
    _chunk: _Chunk
    _slab: HostSlab

    def write(self, address: int, nbytes: int) -> None:
        """Copy ``nbytes`` bytes at ``address`` into the block; other Python threads run meanwhile."""
        ctypes.memmove(self.address, address, nbytes)

    def read(self, address: int, nbytes: int) -> None:
        """Copy the block's first ``nbytes`` bytes to ``address``; other Python threads run meanwhile."""
        ctypes.memmove(address, self.address, nbytes)

    def tensor(self, nbytes: int) -> torch.Tensor:
        """The block's first ``nbytes`` bytes as a CPU tensor: uint8, of shape [nbytes], on the block's own memory."""
        return torch.frombuffer(self._chunk.memory, dtype=torch.uint8, count=nbytes, offset=self._offset)

    def free(self) -> None:
        """Give the block back to its slab."""
        self._slab.release(self._chunk, self._offset, self.nbytes)


@dataclass(frozen=True, slots=True)
class TensorSpace:
    """The memory of a CPU tensor as a block.

    Attributes:
        memory: uint8, of shape [nbytes].
    """

    memory: torch.Tensor

    @property
    def nbytes(self) -> int:
        """How many bytes it holds."""
        return self.memory.numel()

    def write(self, address: int, nbytes: int) -> None:
        """Copy ``nbytes`` bytes at ``address`` into the block; other Python threads run meanwhile."""
        ctypes.memmove(self.memory.data_ptr(), address, nbytes)

    def read(self, address: int, nbytes: int) -> None:
        """Copy the block's first ``nbytes`` bytes to ``address``; other Python threads run meanwhile."""
        ctypes.memmove(address, self.memory.data_ptr(), nbytes)

    def tensor(self, nbytes: int) -> torch.Tensor:
        """The block's first ``nbytes`` bytes."""
        return self.memory[:nbytes]

    def free(self) -> None:
        """Nothing: the memory goes with the tensor."""


class HostSlab:
    """Host memory in a few large mappings, handed out first-fit in blocks aligned to 64 bytes.

    Args:
        available: gives the bytes of host memory that are available, or None where that is not known.
        pin: registers (address, bytes) for copies by a device and says whether that worked; None for memory that no
            device copies from.
        unpin: takes back what ``pin`` did at an address.
    """

    def __init__(
        self,
        available: Callable[[], int | None],
        pin: Callable[[int, int], bool] | None = None,
        unpin: Callable[[int], None] | None = None,
    ) -> None:
        self._available = available
        self._pin = pin
        self._unpin = unpin
        self._lock = threading.Lock()
        self._chunks: list[_Chunk] = []

    @property
    def capacity_bytes(self) -> int:
        """Bytes that the slab has taken from the system."""
        with self._lock:
            return sum(chunk.ranges.capacity for chunk in self._chunks)

    @property
    def used_bytes(self) -> int:
        """Bytes of blocks in use, each rounded up to the alignment."""
        with self._lock:
            return sum(chunk.ranges.used_bytes for chunk in self._chunks)

    def allocate(self, nbytes: int) -> HostSpace:
        """A block of ``nbytes`` bytes; the slab grows where no free range is large enough.

        Raises:
            GraphoptError: where the memory is not there.
        """
        with self._lock:
            for chunk in self._chunks:
                offset = chunk.ranges.allocate(nbytes)
                if offset is not None:
                    return HostSpace(nbytes, chunk.address + offset, offset, chunk, self)
            chunk = self._grow(aligned(nbytes))
            offset = chunk.ranges.allocate(nbytes)
            assert offset is not None
            return HostSpace(nbytes, chunk.address + offset, offset, chunk, self)

    def release(self, chunk: _Chunk, offset: int, nbytes: int) -> None:
        """Take a block back; ``HostSpace.free`` calls this."""
        with self._lock:
            chunk.ranges.free(offset, nbytes)

    def reserve(self, nbytes: int, ranks: int = 1, available: int | None = None) -> None:
        """Have one mapping of at least ``nbytes`` bytes: exactly that many, unless there is a larger one already.

        The memory is touched, so that no later copy waits for pages. Mappings without blocks are given back first.

        Args:
            nbytes: bytes that this process needs.
            ranks: processes on this machine that reserve as much.
            available: bytes available to all of them; asked from the system by default.

        Raises:
            GraphoptError: where ``nbytes`` times ``ranks`` is more than is available, or the system refuses.
        """
        size = aligned(nbytes)
        with self._lock:
            if size == 0 or any(chunk.ranges.capacity >= size for chunk in self._chunks):
                return
            self._trim()
            there = self._available() if available is None else available
            if there is not None and size * ranks > there:
                raise GraphoptError(
                    f"offloading to the host needs {size} bytes × {ranks} rank{'s' * (ranks != 1)} = {size * ranks} "
                    f"bytes, and {there} are available: offload less, offload to disk, or run fewer ranks here"
                )
            self._chunks.append(self._map(size, touch=True))

    def trim(self) -> None:
        """Give mappings in which nothing is stored back to the system."""
        with self._lock:
            self._trim()

    def _trim(self) -> None:
        for chunk in [chunk for chunk in self._chunks if not chunk.ranges.used_bytes]:
            if chunk.pinned and self._unpin is not None:
                self._unpin(chunk.address)
            self._chunks.remove(chunk)

    def _grow(self, nbytes: int) -> _Chunk:
        there = self._available()
        if there is not None and nbytes > there:
            raise GraphoptError(
                f"offloading to the host needs {nbytes} bytes more, and {there} are available: "
                "offload less, or offload to disk"
            )
        chunk = self._map(nbytes if there is not None and there < GROWTH else max(nbytes, GROWTH), touch=False)
        self._chunks.append(chunk)
        return chunk

    def _map(self, nbytes: int, touch: bool) -> _Chunk:
        try:
            chunk = _Chunk(nbytes, self._pin, touch)
        except (OSError, MemoryError, OverflowError, ValueError) as error:
            raise GraphoptError(
                f"offloading to the host needs {nbytes} bytes more, and the system refuses them ({error}): "
                "offload less, offload to disk, or raise the limits of this process (ulimit -v)"
            ) from error
        if self._pin is not None and not chunk.pinned:
            logger.warning(
                "%d bytes of host memory could not be pinned: copies to and from the device will be slower and will "
                "not overlap with computing (is the limit of locked memory, ulimit -l, too low?)",
                nbytes,
            )
        return chunk
