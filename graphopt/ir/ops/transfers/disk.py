"""Blocks in one private temporary file, which the system removes with the process."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from graphopt.errors import GraphoptError
from graphopt.ir.ops.transfers.freelist import FreeList, aligned

__all__ = ["DiskFile", "DiskSpace"]

logger = logging.getLogger(__name__)

VARIABLE = "GRAPHOPT_DISK"
"""The environment variable that names the directory."""

PIECE = 8 * 1024**2
"""Bytes written or read by one call of the system."""

_ADVICE = (
    f"free some space, name a directory on a larger disk (the environment variable {VARIABLE}, or "
    "graphopt.ir.ops.transfers.configure(disk_directory=...)), or offload less"
)


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """A block of the file: ``nbytes`` bytes at ``offset``."""

    nbytes: int
    offset: int
    _file: DiskFile

    def write(self, address: int, nbytes: int, start: int = 0) -> None:
        """Write ``nbytes`` bytes at ``address`` in memory to the block, from its byte ``start`` on."""
        self._file.write(self.offset + start, _memory(address, nbytes))

    def read(self, address: int, nbytes: int, start: int = 0) -> None:
        """Read ``nbytes`` of the block's bytes, from its byte ``start`` on, to ``address`` in memory."""
        self._file.read(self.offset + start, _memory(address, nbytes))

    def free(self) -> None:
        """Give the block back to its file."""
        self._file.release(self.offset, self.nbytes)


class DiskFile:
    """A file without a name, opened when the first block is asked for; nothing of it stays when the process ends.

    Args:
        directory: where it is; by default what ``GRAPHOPT_DISK`` says, else the system's directory for temporary files.
        limit: bytes that it may grow to; by default as many as the disk has.
        name: of a new file in the directory, which stays when the process ends; by default it has none.
    """

    def __init__(
        self, directory: str | os.PathLike[str] | None = None, limit: int | None = None, name: str = ""
    ) -> None:
        self._wanted = directory
        self._limit = limit
        self._name = name
        self._lock = threading.Lock()
        self._ranges = FreeList()
        self._descriptor: int | None = None

    @property
    def directory(self) -> Path:
        """Where the file is, or will be."""
        return Path(self._wanted or os.environ.get(VARIABLE) or tempfile.gettempdir())

    @property
    def capacity_bytes(self) -> int:
        """Bytes that the file takes on the disk."""
        with self._lock:
            return 0 if self._descriptor is None else _bytes_on_disk(self._descriptor)

    @property
    def used_bytes(self) -> int:
        """Bytes of blocks in use, each rounded up to the alignment."""
        with self._lock:
            return self._ranges.used_bytes

    def allocate(self, nbytes: int) -> DiskSpace:
        """A block of ``nbytes`` bytes.

        Raises:
            GraphoptError: where the disk or the limit has no room for it, or the directory cannot be written to.
        """
        with self._lock:
            if self._descriptor is None:
                self._descriptor = _open_new(self.directory, self._name)
            offset = self._ranges.allocate(nbytes)
            assert offset is not None
            try:
                self._check_room(self._descriptor, offset + aligned(nbytes))
            except BaseException:
                self._ranges.free(offset, nbytes)
                raise
            return DiskSpace(nbytes, offset, self)

    def _check_room(self, descriptor: int, end: int) -> None:
        if self._limit is not None and end > self._limit:
            raise GraphoptError(
                f"offloading to disk needs a file of {end} bytes in {self.directory}, and disk_limit allows "
                f"{self._limit}: raise the limit, or offload less"
            )
        # What is allocated but not written yet counts too, so this is about the whole file.
        missing = self._ranges.extent - _bytes_on_disk(descriptor)
        system = os.statvfs(descriptor)
        free = system.f_bavail * system.f_frsize
        if missing > free:
            raise GraphoptError(
                f"offloading to disk needs {missing} bytes more in {self.directory}, and {free} are free: {_ADVICE}"
            )

    def map(self, space: DiskSpace) -> mmap.mmap:
        """A block as memory: what is written to one is read from the other. The block has to start at a page."""
        with self._lock:
            descriptor = self._open_descriptor()
            if os.fstat(descriptor).st_size < space.offset + space.nbytes:
                os.ftruncate(descriptor, space.offset + space.nbytes)
            return mmap.mmap(descriptor, space.nbytes, flags=mmap.MAP_SHARED, offset=space.offset)

    def release(self, offset: int, nbytes: int) -> None:
        """Take a block back; ``DiskSpace.free`` calls this."""
        with self._lock:
            self._ranges.free(offset, nbytes)

    def write(self, offset: int, data: memoryview) -> None:
        """Write all of ``data`` at ``offset``.

        Raises:
            GraphoptError: where the disk is full, or the system reports any other error.
        """
        descriptor = self._open_descriptor()
        done = 0
        while done < len(data):
            try:
                count = os.pwrite(descriptor, data[done : done + PIECE], offset + done)
            except OSError as error:
                raise self._failure(error, len(data) - done) from error
            done += count
            # Written pages are dropped once they are on the disk: the piece before this one is, mostly.
            _forget_pages(descriptor, offset + max(done - 2 * PIECE, 0), min(done, 2 * PIECE))

    def read(self, offset: int, data: memoryview) -> None:
        """Fill ``data`` from what was written at ``offset``.

        Raises:
            GraphoptError: where the system reports an error, or the file ends before.
        """
        descriptor = self._open_descriptor()
        done = 0
        while done < len(data):
            try:
                count = os.preadv(descriptor, [data[done : done + PIECE]], offset + done)
            except OSError as error:
                raise GraphoptError(f"reading back from disk, in {self.directory}, failed: {error}") from error
            if count == 0:
                raise GraphoptError(
                    f"reading back from disk, in {self.directory}: {len(data) - done} of {len(data)} bytes are missing"
                )
            _forget_pages(descriptor, offset + done, count)
            done += count

    def trim(self) -> None:
        """Cut off what is free behind the last block in use."""
        with self._lock:
            if self._descriptor is not None:
                os.ftruncate(self._descriptor, min(self._ranges.extent, os.fstat(self._descriptor).st_size))

    def close(self) -> None:
        """Remove the file; a block that is asked for later opens a new one."""
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def __del__(self) -> None:
        self.close()

    def _open_descriptor(self) -> int:
        if self._descriptor is None:
            raise GraphoptError("the file that stored offloaded tensors is closed")
        return self._descriptor

    def _failure(self, error: OSError, needed: int) -> GraphoptError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            system = os.statvfs(self.directory)
            return GraphoptError(
                f"offloading to disk, in {self.directory}, failed with {needed} bytes left to write "
                f"({error.strerror}; {system.f_bavail * system.f_frsize} bytes are free there): {_ADVICE}"
            )
        return GraphoptError(f"offloading to disk, in {self.directory}, failed: {error}")


