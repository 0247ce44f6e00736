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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from graphopt import _torch
from graphopt.capture.whose_code import LIBRARIES, is_covered_file, is_of_python

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


def _of_file(words: str, path: Any) -> str:
    return f"{words} {os.fspath(path)!r}" if isinstance(path, (str, os.PathLike)) else ""


def _opened(path: Any, mode: Any = "r", *_: Any, **__: Any) -> str:
    writes = not set("wax+").isdisjoint(mode) if isinstance(mode, str) else mode & (os.O_WRONLY | os.O_RDWR)
    return _of_file("writes the file" if writes else "reads the file", path)


def _saved(_: Any, path: Any = None, *__: Any, **___: Any) -> str:
    return _of_file("writes the file", path)


def _looked_at(path: Any = ".", *_: Any, **__: Any) -> str:
    return _of_file("looks at the file", path)


def _ran(command: Any = "", *_: Any, **__: Any) -> str:
    first = command if isinstance(command, (str, bytes, os.PathLike)) else next(iter(command), "")
    return f"runs another program ({os.fsdecode(first).partition(' ')[0]})"


def _started(_: subprocess.Popen[Any], args: Any = "", *__: Any, **___: Any) -> str:
    return _ran(args)


_WATCHED: list[tuple[Any, str, Callable[..., str]]] = [
    *((module, "open", _opened) for module in (builtins, io, os)),
    *((os, name, _looked_at) for name in ("listdir", "scandir", "stat")),
    (torch, "save", _saved),
    (os, "system", _ran),
    (subprocess.Popen, "__init__", _started),
    (builtins, "print", lambda *_, **__: "prints"),
    (logging.Logger, "handle", lambda *_, **__: "logs"),
]

_ON_THE_WAY = ("linecache.py", f"logging{os.sep}__init__.py", "warnings.py", "importlib")
"""Parts of Python's library that look at files for other reasons than what the user's code asks for."""

_LOADS = os.path.join(_torch.FOLDER, "serialization.py")


@contextlib.contextmanager
def effects_noted() -> Iterator[dict[Effect, None]]:
    """Note what this thread does by functions of Python's, called from the user's code and libraries that it calls."""
    thread, found = threading.get_ident(), dict[Effect, None]()

    def noting(original: Callable[..., Any], describe: Callable[..., str]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread and (line := _users_line(describe)):
                words = describe(*args, **kwargs)
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


def _users_line(describe: Callable[..., str]) -> str:
    """The line of the user's code that a call comes from; empty where torch, graphopt or an import makes it."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if any(part in file for part in _ON_THE_WAY) and describe in (_opened, _looked_at):
            return ""
        python = is_of_python(file) or file.startswith("<frozen ")
        if is_covered_file(file) and not python and file != _LOADS:
            return ""
        if not is_covered_file(file) and not any(part in file for part in LIBRARIES):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
