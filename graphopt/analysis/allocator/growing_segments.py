"""Expandable segments: memory is put behind a range of addresses page by page, and taken away where pages are free.

The rules are those of ``ExpandableSegment`` in torch's ``c10/cuda/CUDACachingAllocator.cpp``: memory is mapped at the
lowest address where a block fits, so that what is free grows together.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable

from graphopt.analysis.allocator.allocator_totals import AllocatorTotals
from graphopt.analysis.allocator.block_pool import Block, BlockPool, Segment

__all__ = ["GrowingSegments"]


class GrowingSegments:
    """The expandable segments of an allocator.

    Args:
        segments: of the allocator, by address.
        totals: of the allocator, in which it counts reserved bytes and segments.
        room: gives the bytes that the device has left; None for no limit.
        reserve: gives the first address of a new range of so many bytes.
        space: bytes of addresses of each segment.
    """

    def __init__(
        self,
        segments: dict[int, Segment],
        totals: AllocatorTotals,
        room: Callable[[], int | None],
        reserve: Callable[[int], int],
        space: int,
    ) -> None:
        self._segments = segments
        self._totals = totals
        self._room = room
        self._reserve = reserve
        self._space = space

    def allocate(self, pool: BlockPool, size: int, page: int) -> Block | None:
        """A free block of at least ``size`` bytes with memory behind it, taken out of its pool; None if there is none.

        Args:
            pool: that it belongs to.
            size: in bytes.
            page: bytes that are mapped at once.
        """
        candidate = self._candidate(pool, size, page)
        block = candidate if candidate.mapped else self._map(candidate, min(candidate.size, size))
        while block is not None and block.size < size:
            follows = block.after
            assert follows is not None
            block = self._map(follows, min(size - block.size, follows.size))
        if block is not None:
            pool.remove(block)
        return block

    def _candidate(self, pool: BlockPool, size: int, page: int) -> Block:
        """The lowest block, free or without memory, from which on there are ``size`` bytes of addresses."""
        for unmapped in pool.unmapped:
            before = unmapped.before
            block = before if before is not None and before.is_free else unmapped
            if _addresses(block, size) >= size:
                return block
        space = -(-max(self._space, size) // page) * page
        segment = Segment(pool, self._reserve(space), space, page)
        self._segments[segment.start] = segment
        block = segment.first
        block.mapped = False
        insort(pool.unmapped, block, key=_address)
        self._totals.segments += 1
        return block

    def _map(self, block: Block, size: int) -> Block | None:
        """Put memory behind the first ``size`` bytes of a block, in whole pages.

        Returns:
            the free block that they are then a part of; None where the device has not so much.
        """
        segment, pool = block.segment, block.pool
        mapped = -(-size // segment.page) * segment.page
        room = self._room()
        if room is not None and mapped > room:
            return None
        pool.unmapped.remove(block)
        if mapped < block.size:
            first = block.insert_before(mapped)
            insort(pool.unmapped, block, key=_address)
            block = first
        block.mapped = True
        self._totals.reserved += mapped
        pool.merge(block, block.before)
        pool.merge(block, block.after)
        pool.add(block)
        return block

    def unmap(self, block: Block, first: int = 0, last: int | None = None) -> int:
        """Take the memory of the whole pages of a free block away, or those between two addresses; how many bytes."""
        segment, pool = block.segment, block.pool
        page = segment.page
        start = max(block.address, first)
        end = block.address + block.size if last is None else min(block.address + block.size, last)
        start = -(-(start - segment.start) // page) * page + segment.start
        end = (end - segment.start) // page * page + segment.start
        if start >= end:
            return 0
        pool.remove(block)
        if start > block.address:
            pool.add(block.insert_before(start - block.address))
        if end < block.address + block.size:
            middle = block.insert_before(end - block.address)
            pool.add(block)
            block = middle
        block.mapped = False
        pool.merge(block, block.before)
        pool.merge(block, block.after)
        self._totals.reserved -= end - start
        if block.is_split:
            insort(pool.unmapped, block, key=_address)
        else:
            del self._segments[segment.start]
            self._totals.segments -= 1
        return end - start


def _address(block: Block) -> int:
    return block.address


def _addresses(block: Block | None, enough: int) -> int:
    """Bytes of addresses from a block on that nothing uses, counted up to ``enough``."""
    found = 0
    while block is not None and found < enough and block.is_free:
        found += block.size
        block = block.after
    return found
