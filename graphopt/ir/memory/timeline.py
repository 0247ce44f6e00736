"""Bytes over the calls of a program: what ``Program.memory`` gives.

What a program takes of a device through its allocator: what ``Program.reserved`` gives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import fx

from graphopt.ir.context import Device
from graphopt.ir.node import info
from graphopt.ir.provided.methods import provided
from graphopt.ir.words.written_units import format_bytes

__all__ = ["LiveTensor", "MemoryTimeline", "ReservedMemory", "Storage"]


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
        there: which inputs are in memory now (``StepContext.there``).
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
            f"{format_bytes(self.resident_bytes)} persistent, {len(self.nodes)} ops>"
        )


@dataclass(frozen=True, slots=True)
class ReservedMemory:
    """A program's memory as a device's allocator lays it out. Peaks are the most bytes at once, over several runs.

    Attributes:
        device: the name of the device, or its type where no more is known of it.
        caching: whether its allocator keeps freed blocks; without, everything reserved is in use.
        requested_peak_bytes: what is asked for: tensors, temporaries and workspaces.
        allocated_peak_bytes: blocks in use.
        active_peak_bytes: blocks in use, or freed and waiting for another stream.
        reserved_peak_bytes: segments, in use or free: what other programs on the device cannot have.
        allocated_bytes: blocks in use when ``reserved_peak_bytes`` was first reached.
        inactive_split_bytes: bytes that were free then in segments with blocks in use.
        segments: how many segments there were then.
        workspaces: bytes that libraries keep out of the allocator's memory, those that the program uses.
        context_bytes: bytes of the driver and of libraries outside of the allocator.
        memory_bytes: bytes of the device; None where they are not known.
        timeline: of the program.
        position: the index of the call at which ``reserved_peak_bytes`` was first reached; -1 for before the first.
    """

    device: str
    caching: bool
    requested_peak_bytes: int
    allocated_peak_bytes: int
    active_peak_bytes: int
    reserved_peak_bytes: int
    allocated_bytes: int
    inactive_split_bytes: int
    segments: int
    workspaces: Mapping[str, int]
    context_bytes: int
    memory_bytes: int | None
    timeline: MemoryTimeline
    position: int

    @property
    def total_bytes(self) -> int:
        """What the program takes of the device: segments, and what is outside of the allocator."""
        return self.reserved_peak_bytes + self.context_bytes

    @property
    def unused_bytes(self) -> int:
        """Reserved bytes that were in no block in use when most was reserved."""
        return self.reserved_peak_bytes - self.allocated_bytes

    @property
    def fits(self) -> bool | None:
        """Whether the device has so much memory without giving cached segments back; None where that is not known."""
        return None if self.memory_bytes is None else self.total_bytes <= self.memory_bytes

    @property
    def peak_at(self) -> fx.Node | None:
        """The call at which most was reserved for the first time; None for before the first call."""
        return self.timeline.nodes[self.position] if self.position >= 0 else None

    @property
    def alive(self) -> list[LiveTensor]:
        """The tensors alive then, largest first; their bytes are those of the tensors, not of their blocks."""
        return self.timeline.alive_at(self.position) if self.timeline.nodes else []

    def __repr__(self) -> str:
        return (
            f"<ReservedMemory on {self.device}: {format_bytes(self.reserved_peak_bytes)} reserved, "
            f"{format_bytes(self.allocated_peak_bytes)} allocated at most, {self.segments} segments>"
        )
