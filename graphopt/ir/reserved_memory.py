"""What a program takes of a device through its allocator: what ``Program.reserved`` gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from graphopt.ir.timeline import LiveTensor, MemoryTimeline
from graphopt.ir.written_units import format_bytes

__all__ = ["ReservedMemory"]


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
