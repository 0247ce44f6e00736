"""Which line of the user's code something comes from."""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

import torch

__all__ = ["source_line", "user_frame"]

_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(__file__).parents[2])
_PYTHON = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))
_INSTALLED = re.compile(r"(site|dist)-packages[/\\](?P<library>\w+)")
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)\n(?:\s*(?P<code>.+))?')


def _foreign(file: str) -> bool:
    """Whether a file is neither of torch, with what it computes sizes with, nor of graphopt, nor of Python."""
    if file.startswith((_TORCH, _OWN, "<")):
        return False
    installed = _INSTALLED.search(file)
    return installed["library"] != "sympy" if installed else not file.startswith(_PYTHON)


def user_frame(trace: TracebackType | None = None, *, also: tuple[str, ...] = ()) -> str:
    """``file:line in function: code`` of the innermost frame outside torch and graphopt.

    Args:
        trace: of an exception; the caller's stack by default.
        also: parts of paths whose frames count although they are torch's.
    """
    frames = traceback.extract_tb(trace) if trace is not None else traceback.extract_stack()
    for frame in reversed(frames):
        if _foreign(frame.filename) or any(part in frame.filename for part in also):
            return f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
    return "an unknown line"


def source_line(stack_trace: str | None) -> str:
    """``file:line in function`` of a node's recorded stack: the innermost line that is not torch's own."""
    if not stack_trace:
        return ""
    frames = list(_FRAME.finditer(stack_trace))
    for frame in reversed(frames):
        if _foreign(frame["file"]):
            return f"{frame['file']}:{frame['line']} in {frame['function']}"
    return ""
