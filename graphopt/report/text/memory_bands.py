"""Bytes by category over the calls of a program: what the pictures of a memory timeline are drawn from."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from graphopt.ir.memory.timeline import MemoryTimeline
from graphopt.ir.node import Phase, info

__all__ = [
    "CATEGORY_STYLES",
    "HATCHES",
    "OTHER_STYLE",
    "Section",
    "bytes_by_category",
    "columns",
    "highest",
    "sections",
]

CATEGORY_STYLES = {
    "parameters": ("#6e7781", ""),
    "buffers": ("#8c959f", "cross"),
    "optimizer state": ("#afb8c1", "rise"),
    "pass state": ("#9467bd", "fall"),
    "inputs": ("#c8ced4", "dots"),
    "gradients": ("#d55e00", "rise"),
    "activations": ("#56b4e9", ""),
    "recomputed": ("#009e73", "dots"),
    "backward": ("#e69f00", "fall"),
    "in flight": ("#cc79a7", "flat"),
    "update": ("#0072b2", "upright"),
    "temporaries": ("#f0e442", "cross"),
}
"""Each category's color (after Okabe and Ito) and hatch, in the order in which they are stacked from the bottom."""

OTHER_STYLE = ("#7f7f7f", "cross")
"""Of a category that is not in ``CATEGORY_STYLES``; it is stacked on top."""

HATCHES = {
    "rise": "M-1,1 l2,-2 M0,6 l6,-6 M5,7 l2,-2",
    "fall": "M-1,5 l2,2 M0,0 l6,6 M5,-1 l2,2",
    "flat": "M0,3 h6",
    "upright": "M3,0 v6",
    "cross": "M0,0 l6,6 M0,6 l6,-6",
    "dots": "M2,3 h2",
}
"""The hatches as paths of SVG in a square of 6 pixels: they tell categories apart where there is no color."""


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the step: the calls ``start`` to ``end`` (not included)."""

    name: str
    start: int
    end: int

    @property
    def size(self) -> int:
        """How many calls."""
        return self.end - self.start


def sections(timeline: MemoryTimeline) -> list[Section]:
    """Forward up to its last call, backward up to its last call (with what is between), the update after that."""
    phases = [info(node).phase for node in timeline.nodes]
    number = len(phases)
    forward = max((i + 1 for i, phase in enumerate(phases) if phase is Phase.FORWARD), default=0)
    late = (Phase.BACKWARD, Phase.RECOMPUTE)
    backward = max((i + 1 for i, phase in enumerate(phases) if phase in late), default=forward)
    update = next((i for i in range(max(forward, backward), number) if phases[i] is Phase.UPDATE), number)
    found = [Section("forward", 0, forward), Section("backward", forward, update), Section("update", update, number)]
    return [section for section in found if section.size > 0]


def columns(section: Section, width: int) -> list[range]:
    """The calls of each of at most ``width`` columns, as even as they go."""
    count = min(section.size, width)
    edges = [section.start + section.size * column // count for column in range(count + 1)]
    return [range(start, end) for start, end in itertools.pairwise(edges)]


def highest(timeline: MemoryTimeline, column: range) -> int:
    """The call of a column at which the most bytes are alive (the first of them)."""
    return max(column, key=lambda position: timeline.bytes[position])


def bytes_by_category(timeline: MemoryTimeline) -> dict[str, list[int]]:
    """Bytes of each category at each call, in stacking order; at each call they add up to ``timeline.bytes``.

    Categories that never hold a byte are left out.
    """
    count = len(timeline.nodes)
    change: dict[str, np.ndarray] = {}
    for storage in timeline.storages:
        row = change.setdefault(storage.category, np.zeros(count + 1, dtype=np.int64))
        row[max(storage.first, 0)] += storage.bytes
        row[min(storage.last + 1, count)] -= storage.bytes
    found = {name: np.cumsum(row[:count]) for name, row in change.items()}
    if any(timeline.temporaries):
        own = np.array(timeline.temporaries, dtype=np.int64)
        found["temporaries"] = found["temporaries"] + own if "temporaries" in found else own
    known = [name for name in CATEGORY_STYLES if name in found]
    order = [*known, *(name for name in found if name not in CATEGORY_STYLES)]
    return {name: [int(size) for size in found[name]] for name in order if found[name].any()}
