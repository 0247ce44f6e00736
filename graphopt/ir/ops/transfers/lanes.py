"""How bytes move between a device's memory and the blocks that hold them; here, the CPU's way."""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch

from graphopt.errors import GraphoptError
from graphopt.ir.ops.transfers.worker import Worker

__all__ = ["CpuLane", "Lane", "Settled", "Space", "Transfer"]


class Space(Protocol):
    """A block of bytes, in host memory or in a file."""

    @property
    def nbytes(self) -> int:
        """How many bytes it holds."""
        ...

    def write(self, address: int, nbytes: int) -> None:
        """Copy ``nbytes`` bytes at an address into the block."""
        ...

    def read(self, address: int, nbytes: int) -> None:
        """Copy the block's first ``nbytes`` bytes to an address."""
        ...

    def free(self) -> None:
        """Give the block back to where it is from."""
        ...


class Transfer(Protocol):
    """A copy that was started."""

    @property
    def finished(self) -> bool:
        """Whether both sides may be freed, the copy being done or having failed."""
        ...

    def wait(self) -> None:
        """Let what the calling thread computes next on the device see the copy's result, or raise its error."""
        ...

    def join(self) -> None:
        """Block until the copy is done, or raise its error."""
        ...


class Lane(Protocol):
    """One device's copies; those of one lane happen in the order in which they are started."""

    def save(self, storage: torch.UntypedStorage, nbytes: int, space: Space) -> Transfer:
        """Start copying ``nbytes`` bytes of a storage to a block; the storage lives until that is done."""
        ...

    def restore(self, space: Space, storage: torch.UntypedStorage, nbytes: int, after: Transfer) -> Transfer:
        """Start copying ``nbytes`` bytes back, once ``after``, the copy to the block, is done."""
        ...


class Settled:
    """A transfer that is over from the start: there was nothing to copy, or it could not be started.

    Args:
        failure: why it could not be started.
    """

    finished = True

    def __init__(self, failure: str = "") -> None:
        self._failure = failure

    def wait(self) -> None:
        """Return at once.

        Raises:
            GraphoptError: where the transfer could not be started.
        """
        if self._failure:
            raise GraphoptError(self._failure)

    join = wait


class CpuLane:
    """Copies between CPU tensors and blocks, in one thread beside those that compute.

    Args:
        worker: the thread; lanes may share it.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def save(self, storage: torch.UntypedStorage, nbytes: int, space: Space) -> Transfer:
        """Start copying ``nbytes`` bytes of a storage to a block; the storage lives until that is done."""
        return self._worker.submit(partial(space.write, storage.data_ptr(), nbytes), keep=storage)

    def restore(self, space: Space, storage: torch.UntypedStorage, nbytes: int, after: Transfer) -> Transfer:
        """Start copying ``nbytes`` bytes back, once ``after``, the copy to the block, is done."""
        return self._worker.submit(partial(_restore, space, storage.data_ptr(), nbytes, after), keep=storage)


def _restore(space: Space, address: int, nbytes: int, after: Transfer) -> None:
    after.join()
    space.read(address, nbytes)
