"""What the user's code does outside of its process while a model is captured: files, prints, logs, other programs.

A program does none of it at its calls, and has what was read at its capture.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import logging
import os
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from graphopt import _torch
from graphopt.capture.guards.code_owner import LIBRARIES, is_covered_file, is_of_python

__all__ = ["Effect", "effects_noted"]


@dataclass(frozen=True)
class Effect:
    """Something that code did.

    Attributes:
        words: for people, with the line of the user's code.
        reads: whether results may depend on what was there.
    """

    words: str
    reads: bool


_Call = tuple[tuple[Any, ...], Mapping[str, Any]]
"""The arguments of a call, by position and by name."""


def _argument(call: _Call, place: int, *names: str) -> Any:
    """One argument, however it was given; None where it was not."""
    args, kwargs = call
    return args[place] if place < len(args) else next((kwargs[name] for name in names if name in kwargs), None)


def _of_file(words: str, path: Any) -> str:
    return f"{words} {os.fspath(path)!r}" if isinstance(path, (str, os.PathLike)) else ""


def _opened(call: _Call) -> str:
    mode = _argument(call, 1, "mode", "flags") or "r"
    writes = not set("wax+").isdisjoint(mode) if isinstance(mode, str) else mode & (os.O_WRONLY | os.O_RDWR)
    return _of_file("writes the file" if writes else "reads the file", _argument(call, 0, "file", "path"))


def _saved(call: _Call) -> str:
    return _of_file("writes the file", _argument(call, 1, "f"))


def _looked_at(call: _Call) -> str:
    return _of_file("looks at the file", _argument(call, 0, "path") or ".")


def _ran(command: Any) -> str:
    first = command[0] if isinstance(command, (list, tuple)) and command else command
    name = os.fsdecode(first).partition(" ")[0] if isinstance(first, (str, bytes, os.PathLike)) else "unknown"
    return f"runs another program ({name})"


_WATCHED: list[tuple[Any, str, Callable[[_Call], str]]] = [
    *((module, "open", _opened) for module in (builtins, io, os)),
    *((os, name, _looked_at) for name in ("listdir", "scandir", "stat")),
    (torch, "save", _saved),
    (os, "system", lambda call: _ran(_argument(call, 0, "command"))),
    (subprocess.Popen, "__init__", lambda call: _ran(_argument(call, 1, "args"))),
    (builtins, "print", lambda _: "prints"),
    (logging.Logger, "handle", lambda _: "logs"),
]

_ON_THE_WAY = ("linecache.py", f"logging{os.sep}__init__.py", "warnings.py", "importlib")
"""Parts of Python's library that look at files for other reasons than what the user's code asks for."""

_LOADS = os.path.join(_torch.FOLDER, "serialization.py")


@contextlib.contextmanager
def effects_noted() -> Iterator[dict[Effect, None]]:
    """Note what this thread does by functions of Python's, called from the user's code and libraries that it calls."""
    thread, found = threading.get_ident(), dict[Effect, None]()

    def noting(original: Callable[..., Any], describe: Callable[[_Call], str]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread and (line := _users_line(describe)):
                words = describe((args, kwargs))
                if words:
                    found[Effect(f"{words} ({line})", reads=not words.startswith(("writes", "prints", "logs")))] = None
            return original(*args, **kwargs)

        return noted

    with contextlib.ExitStack() as stack:
        for owner, name, describe in _WATCHED:
            original = getattr(owner, name)
            setattr(owner, name, noting(original, describe))
            stack.callback(setattr, owner, name, original)
        yield found


def _users_line(describe: Callable[[_Call], str]) -> str:
    """The line of the user's code that a call comes from; empty where torch, graphopt or an import makes it."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        python = is_of_python(file) or file.startswith("<frozen ")
        if python and any(part in file for part in _ON_THE_WAY) and describe in (_opened, _looked_at):
            return ""
        if is_covered_file(file) and not python and file != _LOADS:
            return ""
        if not is_covered_file(file) and not any(part in file for part in LIBRARIES):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
