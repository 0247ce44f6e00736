"""torch's caching allocator as plain data: which blocks it gives out, and what it asks the device for.

The rules are those of torch's ``c10/cuda/CUDACachingAllocator.cpp``: requests are rounded up; small and large blocks,
and those of each stream, come from pools of their own; the smallest free block that fits is taken, and split where
enough remains; a freed block is merged with free neighbours; where the device has no memory left, cached segments are
given back before the request fails. Nothing is allocated here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from graphopt.analysis.allocator.adopted_segments import Used, adopted_segment
from graphopt.analysis.allocator.allocator_totals import AllocatorPeaks, AllocatorTotals, DeviceMemoryError
from graphopt.analysis.allocator.block_pool import Block, BlockPool, Segment
from graphopt.analysis.allocator.growing_segments import GrowingSegments
from graphopt.analysis.allocator.rules import CACHING, AllocatorRules
from graphopt.errors import GraphoptError, check_type, whole_number

__all__ = ["CachingAllocator"]

_ADDRESS_SPACE = 2**40
"""Bytes of addresses of a growing segment where the device's memory is not known; no device has so much."""

_FIRST_ADDRESS = 2**44
"""Where the addresses of segments begin."""


class CachingAllocator:
    """An allocator that works by ``rules``, on a device with ``limit`` bytes.

    Args:
        rules: sizes of blocks and segments.
        limit: bytes that it may reserve; None for as many as it asks for.
        addresses: gives the first address of a new segment of so many bytes; by default each is above those before.

    Raises:
        ArgumentError: for a limit that is no number of bytes.

    Example:
        >>> from graphopt.analysis.allocator import CachingAllocator
        >>> allocator = CachingAllocator()
        >>> block = allocator.allocate(3_000_000)
        >>> block.size, allocator.totals.reserved
        (3000320, 20971520)
        >>> allocator.free(block)
        >>> allocator.totals.allocated, allocator.totals.reserved
        (0, 20971520)
    """

    def __init__(
        self,
        rules: AllocatorRules = CACHING,
        *,
        limit: int | None = None,
        addresses: Callable[[int], int] | None = None,
    ) -> None:
        check_type("CachingAllocator's rules", rules, AllocatorRules, "AllocatorRules")
        self.rules = rules
        self.limit = None if limit is None else whole_number("CachingAllocator's limit", limit, of="bytes")
        self._totals = AllocatorTotals()
        self._peaks = AllocatorPeaks()
        self._pools: dict[tuple[bool, int, Hashable], BlockPool] = {}
        self._waiting: dict[Block, None] = {}
        self._segments: dict[int, Segment] = {}
        self._next_address = _FIRST_ADDRESS
        self._addresses = addresses or self._above
        self._requests = 0
        self._space = _ADDRESS_SPACE if self.limit is None else self.limit + self.limit // 8
        self._growing = GrowingSegments(self._segments, self._totals, self._room, self._addresses, self._space)

    # --- what is there -----------------------------------------------------------------------------------------------

    @property
    def totals(self) -> AllocatorTotals:
        """What is given out and held now."""
        return replace(self._totals)

    @property
    def peaks(self) -> AllocatorPeaks:
        """The most bytes at once since the allocator was made, or since ``reset_peaks``."""
        return self._peaks

    @property
    def requests(self) -> int:
        """How many requests there were."""
        return self._requests

    def reset_peaks(self) -> None:
        """Begin with peaks from what is given out and held now."""
        self._peaks = AllocatorPeaks()
        self._record()

    def segments(self) -> list[Segment]:
        """What the device has given, by address."""
        return [segment for _, segment in sorted(self._segments.items())]

    def adopt(
        self,
        memory: Sequence[tuple[int, int]],
        used: Sequence[Used],
        *,
        small: bool,
        stream: int = 0,
        pool: Hashable = None,
        grows: bool = False,
    ) -> dict[int, Block]:
        """Go on from a segment that was there before.

        Args:
            memory: the address and size of each part with memory behind it, in order; one part unless it grows.
            used: address, size, requested bytes of each block in use, in order, and whether it waits to be freed.
            small: whether it holds small blocks.
            stream: whose blocks they are.
            pool: the private pool that it belongs to.
            grows: whether it is an expandable segment.

        Returns:
            the blocks in use, by address.

        Raises:
            GraphoptError: for blocks that overlap each other, or lie where no memory is.
        """
        page = (self.rules.small_segment if small else self.rules.large_segment) if grows else 0
        segment = adopted_segment(self._pool(small, stream, pool), memory, used, page=page, space=self._space)
        self._segments[segment.start] = segment
        found = {block.address: block for block in segment.blocks if not block.is_free}
        totals = self._totals
        totals.segments += 1
        totals.reserved += sum(size for _, size in memory)
        totals.requested += sum(block.requested for block in found.values())
        totals.active += sum(block.size for block in found.values())
        totals.allocated += sum(block.size for block in found.values() if block.allocated)
        self._waiting |= dict.fromkeys(block for block in found.values() if block.waiting)
        self._record()
        return found

    # --- requests ----------------------------------------------------------------------------------------------------

    def allocate(self, requested: int, *, stream: int = 0, pool: Hashable = None) -> Block:
        """A block for a request.

        Args:
            requested: bytes, 0 at least; torch asks for nothing where a tensor is empty.
            stream: the stream that it is first used on.
            pool: a private pool that it belongs to, as those of CUDA graphs; None for the common one.

        Raises:
            ArgumentError: for what is no number of bytes.
            DeviceMemoryError: where the limit leaves no room for it.
        """
        if type(requested) is not int or requested < 0:
            requested = whole_number("allocate's requested", requested, of="bytes")
        rules = self.rules
        size = rules.block_bytes(requested)
        shelf = self._pool(rules.is_small(size), stream, pool)
        self._requests += 1
        block = shelf.find(size, rules)
        if block is not None:
            shelf.remove(block)
        else:
            block = self._new(shelf, size, requested)
        remainder = block.size - size
        if remainder and rules.splits(size, remainder, small=shelf.small):
            first = block.insert_before(size)
            shelf.add(block)
            block = first
        block.allocated = True
        block.requested = requested
        totals = self._totals
        totals.requested += requested
        totals.allocated += block.size
        totals.active += block.size
        self._record()
        return block

    def record_stream(self, block: Block, stream: int) -> None:
        """Note that another stream uses a block: freed, it waits until ``synchronize`` says that this stream is done.

        Raises:
            GraphoptError: for a block that is not in use.
        """
        _check_in_use(block)
        if stream != block.pool.stream:
            block.users.add(stream)

    def free(self, block: Block) -> None:
        """Give a block back; where other streams used it, it waits for them.

        Raises:
            GraphoptError: for a block that is not in use.
        """
        self.request_free(block)
        if not block.users:
            self.complete_free(block)

    def request_free(self, block: Block) -> None:
        """Give a block back that waits until ``complete_free``.

        Raises:
            GraphoptError: for a block that is not in use.
        """
        _check_in_use(block)
        block.allocated, block.waiting = False, True
        self._waiting[block] = None
        self._totals.allocated -= block.size

    def complete_free(self, block: Block) -> None:
        """Let a block that waits be free.

        Raises:
            GraphoptError: for a block that was not given back.
        """
        if not block.waiting:
            raise GraphoptError(f"{block!r} does not wait to be freed: request_free comes before complete_free")
        del self._waiting[block]
        block.waiting = False
        block.users.clear()
        totals, pool = self._totals, block.pool
        totals.active -= block.size
        totals.requested -= block.requested
        pool.merge(block, block.before)
        pool.merge(block, block.after)
        pool.add(block)
        if not self.rules.caching:
            self.release(block)

    def synchronize(self, stream: int | None = None) -> None:
        """Let the blocks be free that wait for a stream, or for any."""
        for block in list(self._waiting):
            block.users.discard(stream if stream is not None else -1)
            if stream is None or not block.users:
                self.complete_free(block)

    def release_cached(self) -> int:
        """Give every segment and page without a block in use back to the device (``torch.cuda.empty_cache``).

        Returns:
            how many bytes that were.
        """
        self.synchronize()
        before = self._totals.reserved
        for pool in list(self._pools.values()):
            for block in pool:
                if block.segment.grows or not block.is_split:
                    self.release(block)
        return before - self._totals.reserved

    def release(self, block: Block, address: int = 0, size: int | None = None) -> int:
        """Give a free block back to the device: a whole segment, or the whole pages of a growing one.

        Args:
            block: that is free.
            address: from which on pages are given back, where it is a part of a growing segment.
            size: of how many bytes; None for all.

        Returns:
            how many bytes that were.

        Raises:
            GraphoptError: for a block that is not free, and for a part of a segment that does not grow.
        """
        if block not in block.pool:
            raise GraphoptError(f"{block!r} is not free, and cannot be given back to the device")
        if block.segment.grows:
            return self._growing.unmap(block, address, None if size is None else address + size)
        if block.is_split:
            raise GraphoptError(f"{block!r} is a part of a segment, and cannot be given back to the device by itself")
        block.pool.remove(block)
        del self._segments[block.segment.start]
        self._totals.reserved -= block.size
        self._totals.segments -= 1
        return block.size

    # --- the device --------------------------------------------------------------------------------------------------

    def _new(self, pool: BlockPool, size: int, requested: int) -> Block:
        """A new block, for which cached ones are given back where the device has no memory."""
        block = self._from_device(pool, size)
        if block is None and self._release_oversize(pool, size):
            block = self._from_device(pool, size)
        if block is None:
            self.release_cached()
            block = self._from_device(pool, size)
        if block is None:
            assert self.limit is not None
            raise DeviceMemoryError(requested, self.limit, self.totals)
        return block

    def _from_device(self, pool: BlockPool, size: int) -> Block | None:
        """A new block that is in no pool; None where the device has no memory for it."""
        rules = self.rules
        if rules.expandable_segments and rules.caching:
            page = rules.small_segment if pool.small else rules.large_segment
            return self._growing.allocate(pool, size, page)
        wanted = rules.segment_bytes(size)
        room = self._room()
        if room is not None and wanted > room:
            return None
        segment = Segment(pool, self._addresses(wanted), wanted)
        self._segments[segment.start] = segment
        self._totals.reserved += wanted
        self._totals.segments += 1
        return segment.first

    def _release_oversize(self, pool: BlockPool, size: int) -> bool:
        """Give back just enough of the blocks that may not be split; whether that is enough for ``size`` bytes."""
        most = self.rules.max_split_size
        if not most:
            return False
        wanted = max(size, most)
        found = [block for block in pool if block.size >= most and not block.is_split and not block.segment.grows]
        larger = [block for block in found if block.size >= wanted]
        if larger:
            self.release(larger[0])
            return True
        released = 0
        for block in reversed(found):
            if released >= wanted:
                break
            released += self.release(block)
        return released >= wanted

    def _room(self) -> int | None:
        return None if self.limit is None else self.limit - self._totals.reserved

    def _above(self, size: int) -> int:
        """An address above those of all segments so far."""
        address = self._next_address
        self._next_address += -(-size // 2**21) * 2**21
        return address

    def _pool(self, small: bool, stream: int, private: Hashable) -> BlockPool:
        key = (small, stream, private)
        found = self._pools.get(key)
        if found is None:
            found = self._pools[key] = BlockPool(small, stream, self._totals)
        return found

    def _record(self) -> None:
        totals, peaks = self._totals, self._peaks
        if totals.reserved > peaks.reserved:
            self._peaks = peaks = replace(
                peaks, reserved=totals.reserved, at_reserved=replace(totals), request=self._requests - 1
            )
        if totals.requested > peaks.requested or totals.active > peaks.active or totals.allocated > peaks.allocated:
            self._peaks = replace(
                peaks,
                requested=max(peaks.requested, totals.requested),
                allocated=max(peaks.allocated, totals.allocated),
                active=max(peaks.active, totals.active),
            )


def _check_in_use(block: Block) -> None:
    if not block.allocated:
        raise GraphoptError(f"{block!r} is not in use: it was freed before, or never given out")
