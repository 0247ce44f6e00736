"""Segments with blocks in use that were there before: where a simulated allocator goes on from."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from itertools import pairwise

from graphopt.analysis.allocator.block_pool import Block, BlockPool, Segment
from graphopt.errors import GraphoptError

__all__ = ["adopted_segment"]

Used = tuple[int, int, int, bool]
"""A block in use: its address and size, the bytes that were asked for, and whether it is freed and waits."""


def adopted_segment(
    pool: BlockPool, memory: Sequence[tuple[int, int]], used: Sequence[Used], *, page: int, space: int
) -> Segment:
    """A segment with blocks in use, and free ones between them, which wait in its pool.

    Args:
        pool: that it belongs to.
        memory: the address and size of each part with memory behind it, in order; one part unless it grows.
        used: the blocks in use, in order.
        page: bytes that are mapped at once, where it grows; 0 where it does not.
        space: bytes of addresses that it then has at least.

    Raises:
        GraphoptError: for blocks that overlap each other, or lie where no memory is.
    """
    start, end = memory[0][0], memory[-1][0] + memory[-1][1]
    size = -(-max(space, end - start) // page) * page if page else end - start
    segment = Segment(pool, start, size, page)
    holes = [(one + length, other - one - length) for (one, length), (other, _) in pairwise(memory)]
    holes += [(end, start + size - end)] if start + size > end else []
    pieces: list[tuple[int, int, Used | None]] = [(address, length, None) for address, length in holes if length]
    pieces += [(block[0], block[1], block) for block in used]
    for block, given in _carved(segment, sorted(pieces, key=lambda piece: piece[0])):
        if given is None:
            block.mapped = False
            insort(pool.unmapped, block, key=lambda other: other.address)
        else:
            block.requested, block.waiting, block.allocated = given[2], given[3], not given[3]
    for block in segment.blocks:
        if block.is_free and block.mapped:
            pool.add(block)
    return segment


def _carved(segment: Segment, pieces: Sequence[tuple[int, int, Used | None]]) -> list[tuple[Block, Used | None]]:
    """The block of each piece; what is between them are blocks by themselves."""
    rest: Block | None = segment.first
    found = []
    for address, size, given in pieces:
        if rest is None or address < rest.address or address + size > rest.address + rest.size or not size:
            raise GraphoptError(f"a block of {size} bytes at {address:#x} overlaps another one, or lies outside")
        if address > rest.address:
            rest.insert_before(address - rest.address)
        if size < rest.size:
            found.append((rest.insert_before(size), given))
        else:
            found.append((rest, given))
            rest = None
    return found
