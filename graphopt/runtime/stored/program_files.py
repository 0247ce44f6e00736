"""The files of one capture: in a folder of their own, or together in a file that is shipped."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any, Protocol

from graphopt.errors import GraphoptError
from graphopt.ir.files.checked_json import Field
from graphopt.runtime.stored.checked_file import read_checked, write_checked

__all__ = ["HEADER", "FolderFiles", "ProgramFiles", "ShippedFiles"]

HEADER = "capture"
"""The file that says what a capture is of; written last."""


class ProgramFiles(Protocol):
    """Where the header and the programs of one capture are, by name."""

    def __contains__(self, name: str) -> bool: ...

    def read(self, name: str) -> Field:
        """The data of a file; raises a ``GraphoptError`` where there is none that is whole."""
        ...

    def write(self, name: str, data: Any) -> None:
        """Add a file."""
        ...

    def place(self, name: str) -> str:
        """What a file is called in messages."""
        ...

    def used(self) -> None:
        """Note that the capture is in use."""
        ...

    def remove(self) -> None:
        """Remove all of them."""
        ...


class FolderFiles:
    """Files in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __contains__(self, name: str) -> bool:
        return (self._folder / name).is_file()

    def read(self, name: str) -> Field:
        """The data of a file."""
        return read_checked(self._folder / name)

    def write(self, name: str, data: Any) -> None:
        """Add a file, or replace it."""
        write_checked(self._folder / name, data)

    def place(self, name: str) -> str:
        """The path of a file."""
        return str(self._folder / name)

    def used(self) -> None:
        """Note that the capture is in use, so that it is removed later than others."""
        with contextlib.suppress(OSError):
            (self._folder / HEADER).touch()

    def remove(self) -> None:
        """Remove them: the header first, so that nobody begins to read them."""
        with contextlib.suppress(OSError):
            (self._folder / HEADER).unlink(missing_ok=True)
        shutil.rmtree(self._folder, ignore_errors=True)


class ShippedFiles:
    """Files that have come together in one; what is added stays in memory."""

    def __init__(self, source: str, data: dict[str, Field]) -> None:
        self._source = source
        self._data = data

    def __contains__(self, name: str) -> bool:
        return name in self._data

    def read(self, name: str) -> Field:
        """The data of a file."""
        if name not in self._data:
            raise GraphoptError(f"{self._source}: there is no {name!r} in it")
        return self._data[name]

    def write(self, name: str, data: Any) -> None:
        """Keep the data while this process lives."""
        self._data[name] = Field(data)

    def place(self, name: str) -> str:
        """The shipped file, and the name in it."""
        return f"{self._source} ({name})"

    def used(self) -> None:
        """Nothing: a shipped file stays as it is."""

    def remove(self) -> None:
        """Forget them while this process lives."""
        self._data.clear()

    def values(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {name: field.value for name, field in self._data.items()}
