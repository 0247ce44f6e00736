"""The peaks of a program whose loss is among its results, in loops that differentiate this loss and nothing else.

A program's timeline is that of any loop: gradients come in for all of its results, which the caller keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import fx

from graphopt.analysis.device_timelines import alive_bytes
from graphopt.ir.memory.timeline import MemoryTimeline, Storage
from graphopt.ir.node import Phase, info
from graphopt.ir.program import Program
from graphopt.ir.words.written_units import format_bytes

__all__ = ["of_loops", "other_tangents", "peaks_of_loops"]

_SCALAR = 16
"""Bytes up to which the tangent of a result is taken for that of a loss."""


def peaks_of_loops(program: Program, timeline: MemoryTimeline) -> dict[str, int]:
    """The bytes at the peak of loops that differentiate the loss that a model returns, and nothing else of its results.

    Args:
        program: of stage joint.
        timeline: of it.

    Returns:
        by how a loop is written, the largest first; empty where no loss is among the results, or nothing else is.
    """
    others = set(map(id, other_tangents(program, timeline)))
    if not others:
        return {}
    kept = {id(s): replace(s, bytes=0) if id(s) in others else s for s in timeline.storages}
    returned = {
        id(storage): storage
        for value, _ in program.outputs_of("output", "base")
        if isinstance(value, fx.Node)
        for storage in timeline.refers[value]
        if storage.bytes > _SCALAR and storage.owner.op != "placeholder"  # autograd keeps the loss
    }
    dropped = dict(kept)
    for storage, last in _last_uses(timeline, returned):
        dropped[id(storage)] = replace(storage, last=last)
    return {
        "out = model(...); out.loss.backward()": _peak(kept, timeline),
        "model(...).loss.backward()": _peak(dropped, timeline),
    }


def other_tangents(program: Program, timeline: MemoryTimeline) -> list[Storage]:
    """The gradients of results beside the loss that a program returns; empty where no loss is among the results."""
    tangents = [storage for node, _ in program.inputs_of("tangent") for storage in timeline.refers[node]]
    others = [storage for storage in tangents if storage.bytes > _SCALAR]
    return [] if len(others) == len(tangents) else others


def _last_uses(timeline: MemoryTimeline, wanted: Mapping[int, Storage]) -> Iterator[tuple[Storage, int]]:
    """Where storages die if no caller keeps them: behind their last use, and not before backward begins."""
    position = {node: index for index, node in enumerate(timeline.nodes)}
    backward = (index for index, node in enumerate(timeline.nodes) if info(node).phase is not Phase.FORWARD)
    last = dict.fromkeys(wanted, max(next(backward, 0) - 1, 0))
    for node, storages in timeline.refers.items():
        used = max((position[user] for user in node.users if user in position), default=position.get(node, -1))
        for storage in storages:
            if id(storage) in last:
                last[id(storage)] = max(last[id(storage)], used)
    yield from ((storage, last[key]) for key, storage in wanted.items())


def _peak(storages: Mapping[int, Storage], timeline: MemoryTimeline) -> int:
    return max(alive_bytes(list(storages.values()), timeline.temporaries)[0], default=timeline.resident_bytes)


def of_loops(timeline: MemoryTimeline) -> str:
    """What a peak counts beyond those of the usual loops, in words; empty where it is theirs."""
    lower = {how: size for how, size in timeline.loops.items() if size < timeline.peak_bytes}
    if not lower:
        return ""
    ways = ", ".join(f"{format_bytes(size)} in {how}" for how, size in lower.items())
    return f"counts gradients for all results, which are kept until backward ends; of the loss alone: {ways}"
