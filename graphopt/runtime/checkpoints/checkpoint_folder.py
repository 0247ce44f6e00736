"""A folder of numbered checkpoints, each there as a whole or not at all.

A checkpoint is written beside its place and renamed when all of it is on the disk, so a process that is killed at any
moment leaves the checkpoints before it. Rank 0 renames and removes; the others wait for it.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

import torch.distributed as dist

from graphopt.errors import GraphoptError
from graphopt.ir.ops.communication.groups import alone
from graphopt.runtime.state.state_dict import place

__all__ = ["in_turn", "newest", "together", "write_checkpoint"]

T = TypeVar("T")

_NUMBERED = re.compile(r"checkpoint-([0-9]{8})")
_UNFINISHED, _OLD = ".unfinished", ".old"


def write_checkpoint(folder: Path, keep: int, write: Callable[[Path], None]) -> Path:
    """Add a checkpoint to a folder; all ranks call it together.

    Args:
        folder: is made where it is not there.
        keep: how many checkpoints stay, this one among them.
        write: fills the folder that it gets, on every rank.

    Returns:
        where the checkpoint is.

    Raises:
        GraphoptError: on every rank, where one of them cannot write.
    """
    target = Path(in_turn(lambda: str(_begin(folder))))
    unfinished = target.with_name(target.name + _UNFINISHED)
    together(lambda: write(unfinished), f"the checkpoint {str(target)!r} cannot be written")
    in_turn(lambda: _finish(folder, unfinished, target, keep))
    return target


def newest(folder: Path) -> Path:
    """The newest checkpoint in a folder, as rank 0 finds it; or the folder itself, where it is one.

    Raises:
        GraphoptError: where there is none.
    """
    return Path(in_turn(lambda: str(_newest(folder))))


def in_turn(act: Callable[[], str]) -> str:
    """Let rank 0 do something, and give every rank what came of it.

    Raises:
        GraphoptError: on every rank, where it fails on rank 0.
    """
    rank, ranks = place()
    found = ["", ""]
    if rank == 0:
        try:
            with alone():
                found[0] = act()
        except GraphoptError as error:
            found[1] = str(error)
        except OSError as error:
            found[1] = f"{error.filename or 'a checkpoint'}: {error.strerror}"
    if ranks > 1:
        dist.broadcast_object_list(found, src=0)
    if found[1]:
        raise GraphoptError(found[1])
    return found[0]


def together(act: Callable[[], T], what: str) -> T:
    """Let every rank do something that none can go on without; what came of it on this one.

    Raises:
        GraphoptError: on every rank, where it fails on one.
    """
    _, ranks = place()
    try:
        with alone():
            found, error = act(), ""
    except (GraphoptError, OSError, RuntimeError) as problem:
        if ranks == 1 and isinstance(problem, GraphoptError):
            raise
        found, error = None, str(problem) or type(problem).__name__
    errors = [error]
    if ranks > 1:
        errors = [""] * ranks
        dist.all_gather_object(errors, error)
    told = [f"rank {rank}: {found}" if ranks > 1 else found for rank, found in enumerate(errors) if found]
    if told:
        raise GraphoptError(f"{what}: {'; '.join(told)}")
    return cast(T, found)


def _begin(folder: Path) -> Path:
    """The place of the next checkpoint, with an empty folder beside it; what was left unfinished is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for item in folder.iterdir():
        if item.name.endswith((_UNFINISHED, _OLD)) and _NUMBERED.fullmatch(item.stem):
            shutil.rmtree(item, ignore_errors=True)
    target = folder / f"checkpoint-{max(_numbers(folder), default=0) + 1:08d}"
    target.with_name(target.name + _UNFINISHED).mkdir()
    return target


def _finish(folder: Path, unfinished: Path, target: Path, keep: int) -> str:
    """Rename what is written, and remove what is older than the ones that are kept."""
    for path in (*unfinished.rglob("*"), unfinished):
        _to_disk(path)
    unfinished.rename(target)
    _to_disk(folder)
    for number in sorted(_numbers(folder))[:-keep]:
        old = folder / f"checkpoint-{number:08d}"
        aside = old.rename(old.with_name(old.name + _OLD))
        shutil.rmtree(aside, ignore_errors=True)
    return str(target)


def _to_disk(path: Path) -> None:
    """Have the system write a file, or the names in a folder, to the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _numbers(folder: Path) -> list[int]:
    return [int(found[1]) for item in folder.iterdir() if (found := _NUMBERED.fullmatch(item.name))]


def _newest(folder: Path) -> Path:
    if not folder.is_dir():
        raise GraphoptError(f"there is no folder {str(folder)!r}")
    if _NUMBERED.fullmatch(folder.name):
        return folder
    numbers = _numbers(folder)
    if not numbers:
        raise GraphoptError(f"there is no checkpoint in {str(folder)!r}: graphopt.checkpoint.save makes one")
    return folder / f"checkpoint-{max(numbers):08d}"
