"""First-fit allocation of byte ranges, for memory and for files alike."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Iterable

__all__ = ["ALIGNMENT", "FreeList", "aligned", "slab_bytes"]

ALIGNMENT = 64
"""Bytes to which every block starts aligned: a cache line, and the widest vector load."""


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to a multiple of ``ALIGNMENT``."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class FreeList:
    """The free ranges of ``[0, capacity)``, in order of offset; neighbours are merged when one is freed.

    Args:
        capacity: bytes there are; by default as many as anybody asks for.
    """

    def __init__(self, capacity: int = sys.maxsize) -> None:
        self.capacity = capacity
        self.used_bytes = 0
        self._free: list[tuple[int, int]] = [(0, capacity)] if capacity else []

    @property
    def extent(self) -> int:
        """The end of the last range in use: what an area that is cut off behind it must hold."""
        if not self._free or sum(self._free[-1]) < self.capacity:
            return self.capacity
        return self._free[-1][0]

    def allocate(self, nbytes: int) -> int | None:
        """The offset of the first free range of ``nbytes`` bytes (rounded up to ``ALIGNMENT``); None if there is none.

        Raises:
            ValueError: for a size that is not positive.
        """
        if nbytes <= 0:
            raise ValueError(f"a range of {nbytes} bytes cannot be allocated")
        size = aligned(nbytes)
        for index, (offset, space) in enumerate(self._free):
            if space >= size:
                rest = [(offset + size, space - size)] if space > size else []
                self._free[index : index + 1] = rest
                self.used_bytes += size
                return offset
        return None

    def free(self, offset: int, nbytes: int) -> None:
        """Give back what ``allocate(nbytes)`` returned.

        Raises:
            ValueError: where the range, or a part of it, is free already or lies outside.
        """
        size = aligned(nbytes)
        index = bisect_left(self._free, (offset, 0))
        before = self._free[index - 1] if index else (0, 0)
        after = self._free[index] if index < len(self._free) else (self.capacity, 0)
        if size <= 0 or sum(before) > offset or offset + size > after[0]:
            raise ValueError(f"the range of {nbytes} bytes at {offset} is not in use")
        start, stop, first, last = offset, offset + size, index, index
        if index and sum(before) == offset:
            start, first = before[0], index - 1
        if after[1] and after[0] == stop:
            stop, last = sum(after), index + 1
        self._free[first:last] = [(start, stop - start)]
        self.used_bytes -= size


def slab_bytes(blocks: Iterable[tuple[int, int, int]]) -> int:
    """Bytes of the smallest slab in which blocks fit that come and go in a known order; what ``reserve`` wants.

    Args:
        blocks: for each (bytes, the position where it is allocated, the position after which it is free). At equal
            positions, allocations come before releases; blocks allocated at one position keep their order.
    """
    events: list[tuple[int, int, int, int]] = []
    for index, (nbytes, start, end) in enumerate(blocks):
        if nbytes:
            events += [(start, 0, index, nbytes), (end, 1, index, nbytes)]
    area, places, most = FreeList(), dict[int, int](), 0
    for _, released, index, nbytes in sorted(events):
        if released:
            area.free(places.pop(index), nbytes)
        else:
            place = area.allocate(nbytes)
            assert place is not None
            places[index] = place
            most = max(most, area.extent)
    return most
