"""Each rule of torch's allocator by a case whose result follows from it, and what holds after any requests."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphopt.analysis.allocator import PLAIN, AllocatorRules, Block, CachingAllocator, DeviceMemoryError
from graphopt.errors import ArgumentError, GraphoptError

MIB = 2**20


def free_sizes(allocator: CachingAllocator) -> list[int]:
    """The free blocks, by address."""
    return [b.size for s in allocator.segments() for b in s.blocks if b.is_free and b.mapped]


# --- serving requests ------------------------------------------------------------------------------------------------


def test_small_requests_share_a_segment() -> None:
    allocator = CachingAllocator()
    first, second = allocator.allocate(1000), allocator.allocate(MIB)
    assert (first.size, second.size) == (1024, MIB)
    assert second.address == first.address + 1024
    assert allocator.totals.reserved == 2 * MIB
    assert allocator.totals.inactive_split == MIB - 1024
    third = allocator.allocate(MIB - 512)  # of the segment, only 1 MiB - 1024 bytes are left
    assert third.segment is not first.segment
    assert allocator.totals.segments == 2


def test_small_and_large_requests_have_pools_of_their_own() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(30 * MIB))
    allocator.allocate(1000)
    assert allocator.totals.reserved == 32 * MIB


def test_the_smallest_free_block_that_fits_is_taken() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size * MIB) for size in (40, 12, 20)]
    addresses = [block.address for block in blocks]
    for block in blocks:
        allocator.free(block)
    assert allocator.allocate(11 * MIB).address == addresses[1]
    assert allocator.allocate(11 * MIB).address == addresses[2]
    assert allocator.totals.reserved == 72 * MIB


def test_of_blocks_of_one_size_the_lowest_address_is_taken() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(12 * MIB) for _ in range(3)]
    for block in reversed(blocks):
        allocator.free(block)
    assert [allocator.allocate(12 * MIB).address for _ in blocks] == [block.address for block in blocks]


def test_a_large_block_keeps_a_remainder_up_to_one_mebibyte() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(20 * MIB))
    whole = allocator.allocate(19 * MIB)
    assert (whole.size, whole.requested) == (20 * MIB, 19 * MIB)
    assert allocator.totals.allocated == 20 * MIB
    assert allocator.totals.inactive_split == 0
    allocator.free(whole)
    assert allocator.allocate(19 * MIB - 512).size == 19 * MIB - 512
    assert free_sizes(allocator) == [MIB + 512]


def test_freed_blocks_merge_with_free_neighbours() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(2 * MIB) for _ in range(10)]
    assert free_sizes(allocator) == []
    for number in (3, 5):
        allocator.free(blocks[number])
    assert free_sizes(allocator) == [2 * MIB, 2 * MIB]
    assert allocator.totals.inactive_split == 4 * MIB
    allocator.free(blocks[4])
    assert free_sizes(allocator) == [6 * MIB]
    for number in (0, 1, 2, 6, 7, 8, 9):
        allocator.free(blocks[number])
    assert free_sizes(allocator) == [20 * MIB]
    assert allocator.totals.inactive_split == 0  # the segment is whole again, and could be given back


def test_streams_do_not_share_blocks() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(12 * MIB, stream=0))
    allocator.allocate(12 * MIB, stream=1)
    assert allocator.totals.reserved == 24 * MIB
    allocator.allocate(12 * MIB, stream=0)
    assert allocator.totals.reserved == 24 * MIB


def test_private_pools_do_not_share_blocks() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(12 * MIB))
    allocator.allocate(12 * MIB, pool=(0, 1))
    assert allocator.totals.reserved == 24 * MIB


def test_a_block_that_another_stream_used_waits_for_it() -> None:
    allocator = CachingAllocator()
    block = allocator.allocate(12 * MIB)
    allocator.record_stream(block, 0)  # its own stream needs no waiting
    allocator.record_stream(block, 7)
    allocator.record_stream(block, 8)
    allocator.free(block)
    assert (allocator.totals.allocated, allocator.totals.active) == (0, 12 * MIB)
    assert allocator.allocate(12 * MIB).address != block.address
    allocator.synchronize(7)
    assert allocator.totals.active == 24 * MIB
    allocator.synchronize(8)
    assert allocator.totals.active == 12 * MIB
    assert allocator.allocate(12 * MIB).address == block.address


def test_a_plain_heap_gives_everything_back() -> None:
    allocator = CachingAllocator(PLAIN)
    block = allocator.allocate(12345)
    assert allocator.totals.reserved == allocator.totals.requested == 12345
    allocator.free(block)
    assert allocator.totals.reserved == 0
    assert allocator.peaks.reserved == 12345


# --- a device with little memory -------------------------------------------------------------------------------------


def test_cached_segments_are_given_back_before_a_request_fails() -> None:
    allocator = CachingAllocator(limit=50 * MIB)
    kept = allocator.allocate(12 * MIB)
    allocator.free(allocator.allocate(20 * MIB))
    large = allocator.allocate(36 * MIB)
    assert allocator.totals.reserved == 48 * MIB
    allocator.free(kept)
    allocator.free(large)
    assert allocator.release_cached() == 48 * MIB
    assert allocator.totals.segments == 0


def test_waiting_blocks_are_waited_for_before_a_request_fails() -> None:
    allocator = CachingAllocator(limit=30 * MIB)
    block = allocator.allocate(20 * MIB)
    allocator.record_stream(block, 3)
    allocator.free(block)
    assert allocator.allocate(30 * MIB).size == 30 * MIB


def test_split_segments_cannot_be_given_back() -> None:
    allocator = CachingAllocator(limit=30 * MIB)
    blocks = [allocator.allocate(2 * MIB) for _ in range(10)]
    for block in blocks[1:]:
        allocator.free(block)
    with pytest.raises(DeviceMemoryError, match=r"no memory for 19.9 MB .*18.9 MB of them in split segments") as caught:
        allocator.allocate(19 * MIB)
    totals = caught.value.totals
    assert (totals.reserved, totals.allocated, totals.inactive_split) == (20 * MIB, 2 * MIB, 18 * MIB)
    assert caught.value.limit == 30 * MIB
    allocator.free(blocks[0])
    assert allocator.allocate(19 * MIB).size == 20 * MIB


def test_large_blocks_are_not_split_beyond_a_size() -> None:
    allocator = CachingAllocator(AllocatorRules(max_split_size=100 * MIB))
    large = allocator.allocate(150 * MIB)
    allocator.free(large)
    assert allocator.allocate(50 * MIB).segment is not large.segment  # a small request does not take a whole large one
    assert allocator.allocate(129 * MIB).segment is not large.segment  # 20 MiB less or more are too far away
    again = allocator.allocate(131 * MIB)
    assert (again.address, again.size) == (large.address, 150 * MIB)


def test_of_large_blocks_just_enough_are_given_back() -> None:
    allocator = CachingAllocator(AllocatorRules(max_split_size=100 * MIB), limit=400 * MIB)
    for block in [allocator.allocate(size * MIB) for size in (110, 130, 20)]:
        allocator.free(block)
    allocator.allocate(200 * MIB)
    assert sorted(s.size // MIB for s in allocator.segments()) == [20, 200]
    allocator = CachingAllocator(AllocatorRules(max_split_size=100 * MIB), limit=400 * MIB)
    for block in [allocator.allocate(size * MIB) for size in (180, 150, 20)]:
        allocator.free(block)
    allocator.allocate(120 * MIB)
    assert sorted(s.size // MIB for s in allocator.segments()) == [20, 120, 180]


# --- expandable segments ---------------------------------------------------------------------------------------------


def test_a_growing_segment_takes_pages_as_it_needs_them() -> None:
    allocator = CachingAllocator(AllocatorRules(expandable_segments=True))
    first = allocator.allocate(15 * MIB)
    assert allocator.totals.reserved == 20 * MIB
    second = allocator.allocate(15 * MIB)
    assert second.address == first.address + 15 * MIB  # the rest of the first page is used
    assert allocator.totals.reserved == 40 * MIB
    small = allocator.allocate(100)
    assert allocator.totals.reserved == 42 * MIB
    assert small.segment is not first.segment
    assert allocator.totals.segments == 2
    assert allocator.totals.inactive_split == 0  # its free pages can be given back


def test_a_growing_segment_has_no_holes_that_larger_requests_do_not_fit_into() -> None:
    growing, plain = CachingAllocator(AllocatorRules(expandable_segments=True)), CachingAllocator()
    for allocator in (growing, plain):
        for size in range(30, 100, 10):
            allocator.free(allocator.allocate(size * MIB))
    assert growing.totals.reserved == 100 * MIB
    assert plain.totals.reserved == sum(range(30, 100, 10)) * MIB


def test_free_pages_of_a_growing_segment_are_given_back_and_taken_again() -> None:
    allocator = CachingAllocator(AllocatorRules(expandable_segments=True), limit=100 * MIB)
    blocks = [allocator.allocate(20 * MIB) for _ in range(5)]
    allocator.free(blocks[1])
    allocator.free(blocks[2])
    other = allocator.allocate(30 * MIB, stream=1)
    assert allocator.totals.reserved == 100 * MIB
    assert other.segment is not blocks[0].segment
    with pytest.raises(DeviceMemoryError):
        allocator.allocate(20 * MIB)
    allocator.free(other)
    again = allocator.allocate(35 * MIB)
    assert again.address == blocks[1].address  # the lowest addresses that are free
    assert allocator.totals.reserved == 100 * MIB
    for block in (blocks[0], *blocks[3:], again):
        allocator.free(block)
    allocator.release_cached()
    assert allocator.totals.reserved == 0


def test_only_whole_pages_are_given_back() -> None:
    allocator = CachingAllocator(AllocatorRules(expandable_segments=True))
    first, second = allocator.allocate(30 * MIB), allocator.allocate(70 * MIB)
    allocator.free(second)
    assert allocator.release_cached() == 60 * MIB
    assert allocator.totals.reserved == 40 * MIB
    assert free_sizes(allocator) == [10 * MIB]
    assert allocator.allocate(10 * MIB).address == first.address + 30 * MIB


# --- mistakes --------------------------------------------------------------------------------------------------------


def test_mistakes_are_refused() -> None:
    allocator = CachingAllocator()
    block = allocator.allocate(100)
    neighbour = allocator.allocate(100)
    with pytest.raises(GraphoptError, match="is not free, and cannot be given back"):
        allocator.release(block)
    allocator.free(block)
    with pytest.raises(GraphoptError, match="is a part of a segment"):
        allocator.release(block)
    with pytest.raises(GraphoptError, match="is not in use"):
        allocator.free(block)
    with pytest.raises(GraphoptError, match="is not in use"):
        allocator.record_stream(block, 3)
    with pytest.raises(GraphoptError, match="request_free comes before"):
        allocator.complete_free(neighbour)
    for wrong in (-1, 1.5, "8", True):
        with pytest.raises(ArgumentError, match="a whole number of bytes"):
            allocator.allocate(wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="limit"):
        CachingAllocator(limit=-1)
    assert allocator.totals.allocated == 512


# --- what holds after any requests -----------------------------------------------------------------------------------

RULES = [
    AllocatorRules(),
    AllocatorRules(expandable_segments=True),
    AllocatorRules(max_split_size=30 * MIB),
    AllocatorRules(roundup_power2_divisions=((MIB, 4),)),
    PLAIN,
]

SIZES = st.one_of(st.integers(0, 4096), st.integers(0, 2 * MIB), st.integers(0, 60 * MIB))
STEPS = st.lists(st.tuples(st.integers(0, 9), SIZES, st.integers(0, 2), st.integers(0, 10**6)), max_size=60)


def check(allocator: CachingAllocator, used: dict[Block, int]) -> None:
    """What holds at any time: no overlaps, no free neighbours, and totals that are those of the blocks."""
    totals, split, active, mapped = allocator.totals, 0, 0, 0
    ends = 0
    for segment in allocator.segments():
        assert segment.start >= ends
        ends = segment.start + segment.size
        place, before = segment.start, None
        for block in segment.blocks:
            assert block.address == place
            assert block.before is before
            place += block.size
            assert (block in block.pool) == (block.is_free and block.mapped)
            if before is not None and before.is_free and block.is_free:
                assert before.mapped is not block.mapped
            active += 0 if block.is_free else block.size
            mapped += block.size if block.mapped else 0
            split += block.size if block.is_free and block.is_split and not segment.grows else 0
            before = block
        assert place == ends
    assert totals.reserved == mapped >= totals.active == active >= totals.allocated
    assert totals.allocated == sum(block.size for block in used) >= sum(used.values())
    assert totals.active >= totals.requested
    assert totals.inactive_split == split
    peaks = allocator.peaks
    assert peaks.reserved >= peaks.active >= peaks.allocated >= totals.allocated
    assert all(block.requested == size <= block.size for block, size in used.items())


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(RULES), st.sampled_from([None, 100 * MIB]), STEPS)
def test_blocks_never_overlap_and_totals_are_those_of_the_blocks(
    rules: AllocatorRules, limit: int | None, steps: list[tuple[int, int, int, int]]
) -> None:
    allocator = CachingAllocator(rules, limit=limit)
    used: dict[Block, int] = {}
    for kind, size, stream, number in steps:
        if kind == 0:
            allocator.release_cached()
        elif kind == 1:
            allocator.synchronize(stream)
        elif kind < 5 and used:
            block = list(used)[number % len(used)]
            if kind == 2:
                allocator.record_stream(block, stream)
            del used[block]
            allocator.free(block)
        else:
            try:
                used[allocator.allocate(size, stream=stream)] = size
            except DeviceMemoryError:
                assert limit is not None
        check(allocator, used)
        assert limit is None or allocator.totals.reserved <= limit
    for block in used:
        allocator.free(block)
    allocator.release_cached()
    check(allocator, {})
    assert allocator.totals.reserved == allocator.totals.active == 0


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 30 * MIB), min_size=1, max_size=25))
def test_a_second_run_of_the_same_requests_reserves_nothing_more(sizes: list[int]) -> None:
    allocator = CachingAllocator()
    for _ in range(2):
        before = allocator.totals.reserved
        for block in [allocator.allocate(size) for size in sizes]:
            allocator.free(block)
    assert allocator.totals.reserved == before
