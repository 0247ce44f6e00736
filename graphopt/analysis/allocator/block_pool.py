"""Blocks of an allocator, and the pools in which free ones wait: the smallest that fits is found first."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from graphopt.analysis.allocator.allocator_totals import AllocatorTotals
from graphopt.analysis.allocator.rules import AllocatorRules

__all__ = ["Block", "BlockPool", "Segment"]


class Segment:
    """What the device gave at once: one block, or several in a row after splits.

    Attributes:
        start: its first address.
        size: in bytes; of addresses, where it grows.
        page: bytes of memory that are put behind its addresses at once, where it grows (an expandable segment); 0 for
            a segment that has all its memory from the beginning.
        first: the block at its first address.
    """

    __slots__ = ("first", "page", "size", "start")

    def __init__(self, pool: BlockPool, start: int, size: int, page: int = 0) -> None:
        self.start = start
        self.size = size
        self.page = page
        self.first = Block(pool, self, start, size)

    @property
    def grows(self) -> bool:
        """Whether it is an expandable segment."""
        return self.page > 0

    @property
    def blocks(self) -> list[Block]:
        """Its blocks, by address."""
        found = []
        block: Block | None = self.first
        while block is not None:
            found.append(block)
            block = block.after
        return found


class Block:
    """A range of addresses of one segment, in use or free; ``before`` and ``after`` are its neighbours there.

    Attributes:
        address: of its first byte.
        size: in bytes.
        requested: bytes that were asked for, where it is in use.
        pool: where it waits while it is free.
        allocated: whether it is in use.
        mapped: whether memory is behind its addresses; only parts of growing segments can be without.
        segment: that it is a part of.
        users: other streams that used it.
        waiting: whether it is freed, and waits for those streams.
    """

    __slots__ = (
        "address",
        "after",
        "allocated",
        "before",
        "mapped",
        "pool",
        "requested",
        "segment",
        "size",
        "users",
        "waiting",
    )

    def __init__(self, pool: BlockPool, segment: Segment, address: int, size: int) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.requested = 0
        self.allocated = self.waiting = False
        self.mapped = True
        self.segment = segment
        self.users: set[int] = set()
        self.before: Block | None = None
        self.after: Block | None = None

    @property
    def is_split(self) -> bool:
        """Whether its segment has other blocks."""
        return self.before is not None or self.after is not None

    @property
    def is_free(self) -> bool:
        """Whether it is in nobody's use."""
        return not (self.allocated or self.waiting)

    @property
    def growable(self) -> int:
        """Its bytes, with those of the addresses behind it that have no memory yet."""
        follows = self.after
        return self.size + (follows.size if follows is not None and not follows.mapped else 0)

    def insert_before(self, size: int) -> Block:
        """Cut the first ``size`` bytes off into a block of their own, which is returned; this one keeps the rest."""
        first = Block(self.pool, self.segment, self.address, size)
        first.before, first.after = self.before, self
        if self.before is None:
            self.segment.first = first
        else:
            self.before.after = first
        self.before = first
        self.address += size
        self.size -= size
        return first

    def __repr__(self) -> str:
        state = "in use" if self.allocated else "waiting" if self.waiting else "free" if self.mapped else "unmapped"
        return f"<Block: {self.size} bytes at {self.address:#x}, {state}>"


class BlockPool:
    """The free blocks of one size class and stream.

    Args:
        small: whether it is the pool of small blocks.
        stream: whose blocks they are.
        totals: of the allocator, in which it counts inactive split bytes.
    """

    def __init__(self, small: bool, stream: int, totals: AllocatorTotals) -> None:
        self.small = small
        self.stream = stream
        self.unmapped: list[Block] = []
        self._totals = totals
        self._order: list[tuple[int, int]] = []
        self._by_address: dict[int, Block] = {}

    def __iter__(self) -> Iterator[Block]:
        """The free blocks, from the smallest; the pool may change meanwhile."""
        return iter([self._by_address[address] for _, address in self._order])

    def __contains__(self, block: Block) -> bool:
        return self._by_address.get(block.address) is block

    def add(self, block: Block) -> None:
        """Let a block wait here."""
        insort(self._order, (block.size, block.address))
        self._by_address[block.address] = block
        if not block.segment.page and block.is_split:
            self._totals.inactive_split += block.size

    def remove(self, block: Block) -> None:
        """Take a block out."""
        del self._order[bisect_left(self._order, (block.size, block.address))]
        del self._by_address[block.address]
        if not block.segment.page and block.is_split:
            self._totals.inactive_split -= block.size

    def find(self, size: int, rules: AllocatorRules) -> Block | None:
        """The block that serves ``size`` bytes best: the smallest that is large enough, of several the lowest address.

        A block that can grow counts with what it can grow to. Without ``max_split_size``, every block serves every
        request that fits; with it, blocks that may not be split serve only requests of about their size.
        """
        order, place = self._order, bisect_left(self._order, (size, 0))
        if place == len(order):
            return None
        block = self._by_address[order[place][1]]
        while block.segment.page and place + 1 < len(order):
            larger = self._by_address[order[place + 1][1]]
            if larger.growable >= block.growable:
                break
            block, place = larger, place + 1
        if rules.max_split_size:
            oversize = rules.is_oversize(size)
            if not oversize and rules.is_oversize(block.size):
                return None
            if oversize and block.size >= size + rules.large_segment:
                return None
        return block

    def merge(self, block: Block, neighbour: Block | None) -> None:
        """Let a block that is in no pool take in a neighbour that is free, where there is one."""
        if neighbour is None or not neighbour.is_free or neighbour.mapped is not block.mapped:
            return
        if neighbour.mapped:
            self.remove(neighbour)
        else:
            self.unmapped.remove(neighbour)
        if neighbour is block.before:
            block.address = neighbour.address
            block.before = neighbour.before
            if block.before is None:
                block.segment.first = block
            else:
                block.before.after = block
        else:
            block.after = neighbour.after
            if block.after is not None:
                block.after.before = block
        block.size += neighbour.size
