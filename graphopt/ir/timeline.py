"""Bytes over the calls of a program: what ``Program.memory`` gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import fx

from graphopt.ir.context import Device
from graphopt.ir.methods import provided
from graphopt.ir.node import info
from graphopt.ir.written_units import format_bytes

__all__ = ["LiveTensor", "MemoryTimeline", "Storage"]


@dataclass(slots=True)
class Storage:
    """One allocation: who makes it, how big it is, and the positions (node indices) between which it lives.

    ``first`` is -1 for inputs; ``last`` is the index of the last node that uses it (the number of nodes for what
    outlives the program). ``device`` is where it is: ``cpu``, ``cuda:0``. ``of`` is the role and target of an input.
    """

    owner: fx.Node
    bytes: int
    category: str
    first: int
    last: int
    names: tuple[str, ...] = ()
    device: str = "cpu"
    of: tuple[str, str] | None = None

    @property
    def is_input(self) -> bool:
        """Whether it was there before the program ran."""
        return self.first < 0


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """Something alive at a moment: its best name, bytes, category and source line."""

    name: str
    bytes: int
    category: str
    source: str


@dataclass(slots=True)
class MemoryTimeline:
    """Bytes alive at every node of a program, on one device.

    That is the device of a program that is on one; where values are on several, the accelerator that takes most of
    them, and ``others`` has the timelines of the rest. Storages on other devices count no bytes here.

    Attributes:
        nodes: the calls, in order; the timeline has one entry for each.
        bytes: bytes alive while each call runs: its inputs, its results and its temporaries.
        resident_bytes: what is there before and after: parameters, buffers, optimizer state, the batch.
        storages: every allocation.
        temporaries: bytes that each call needs for itself while it runs.
        refers: the storages that the value of each node (inputs included) refers to.
        device: what is known of the device that a program without data is for; None for one that runs here.
        where: the device whose bytes these are: ``cpu``, ``cuda:0``.
        others: the timelines of other devices that values are on, by device.
        loops: where the loss is among the results of a program without it: the bytes at the peak of loops that
            differentiate this loss alone, by how they are written; ``bytes`` count gradients for all results.
        there: which inputs are in memory now (``Context.there``).
    """

    nodes: list[fx.Node]
    bytes: list[int]
    resident_bytes: int
    storages: list[Storage]
    temporaries: list[int]
    refers: dict[fx.Node, list[Storage]] = field(repr=False)
    device: Device | None = None
    where: str = "cpu"
    others: Mapping[str, MemoryTimeline] = field(default_factory=dict, repr=False)
    loops: Mapping[str, int] = field(default_factory=dict, repr=False)
    there: Callable[[str, str], bool] | None = field(default=None, repr=False)

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at once, parameters and everything else included."""
        return max(self.bytes, default=self.resident_bytes)

    @property
    def present_bytes(self) -> int:
        """What of the resident bytes is in memory now: without state and gradients that a run is yet to make."""
        later = (s for s in self.storages if s.is_input and s.of is not None and not self._is_there(*s.of))
        return self.resident_bytes - sum(storage.bytes for storage in later)

    def _is_there(self, role: str, target: str) -> bool:
        made = role in ("state", "pass_state", "gradient")
        return not made or (self.there is not None and self.there(role, target))

    @property
    def allocated_peak_bytes(self) -> int:
        """The most bytes that running the program adds to what is resident; what ``measure_peak`` measures."""
        return self.peak_bytes - self.resident_bytes

    @property
    def peak_at(self) -> fx.Node:
        """The call at which the peak is reached (the first, where there are several)."""
        return self.nodes[self.bytes.index(self.peak_bytes)]

    @property
    def alive(self) -> list[LiveTensor]:
        """What is alive at the peak, largest first."""
        return self.alive_at(self.bytes.index(self.peak_bytes))

    @property
    def categories(self) -> dict[str, int]:
        """Bytes alive at the peak by category."""
        return self.categories_at(self.bytes.index(self.peak_bytes))

    def alive_at(self, position: int) -> list[LiveTensor]:
        """What is alive while the call at ``position`` (an index into ``nodes``) runs, largest first."""
        found = [
            LiveTensor(s.names[0] if s.names else s.owner.name, s.bytes, s.category, info(s.owner).source)
            for s in self.storages
            if s.first <= position <= s.last and s.bytes
        ]
        if self.temporaries[position]:
            node = self.nodes[position]
            found.append(
                LiveTensor(f"{node.name} (inside the op)", self.temporaries[position], "temporaries", info(node).source)
            )
        return sorted(found, key=lambda item: -item.bytes)

    def categories_at(self, position: int) -> dict[str, int]:
        """Bytes by category while the call at ``position`` runs; they add up to ``bytes[position]``."""
        total: Counter[str] = Counter()
        for item in self.alive_at(position):
            total[item.category] += item.bytes
        return dict(total)

    def to_svg(self, *, before: MemoryTimeline | None = None, title: str = "") -> str:
        """Bytes over the calls by category as one self-contained SVG, with the peak marked.

        Args:
            before: of the program before passes, drawn over it as a line.
            title: what stands above the chart.
        """
        return str(provided(MemoryTimeline, "to_svg")(self, before=before, title=title))

    def _repr_html_(self) -> str:
        return str(provided(MemoryTimeline, "notebook")(self))

    def __repr__(self) -> str:
        where = info(self.peak_at).names or (self.peak_at.name,)
        return (
            f"<MemoryTimeline: peak {format_bytes(self.peak_bytes)} at {where[0]}, "
            f"{format_bytes(self.resident_bytes)} resident, {len(self.nodes)} calls>"
        )
