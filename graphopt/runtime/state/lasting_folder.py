"""A folder in which every finished step is kept whole: a process that is killed leaves the last one.

``state-N.bin`` has two blocks for each tensor. A step writes to those that do not count. When all is written,
``finished-step.json`` is replaced by one that names them, which the system does at once or not at all. Tensors that
reside in the file are written by the program itself, the others here.
"""

from __future__ import annotations

import fcntl
import json
import math
import mmap
import os
import re
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from graphopt.errors import GraphoptError, quoted
from graphopt.ir.files.checked_json import Field
from graphopt.ir.ops.transfers import PagedFile, residents
from graphopt.ir.ops.transfers.disk import DiskSpace
from graphopt.ir.ops.values import DTYPE_NAMES
from graphopt.runtime.state.packed_state import Packed, unpack

__all__ = ["LastingFolder", "finished_step", "is_lasting_folder"]

_RECORD, _LOCK = "finished-step.json", "lock"
_VERSION = 1
_FILE = re.compile(r"state-([0-9]{1,12})\.bin")
_NAMES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_MAPPED = 1_000_000
"""Bytes from which a tensor is read where it is, when a step goes on from it, and not copied to memory first."""


class LastingFolder:
    """The state of one step on a disk.

    Args:
        path: is made where it is not there.
        resumed: whether the step goes on from a state that was loaded.

    Attributes:
        file: tensors can reside in it.

    Raises:
        GraphoptError: where another process is using the folder, where it cannot be written, and where it holds steps
            that nobody has loaded.
    """

    def __init__(self, path: Path, *, resumed: bool) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise GraphoptError(f"offload-state: the folder {str(path)!r} cannot be used: {error.strerror}") from error
        weakref.finalize(self, os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise GraphoptError(
                f"offload-state: another process, or another step of this one, keeps its state in {str(path)!r}: give "
                "each a folder of its own"
            ) from None
        if is_lasting_folder(path) and not resumed:
            raise GraphoptError(
                f"offload-state: {str(path)!r} holds the finished steps of an earlier process: go on from them with "
                f"graphopt.checkpoint.load({str(path)!r}, step) before the first call, or give another folder"
            )
        self._name = f"state-{max(map(_number, path.iterdir()), default=0) + 1}.bin"
        self.file = PagedFile(path, self._name)
        self._own: dict[str, tuple[DiskSpace, DiskSpace]] = {}
        self._written: _Written | None = None

    def finish(self, state: Packed, tensors: list[torch.Tensor], steps: int) -> None:
        """Let a finished step count.

        Args:
            state: everything that is needed to go on from it, the tensors that reside in ``file`` among it.
            tensors: those that may reside there, as the model and the optimizer refer to them.
            steps: finished so far.

        Raises:
            GraphoptError: where the disk has no room, or cannot be written; what counted before still does.
        """
        self._written = None
        own: dict[str, tuple[DiskSpace, DiskSpace]] = {}
        kept = {path: self._place(path, tensor, own) for path, tensor in state.tensors.items()}
        record = {
            "version": _VERSION,
            "steps": steps,
            "file": self._name,
            "structure": state.structure,
            "tensors": {path: _described(state.tensors[path], space) for path, space in kept.items()},
        }
        unfinished = self.path / f"{_RECORD}.unfinished"
        try:
            unfinished.write_text(json.dumps(record), encoding="utf-8")
            spaces = {(s.offset, s.nbytes) for s in (*kept.values(), *(s for pair in own.values() for s in pair))}
            self._written = _Written(steps, own, spaces)
            unfinished.replace(self.path / _RECORD)
        except OSError as error:
            raise GraphoptError(f"offload-state: {str(self.path)!r} cannot be written: {error.strerror}") from error
        self._count(tensors)

    def complete(self, tensors: list[torch.Tensor]) -> None:
        """Let a step count here that counts in the folder, where that was interrupted."""
        if self._written is not None and _steps(self.path) == self._written.steps:
            self._count(tensors)

    def _count(self, tensors: list[torch.Tensor]) -> None:
        """Take what the record names for what counts; may be begun again."""
        assert self._written is not None
        residents().commit(tensors)
        self._own = self._written.own
        self.file.keep(self._written.spaces)
        for old in self.path.iterdir():
            if _FILE.fullmatch(old.name) and old.name != self._name:
                old.unlink(missing_ok=True)
        self._written = None

    def _place(self, path: str, tensor: torch.Tensor, own: dict[str, tuple[DiskSpace, DiskSpace]]) -> DiskSpace:
        """Where a tensor is in the file; one that does not reside there is written to its block that does not count.

        Args:
            path: of the tensor in the state.
            tensor: its values.
            own: gets the block that will count, and the other one.
        """
        if residents().tier_of(tensor, self.file):
            space = residents().space_of(tensor)
            assert space is not None
            return space
        data = tensor.detach().cpu().contiguous()
        nbytes = max(data.numel() * data.element_size(), 1)
        counts, other = self._own.get(path) or (self.file.space(nbytes), self.file.space(nbytes))
        if other.nbytes < nbytes:
            counts, other = self.file.space(nbytes), self.file.space(nbytes)
        own[path] = (other, counts)
        if data.numel():
            other.write(data.data_ptr(), nbytes)
        return other


@dataclass(frozen=True, slots=True)
class _Written:
    """A step that is written: how many there are, the blocks that are not memory, and all that are to stay."""

    steps: int
    own: dict[str, tuple[DiskSpace, DiskSpace]]
    spaces: set[tuple[int, int]]


def _steps(path: Path) -> int:
    """How many steps the record of a folder counts."""
    return int(json.loads((path / _RECORD).read_text(encoding="utf-8"))["steps"])


def _described(tensor: torch.Tensor, space: DiskSpace) -> list[Any]:
    strides = list(tensor.stride()) if residents().space_of(tensor) == space else list(tensor.contiguous().stride())
    return [DTYPE_NAMES[tensor.dtype], list(tensor.shape), strides, space.offset]


def _number(path: Path) -> int:
    found = _FILE.fullmatch(path.name)
    return 0 if found is None else int(found[1])


# --- reading ---------------------------------------------------------------------------------------------------------


def is_lasting_folder(path: Path) -> bool:
    """Whether a folder holds a finished step."""
    return (path / _RECORD).is_file()


def finished_step(path: Path) -> Mapping[str, Any]:
    """The state of the last finished step in a folder; large tensors of it are read where they are.

    Raises:
        GraphoptError: for a folder that is damaged, with the place.
    """
    try:
        record = Field(json.loads((path / _RECORD).read_text(encoding="utf-8")))
        if record["version"].whole() != _VERSION:
            raise record["version"].error(f"this graphopt reads version {_VERSION}")
        name = record["file"].text()
        if not _FILE.fullmatch(name):
            raise record["file"].expected("the name of a file of states")
        with (path / name).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            tensors = {key: _read(item, file.fileno(), size) for key, item in record["tensors"].entries()}
        structure = record["structure"].value
        if not isinstance(structure, str):
            raise record["structure"].expected("text")
        found = unpack(structure, tensors)
    except (OSError, ValueError, RuntimeError, RecursionError, OverflowError, TypeError, MemoryError) as error:
        raise GraphoptError(f"the finished step in {str(path)!r} cannot be read: {quoted(error)}") from error
    if not isinstance(found, Mapping):
        raise GraphoptError(f"the finished step in {str(path)!r} is no state of a step")
    return found


def _read(item: Field, file: int, size: int) -> torch.Tensor:
    parts = list(item.items(4))
    if len(parts) != 4:
        raise item.expected("a dtype, sizes, strides and an offset")
    dtype = parts[0].one_of(_NAMES)
    shape = [part.whole(0) for part in parts[1].items()]
    strides = [part.whole(0) for part in parts[2].items()]
    offset = parts[3].whole(0)
    count = math.prod(shape)
    nbytes = count * dtype.itemsize
    extent = 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=False))
    if len(shape) != len(strides) or (count and extent != count):
        raise item.error("its strides do not fill its memory")
    if offset % mmap.PAGESIZE or offset + nbytes > size:
        raise item.error(f"it is not in the file, which has {size} bytes")
    if not count:
        return torch.empty(shape, dtype=dtype)
    # Private: what writes to it does not write to the file.
    memory = mmap.mmap(file, nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE, offset=offset)
    tensor = torch.frombuffer(memory, dtype=dtype, count=count).as_strided(shape, strides)
    return tensor if nbytes >= _MAPPED else tensor.clone()
