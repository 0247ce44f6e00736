"""Files of plain data that say themselves whether they are whole: a line with a digest, and compressed JSON.

A file may come from anybody: it is read with bounds, and what is in it is data, nothing that runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import uuid
import zlib
from pathlib import Path
from typing import Any

from graphopt.errors import GraphoptError
from graphopt.ir.files.checked_json import Field

__all__ = ["read_checked", "write_checked"]

_FIRST_LINE = b"graphopt stored program 1\n"
_LARGEST_FILE = 512 * 1024 * 1024
_LARGEST_TEXT = 2 * 1024 * 1024 * 1024


def write_checked(path: Path, data: Any) -> int:
    """Write data as JSON under another name and rename it, so that readers see all of it or nothing.

    Returns:
        the bytes of the file.

    Raises:
        OSError: where it cannot be written; nothing is left behind then.
    """
    packed = zlib.compress(json.dumps(data, separators=(",", ":")).encode("utf-8"), 1)
    whole = _FIRST_LINE + hashlib.sha256(packed).hexdigest().encode() + b"\n" + packed
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f"{path.name}-{uuid.uuid4().hex}.tmp")
    try:
        written.write_bytes(whole)
        os.replace(written, path)
    except OSError:
        with contextlib.suppress(OSError):
            written.unlink(missing_ok=True)
        raise
    return len(whole)


def read_checked(path: Path) -> Field:
    """The data of a file.

    Raises:
        GraphoptError: where the file is missing, cut short, changed, too large, or of another kind.
    """
    try:
        size = path.stat().st_size
        if size > _LARGEST_FILE:
            raise GraphoptError(f"{path}: {size} bytes; at most {_LARGEST_FILE} are read")
        whole = path.read_bytes()
    except OSError as error:
        raise GraphoptError(f"{path}: {error.strerror or error}") from error
    if not whole.startswith(_FIRST_LINE):
        raise GraphoptError(f"{path}: no stored program of this version of graphopt")
    known, _, packed = whole[len(_FIRST_LINE) :].partition(b"\n")
    if hashlib.sha256(packed).hexdigest().encode() != known:
        raise GraphoptError(f"{path}: cut short or changed: its digest is another one than it says")
    try:
        unpacker = zlib.decompressobj()
        text = unpacker.decompress(packed, _LARGEST_TEXT)
        if not unpacker.eof or unpacker.unused_data:
            raise GraphoptError(f"{path}: more than {_LARGEST_TEXT} bytes of text, or not all of it")
        return Field(json.loads(text))
    except (zlib.error, ValueError, RecursionError, MemoryError) as error:
        raise GraphoptError(f"{path}: cannot be read: {type(error).__name__}: {error!s:.120}") from error
