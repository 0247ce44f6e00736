"""The memory timeline of a program as columns: every allocation with its lifetime, and what calls need themselves."""

from __future__ import annotations

from typing import Any

from torch import fx

from graphopt.ir.memory.timeline import MemoryTimeline
from graphopt.ir.node import Phase, info
from graphopt.report.page.records import Strings

__all__ = ["CATEGORIES", "named_nodes", "timeline_json"]

CATEGORIES = (
    "parameters", "buffers", "optimizer state", "pass state", "inputs", "gradients", "activations", "recomputed",
    "backward", "in flight", "update", "temporaries",
)  # fmt: skip
"""The order of categories in the chart, from its bottom; others come on top of them."""


def timeline_json(
    timeline: MemoryTimeline, record: dict[fx.Node, int], strings: Strings, *, measured: int | None
) -> dict[str, Any]:
    """What the chart of one program needs; all sizes are bytes.

    Storages are columns ``name`` (a text), ``record`` (of the node that has this name), ``owner`` (the record of the
    node that allocates it), ``bytes``, ``category``, ``first`` and ``last`` (the ops between which it lives, both
    included; -1 is before the program). ``temporaries`` holds pairs of an op and the
    bytes that it needs while it runs, ``sections`` the first op and name of each part of the step.

    Args:
        timeline: of the program.
        record: the record of each of its nodes.
        strings: where texts go.
        measured: bytes that running it took above persistent memory, where that was measured.
    """
    storages = [storage for storage in timeline.storages if storage.bytes]
    named = named_nodes(timeline)
    found = dict.fromkeys([*CATEGORIES, *(storage.category for storage in storages)])
    category = {name: number for number, name in enumerate(found)}
    return {
        "categories": list(category),
        "calls": [record[node] for node in timeline.nodes],
        "peak_bytes": timeline.peak_bytes,
        "peak_at": timeline.bytes.index(timeline.peak_bytes) if timeline.nodes else -1,
        "resident_bytes": timeline.resident_bytes,
        "measured_bytes": measured,
        "temporaries": [[position, size] for position, size in enumerate(timeline.temporaries) if size],
        "sections": _sections(timeline),
        "storages": {
            "name": [strings(s.names[0] if s.names else s.owner.name) for s in storages],
            "record": [record[named.get(id(s), s.owner)] for s in storages],
            "owner": [record[s.owner] for s in storages],
            "bytes": [s.bytes for s in storages],
            "category": [category[s.category] for s in storages],
            "first": [s.first for s in storages],
            "last": [s.last for s in storages],
        },
    }


def named_nodes(timeline: MemoryTimeline) -> dict[int, fx.Node]:
    """For the ``id`` of each storage that is called by a tensor's name, the first node that has it.

    That is often another one than the owner: a view, or what an op wrote into the owner's memory.
    """
    found: dict[int, fx.Node] = {}
    for node, storages in timeline.refers.items():
        names = info(node).names
        for storage in storages if names else ():
            if storage.names and storage.names[0] in names:
                found.setdefault(id(storage), node)
    return found


def _sections(timeline: MemoryTimeline) -> list[list[Any]]:
    """Forward up to the first call of backward, backward up to the update behind it, the update."""
    phases = [info(node).phase for node in timeline.nodes]
    turn = phases.index(Phase.BACKWARD) if Phase.BACKWARD in phases else len(phases)
    late = (Phase.BACKWARD, Phase.RECOMPUTE)
    end = max((position + 1 for position, phase in enumerate(phases) if phase in late), default=turn)
    update = next((i for i in range(end, len(phases)) if phases[i] is Phase.UPDATE), len(phases))
    marks = [(0, "forward"), (turn, "backward"), (update, "update")]
    ends = [turn, update, len(phases)]
    return [[start, name] for (start, name), stop in zip(marks, ends, strict=True) if stop > start]
