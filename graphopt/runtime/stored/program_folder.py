"""The folder of captures that survive the process: one folder for each, named by its key, and its size bounded."""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from graphopt.analysis.costs.figures import cache_folder
from graphopt.errors import GraphoptError
from graphopt.ir.files.checked_json import Field
from graphopt.ir.words.written_units import counted
from graphopt.runtime.stored.checked_file import read_checked, write_checked
from graphopt.runtime.stored.program_files import HEADER, FolderFiles

__all__ = [
    "LARGEST",
    "REFUSED",
    "StoredEntry",
    "clear",
    "entries",
    "find_entry",
    "is_on",
    "make_room",
    "note_refusal",
    "programs_folder",
    "refusals",
]

REFUSED = "refused"
"""The folder of what was not kept, with the reasons."""

LARGEST = 2 * 1024**3
"""Bytes of all entries; those that were used longest ago are removed."""

_MOST_REFUSED = 50


def is_on() -> bool:
    """Whether captures are kept: where ``GRAPHOPT_CACHE`` names a folder, and ``GRAPHOPT_CACHE_PROGRAMS`` is not 0."""
    return bool(os.environ.get("GRAPHOPT_CACHE")) and os.environ.get("GRAPHOPT_CACHE_PROGRAMS", "1") != "0"


def programs_folder() -> Path | None:
    """Where captures are: ``programs`` in the folder of everything that graphopt keeps; None where there is none."""
    folder = cache_folder()
    return None if folder is None else folder / "programs"


@dataclass(frozen=True)
class StoredEntry:
    """One entry of the folder.

    Attributes:
        folder: its own.
        bytes: of its files.
        used: when it was used last, in seconds since the epoch.
    """

    folder: Path
    bytes: int
    used: float

    @property
    def key(self) -> str:
        """The name of its key."""
        return self.folder.name

    def header(self) -> Field:
        """What it is of.

        Raises:
            GraphoptError: where it cannot be read.
        """
        return read_checked(self.folder / HEADER)

    def remove(self) -> None:
        """Remove it."""
        FolderFiles(self.folder).remove()


def entries(folder: Path) -> list[StoredEntry]:
    """The entries of a folder, those used last first; none where there is no folder."""
    found = []
    with contextlib.suppress(OSError):
        for own in folder.iterdir():
            if own.name == REFUSED or not own.is_dir():
                continue
            with contextlib.suppress(OSError):  # removed by another process meanwhile
                size = sum(file.stat().st_size for file in own.iterdir())
                header = own / HEADER
                found.append(StoredEntry(own, size, (header if header.exists() else own).stat().st_mtime))
    return sorted(found, key=lambda entry: -entry.used)


def find_entry(folder: Path, key: str) -> StoredEntry:
    """The entry whose key begins with the given letters.

    Raises:
        GraphoptError: where none does, or several do.
    """
    found = [entry for entry in entries(folder) if entry.key.startswith(key)]
    if len(found) != 1:
        what = "no capture" if not found else counted(len(found), "captures")
        raise GraphoptError(f"{what} in {folder} with a key that begins with {key!r}; `graphopt cache list` shows them")
    return found[0]


def clear(folder: Path) -> None:
    """Remove everything of the folder that is graphopt's: entries, notes, and what a process left half written."""
    for entry in entries(folder):
        entry.remove()
    shutil.rmtree(folder / REFUSED, ignore_errors=True)


def make_room(folder: Path, largest: int = LARGEST) -> int:
    """Remove what was used longest ago until the rest takes at most ``largest`` bytes; returns how many went."""
    total = removed = 0
    for entry in entries(folder):
        total += entry.bytes
        if total > largest:
            entry.remove()
            removed += 1
    return removed


def note_refusal(folder: Path, title: str, reason: str, name: str) -> None:
    """Note what was not kept and why; a folder that cannot be written is left alone."""
    with contextlib.suppress(OSError):
        write_checked(folder / REFUSED / name, {"title": title, "reason": reason})
        files = sorted((folder / REFUSED).iterdir(), key=lambda file: -file.stat().st_mtime)
        for old in files[_MOST_REFUSED:]:
            old.unlink(missing_ok=True)


def refusals(folder: Path) -> list[tuple[str, str]]:
    """What was not kept, the latest first: whose capture, and why."""
    found = []
    with contextlib.suppress(OSError):
        for file in sorted((folder / REFUSED).iterdir(), key=lambda file: -file.stat().st_mtime):
            with contextlib.suppress(GraphoptError):
                data = read_checked(file)
                found.append((data["title"].text(), data["reason"].text()))
    return found
