"""What an allocator has given out and holds: now, at most, and when it has no memory for a request."""

from __future__ import annotations

from dataclasses import dataclass, field

from graphopt.errors import GraphoptError
from graphopt.ir.words.written_units import format_bytes

__all__ = ["AllocatorPeaks", "AllocatorTotals", "DeviceMemoryError"]


@dataclass(slots=True)
class AllocatorTotals:
    """What an allocator has given out, and what it holds, in bytes.

    Attributes:
        requested: what was asked for, of the blocks that are active.
        allocated: blocks that are in use.
        active: those, and blocks that are freed but wait for another stream that used them.
        reserved: what the device has given: all segments.
        inactive_split: free blocks whose segment holds blocks in use, so that it cannot be given back. Blocks of
            expandable segments, whose pages can, are not among them.
        segments: how many segments there are.
    """

    requested: int = 0
    allocated: int = 0
    active: int = 0
    reserved: int = 0
    inactive_split: int = 0
    segments: int = 0


@dataclass(frozen=True, slots=True)
class AllocatorPeaks:
    """The most bytes of each kind at once, and the state when most was reserved for the first time.

    Attributes:
        requested: as in ``AllocatorTotals``.
        allocated: likewise.
        active: likewise.
        reserved: likewise.
        at_reserved: all totals right behind the request with which ``reserved`` was reached.
        request: the number of that request, counted from 0; -1 where nothing was reserved.
    """

    requested: int = 0
    allocated: int = 0
    active: int = 0
    reserved: int = 0
    at_reserved: AllocatorTotals = field(default_factory=AllocatorTotals)
    request: int = -1


class DeviceMemoryError(GraphoptError):
    """A simulated allocator has no block for a request, and its device no memory for one.

    Args:
        wanted: bytes that were asked for.
        limit: bytes that the device has for this allocator.
        totals: what was given out and held when it failed, after all that can be given back was.
    """

    def __init__(self, wanted: int, limit: int, totals: AllocatorTotals) -> None:
        unused = totals.reserved - totals.active
        super().__init__(
            f"no memory for {format_bytes(wanted)} ({wanted} bytes): of {format_bytes(limit)}, "
            f"{format_bytes(totals.reserved)} are reserved, of which {format_bytes(totals.allocated)} are allocated "
            f"and {format_bytes(unused)} free, {format_bytes(totals.inactive_split)} of them in split segments, which "
            "cannot be given back\n  what to do: free tensors before, or let segments grow "
            "(PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True) where much is free in split ones"
        )
        self.wanted = wanted
        self.limit = limit
        self.totals = totals
