"""Timelines of programs that are as they were when they were looked at last.

Passes ask again and again for the timeline of one program, which takes as long as looking at every call. A graph does
not say that it was changed; but what it consists of is replaced, never written to: tuples of arguments, descriptions,
example values. So it is as it was where all of these are the same objects.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from operator import is_
from typing import Any

from graphopt.ir.memory.timeline import MemoryTimeline
from graphopt.ir.node import known_of, value_of
from graphopt.ir.program import Program

__all__ = ["known_timeline"]

_WAYS = 4
"""How many timelines of one program are kept."""


def known_timeline(program: Program, way: Hashable, make: Callable[[], MemoryTimeline]) -> MemoryTimeline:
    """The timeline of a program, made where it is not known.

    Args:
        program: whose last timelines are kept, one for each way.
        way: how it is made.
        make: makes it.
    """
    parts = _parts(program)
    known = program.timelines.get(way)
    if known is not None and len(known[0]) == len(parts) and all(map(is_, known[0], parts)):
        return known[1]  # type: ignore[no-any-return]
    found = make()
    if len(program.timelines) >= _WAYS:
        program.timelines.clear()
    program.timelines[way] = parts, found
    return found


def _parts(program: Program) -> list[Any]:
    """All that a timeline depends on, held so that nothing else can take the place of an object that is gone."""
    context = program.context
    parts: list[Any] = []
    for node in program.graph.nodes:
        parts += (node, node.target, node.args, node.kwargs, known_of(node), value_of(node))
    parts += program.inputs
    parts += program.outputs
    parts += program.pass_state.values()
    parts += (context.device, context.compiled, context.step.persistent, context.step.there)
    return parts
