"""Tensors that reside on the host or on a disk, and are copied in and back where a program needs them.

For everybody else such a tensor is an ordinary one: on a disk its memory is a mapped file, so that reading it reads the
file. Programs do not read it in place. They copy it in, compute, and copy it back, beside other computing.

In a file that stays, a tensor has two blocks. What a program writes goes to the one that does not count, and
``commit`` lets it count for all tensors at once: a step that is cut short has changed nothing.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass, field

import torch

from graphopt.errors import GraphoptError
from graphopt.ir.ops.transfers.disk import DiskSpace
from graphopt.ir.ops.transfers.engine import Engine, Tier
from graphopt.ir.ops.transfers.lanes import Settled, Space, Transfer
from graphopt.ir.ops.transfers.paged_file import PagedFile
from graphopt.ir.ops.transfers.slab import TensorSpace

__all__ = ["Residents"]


@dataclass(slots=True)
class _Block:
    """A block, the address of its memory, and that memory where the resident holds it."""

    space: Space
    address: int
    memory: torch.Tensor | None


@dataclass(slots=True)
class _Resident:
    """One tensor: the block that counts comes first; the memory of that one belongs to the tensor itself."""

    tier: Tier
    nbytes: int
    blocks: list[_Block]
    file: PagedFile | None
    written: bool = False
    outward: Transfer = field(default_factory=Settled)

    @property
    def newest(self) -> _Block:
        """Where the values are that were written last, whether they count or not."""
        return self.blocks[-1] if self.written else self.blocks[0]


class Residents:
    """Knows which tensors of a process reside elsewhere, and copies them.

    Args:
        engine: its thread and streams copy.
        file: for tensors on disk that are given no file.
    """

    def __init__(self, engine: Engine, file: PagedFile) -> None:
        self._engine = engine
        self._file = file
        self._lock = threading.RLock()
        self._known: dict[int, _Resident] = {}
        self._under_way: dict[int, Transfer] = {}
        self._gone: deque[int] = deque()

    @property
    def count(self) -> int:
        """How many tensors reside elsewhere."""
        with self._lock:
            self._forget_gone()
            return len({id(resident) for resident in self._known.values()})

    @property
    def used_bytes(self) -> int:
        """Bytes of the file without a name that are in use, in whole pages."""
        return self._file.used_bytes

    # --- where tensors are -------------------------------------------------------------------------------------------

    def tier_of(self, tensor: torch.Tensor, file: PagedFile | None = None) -> str:
        """The tier that a tensor resides on; empty for one in memory, and for one in another file than this one."""
        found = self._find(tensor)
        return "" if found is None or (file is not None and found.file is not file) else found.tier

    def space_of(self, tensor: torch.Tensor) -> DiskSpace | None:
        """The block in a file that holds the newest values of a tensor; None for one that is in no file."""
        found = self._find(tensor)
        space = None if found is None else found.newest.space
        return space if isinstance(space, DiskSpace) else None

    def move(self, tensor: torch.Tensor, tier: Tier, file: PagedFile | None = None) -> torch.Tensor:
        """Start copying a tensor to a tier; returns the one there, of equal sizes and strides.

        Args:
            tensor: fills its memory without gaps; it must live and stay as it is until ``wait_moved``.
            tier: ``host`` (pinned memory for a CUDA tensor) or ``disk``.
            file: on the disk; by default one without a name.

        Raises:
            GraphoptError: where there is no room.
        """
        nbytes = tensor.numel() * tensor.element_size()
        if not nbytes:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        where = (file or self._file) if tier == "disk" else None
        count = 2 if where is not None and where.stays else 1
        blocks = [self._block(nbytes, where, tensor.device) for _ in range(count)]
        memory = blocks[0].memory
        assert memory is not None
        moved = memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), 0)
        resident = _Resident(tier, nbytes, blocks, where)
        with self._lock:
            self._forget_gone()  # before: the memory may be where that of another tensor was
            for block in blocks:
                self._known[block.address] = resident
        self._save(resident, blocks[0], _laid_out(tensor, moved))
        blocks[0].memory = None
        return moved

    def wait_moved(self, moved: torch.Tensor) -> None:
        """Wait until a copy that ``move`` has started is done.

        Raises:
            GraphoptError: where it failed.
        """
        found = self._find(moved)
        if found is not None:
            found.outward.wait()

    def settle(self, tensor: torch.Tensor, tier: Tier, file: PagedFile | None = None) -> torch.Tensor:
        """As ``move``, and wait for it; what calls it may then free or overwrite the tensor."""
        moved = self.move(tensor, tier, file)
        found = self._find(moved)
        if found is not None:
            found.outward.join()
        return moved

    def commit(self, tensors: list[torch.Tensor]) -> None:
        """Let what was written count; each tensor is from now on what was written to it."""
        for tensor in tensors:
            found = self._find(tensor)
            if found is None or not found.written:
                continue
            found.written = False
            if len(found.blocks) > 1:
                old, new = found.blocks
                assert new.memory is not None
                old.memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                tensor.data = new.memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), 0)
                found.blocks, new.memory = [new, old], None

    def roll_back(self, tensors: list[torch.Tensor]) -> None:
        """Forget what was written and does not count yet."""
        for tensor in tensors:
            found = self._find(tensor)
            if found is not None and len(found.blocks) > 1:
                found.outward.join()
                found.written = False

    def _block(self, nbytes: int, file: PagedFile | None, device: torch.device) -> _Block:
        if file is not None:
            space, memory = file.block(nbytes, self._gone.append)
            return _Block(space, memory.data_ptr(), memory)
        memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        weakref.finalize(memory.untyped_storage(), self._gone.append, memory.data_ptr()).atexit = False
        return _Block(TensorSpace(memory), memory.data_ptr(), memory)

    def _find(self, tensor: torch.Tensor) -> _Resident | None:
        with self._lock:
            self._forget_gone()
            return self._known.get(tensor.untyped_storage().data_ptr())

    def _forget_gone(self) -> None:
        while self._gone:
            resident = self._known.get(self._gone.popleft())
            for block in resident.blocks if resident is not None else ():
                self._known.pop(block.address, None)

    # --- copies ------------------------------------------------------------------------------------------------------

    def fetch(self, at: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Start copying a tensor to a device; returns the one there, of equal sizes and strides.

        One that does not reside elsewhere is copied at once.
        """
        result = torch.empty_strided(at.shape, at.stride(), dtype=at.dtype, device=device)
        found = self._find(at)
        if found is None:
            with self._lock:
                self._under_way.pop(result.data_ptr(), None)  # of a step that failed
            return result.copy_(at)
        transfer = self._engine.lane(result.device).restore(
            found.newest.space, result.untyped_storage(), found.nbytes, found.outward
        )
        with self._lock:
            self._under_way[result.data_ptr()] = transfer
        self._engine.count(found.tier, prefetches=1, prefetched_bytes=found.nbytes)
        return result

    def wait_fetched(self, fetched: torch.Tensor, at: torch.Tensor) -> None:
        """Wait until a copy that ``fetch`` has started is done; on CUDA and from the host, the current stream waits.

        Raises:
            GraphoptError: where it failed.
        """
        with self._lock:
            transfer = self._under_way.pop(fetched.untyped_storage().data_ptr(), None)
        found = self._find(at)
        if transfer is not None and found is not None:
            self._engine.wait(transfer, found.tier)

    def put_back(self, at: torch.Tensor, values: torch.Tensor) -> None:
        """Start copying values to where a tensor resides; they must stay as they are until ``wait_put_back``."""
        found = self._find(at)
        if found is None:
            at.copy_(values)
            return
        if values.shape != at.shape or values.dtype != at.dtype:
            raise GraphoptError(
                f"graphopt::swap_out: the tensor that resides elsewhere is {at.dtype} of shape {list(at.shape)}, and "
                f"{values.dtype} of shape {list(values.shape)} is to be put there; pass developer: give what "
                "graphopt::swap_in returned for it"
            )
        found.written = True
        self._save(found, found.blocks[-1], _laid_out(values, at))

    def wait_put_back(self, at: torch.Tensor) -> None:
        """Wait until the copies that ``put_back`` has started to a tensor are done.

        Raises:
            GraphoptError: where one failed, the disk being full, say.
        """
        found = self._find(at)
        if found is not None:
            self._engine.wait(found.outward, found.tier)

    def _save(self, resident: _Resident, block: _Block, source: torch.Tensor) -> None:
        lane = self._engine.lane(source.device)
        resident.outward = lane.save(source.untyped_storage(), resident.nbytes, block.space)
        self._engine.count(resident.tier, offloads=1, offloaded_bytes=resident.nbytes)


def _laid_out(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The values as the only ones in their memory, laid out as another tensor is; a copy where they are not so."""
    alone = values.untyped_storage().nbytes() == values.numel() * values.element_size()
    if alone and values.stride() == like.stride():
        return values
    return torch.empty_strided(like.shape, like.stride(), dtype=values.dtype, device=values.device).copy_(values)