def _memory(address: int, nbytes: int) -> memoryview:
    """The bytes at an address, without a copy; whoever asks keeps them alive."""
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


def _bytes_on_disk(descriptor: int) -> int:
    return os.fstat(descriptor).st_blocks * 512


def _forget_pages(descriptor: int, offset: int, nbytes: int) -> None:
    """Let the system drop its copies in memory of a range of a file."""
    if sys.platform == "linux":
        os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)


def _open_new(directory: Path, name: str) -> int:
    """A new file of a name; without one, where the file system cannot make it, a file whose name is removed at once."""
    try:
        if name:
            return os.open(directory / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        descriptor = _open(directory)
    except OSError as error:
        raise GraphoptError(
            f"offloading to disk: no file can be made in {directory} ({error.strerror}): name a directory that exists "
            f"and can be written to (the environment variable {VARIABLE}, or "
            "graphopt.ir.ops.transfers.configure(disk_directory=...))"
        ) from error
    kind = _file_system(descriptor)
    if kind in ("tmpfs", "ramfs"):
        logger.warning(
            "%s is a %s, which is kept in memory: tensors offloaded to disk will go on taking memory; name a directory "
            "on a disk (the environment variable %s)",
            directory,
            kind,
            VARIABLE,
        )
    return descriptor


def _open(directory: Path) -> int:
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
    descriptor, name = tempfile.mkstemp(prefix="graphopt-", dir=directory)
    os.unlink(name)
    return descriptor


def _file_system(descriptor: int) -> str:
    """The type of the file system that a file is on (``ext4``, ``tmpfs``); empty where the system does not say."""
    device = os.fstat(descriptor).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(" - ")[1].split()[0] for line in lines if line.split()[2] == number), "")
