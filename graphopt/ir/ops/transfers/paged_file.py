"""A file whose blocks are memory as well: what is written to one is read from the other."""

from __future__ import annotations

import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable

import torch

from graphopt.ir.ops.transfers.disk import DiskFile, DiskSpace

__all__ = ["PagedFile"]


class PagedFile:
    """Blocks that start at pages of a file, each with a tensor on its mapped memory.

    Args:
        directory: where it is, as for ``DiskFile``.
        name: of a new file that stays, in which a tensor has two blocks; without one the file goes with the process.
        limit: bytes that it may grow to.
    """

    def __init__(
        self, directory: str | os.PathLike[str] | None = None, name: str = "", limit: int | None = None
    ) -> None:
        self._file = DiskFile(directory, limit, name)
        self.stays = bool(name)
        self._kept: set[tuple[int, int]] = set()
        self._waiting: set[tuple[int, int]] = set()
        self._dead: deque[tuple[int, int]] = deque()

    def block(self, nbytes: int, when_gone: Callable[[int], None]) -> tuple[DiskSpace, torch.Tensor]:
        """A new block, and its bytes: uint8, of shape [nbytes].

        It is used again when nothing refers to that memory any more.

        Args:
            nbytes: at least 1.
            when_gone: is then called with the memory's address; anywhere, so it may not take locks.

        Raises:
            GraphoptError: where the disk has no room.
        """
        self._collect()
        space = self._file.allocate(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        mapping = self._file.map(space)
        memory = torch.frombuffer(mapping, dtype=torch.uint8, count=nbytes)
        # Finalizers run anywhere, also under a lock: they only take note.
        weakref.finalize(mapping, self._dead.append, (space.offset, space.nbytes)).atexit = False
        weakref.finalize(mapping, when_gone, memory.data_ptr()).atexit = False
        return space, memory

    def space(self, nbytes: int) -> DiskSpace:
        """A new block that is not memory; it stays until ``keep`` is called without it.

        Raises:
            GraphoptError: where the disk has no room.
        """
        self._collect()
        space = self._file.allocate(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        self._kept.add((space.offset, space.nbytes))
        self._dead.append((space.offset, space.nbytes))
        return space

    def keep(self, spaces: set[tuple[int, int]]) -> None:
        """From now on these blocks, by offset and bytes, stay as they are, even where nothing refers to them.

        Those that were kept before may be used again.
        """
        self._kept = spaces
        self._collect()

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks in use, in whole pages."""
        self._collect()
        return self._file.used_bytes

    def _collect(self) -> None:
        while self._dead:
            self._waiting.add(self._dead.popleft())
        for block in self._waiting - self._kept:
            self._waiting.discard(block)
            self._file.release(*block)
