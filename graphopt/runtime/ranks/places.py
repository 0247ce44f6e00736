"""Where in a program a thread is: which phase, which call, and whether it waits there for other ranks."""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType

from torch import fx

from graphopt.ir.node import Phase, info
from graphopt.ir.ops import schema

__all__ = ["Place", "follow", "place_now", "place_of", "reached"]

_ASSIGNED = re.compile(r"\s*(\w+)\s*[:=]")

_lines: weakref.WeakKeyDictionary[CodeType, dict[int, Place]] = weakref.WeakKeyDictionary()
"""For the generated code of each module that is followed: its calls by their lines."""


@dataclass(frozen=True, slots=True)
class Place:
    """A call of a program.

    Attributes:
        phase: when in a step it runs; ``exchange`` for what belongs to an exchange between ranks.
        call: the op, and whose it is.
        exchanges: whether the call itself talks to other ranks, so that it can wait for them.
    """

    phase: str
    call: str
    exchanges: bool

    def __str__(self) -> str:
        return f"{self.phase}: {self.call}"


def follow(module: fx.GraphModule) -> None:
    """From now on tell the places in the generated code of a module; costs nothing while it runs.

    Args:
        module: of a program, or of a part of one; compiled as it is (a compiler's own code is not followed).
    """
    _lines[type(module).forward.__code__] = {number: _place(node) for number, node in _calls_by_line(module).items()}


def _calls_by_line(module: fx.GraphModule) -> dict[int, fx.Node]:
    """The calls of a module by the lines of its generated code."""
    nodes = {node.name: node for node in module.graph.nodes if node.op == "call_function"}
    found = {}
    for number, line in enumerate(module.code.splitlines(), start=1):
        assigned = _ASSIGNED.match(line)
        node = nodes.get(assigned[1]) if assigned else None
        if node is not None:
            found[number] = node
    return found


def reached(error: BaseException, module: fx.GraphModule, wanted: Phase | Callable[[fx.Node], bool]) -> bool | None:
    """Whether a module's generated code had come to a certain call when it raised an error, or was interrupted.

    Args:
        error: as it was caught.
        module: that ran.
        wanted: whether a call is one of these; a phase stands for its calls.

    Returns:
        None where the error is from elsewhere.
    """
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is type(module).forward.__code__:
            line = trace.tb_lineno
        trace = trace.tb_next
    if line is None:
        return None
    is_wanted = wanted if callable(wanted) else lambda node: info(node).phase is wanted
    return any(number <= line and is_wanted(node) for number, node in _calls_by_line(module).items())


def _place(node: fx.Node) -> Place:
    known = info(node)
    phase = "exchange" if known.phase is Phase.SYNC else known.phase.value
    if not schema.is_collective(node):
        return Place(phase, schema.op_name(node) + (f" of {known.module}" if known.module else ""), False)
    started = node.args[0] if schema.hands_on(node) and isinstance(node.args[0], fx.Node) else node
    origin = info(started).origin if started.op == "call_function" else known.origin
    return Place(phase, f"{schema.op_name(node)} ({origin})", True)


def place_now() -> Place | None:
    """Where this process is, whichever of its threads runs a program; None where none runs one that is followed."""
    for frame in sys._current_frames().values():
        outer: FrameType | None = frame
        while outer is not None:
            lines: Mapping[int, Place] | None = _lines.get(outer.f_code)
            if lines is not None:
                return lines.get(outer.f_lineno)
            outer = outer.f_back
    return None


def place_of(error: BaseException) -> Place | None:
    """The call of a program that raised an error; None for one from elsewhere."""
    found = None
    trace = error.__traceback__
    while trace is not None:
        lines = _lines.get(trace.tb_frame.f_code)
        if lines is not None:
            found = lines.get(trace.tb_lineno, found)
        trace = trace.tb_next
    return found
