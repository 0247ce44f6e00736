"""Sizes of blocks and segments, as torch's allocator rounds them."""

from __future__ import annotations

from typing import Any

import pytest

from graphopt.analysis.allocator import CACHING, PLAIN, AllocatorRules
from graphopt.errors import ArgumentError

MIB = 2**20


@pytest.mark.parametrize(
    ("requested", "block", "segment"),
    [
        (0, 512, 2 * MIB),
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (100 * MIB, 100 * MIB, 100 * MIB),
        (101 * MIB, 101 * MIB, 102 * MIB),
    ],
)
def test_requests_are_rounded_and_served_from_segments_of_three_sizes(requested: int, block: int, segment: int) -> None:
    assert CACHING.block_bytes(requested) == block
    assert CACHING.segment_bytes(block) == segment


def test_a_plain_heap_takes_what_is_asked_for() -> None:
    assert (PLAIN.block_bytes(777), PLAIN.segment_bytes(777)) == (777, 777)


@pytest.mark.parametrize(
    ("requested", "block"),
    [
        (2048, 2048),  # not above 4 blocks of 512 bytes: rounded to those
        (2049, 2560),
        (4096, 4096),
        (4097, 5120),
        (5120, 5120),
        (5121, 6144),
        (6 * MIB + 1, 7 * MIB),
        (7 * MIB + 1, 8 * MIB),
    ],
)
def test_requests_are_rounded_to_divisions_between_powers_of_two(requested: int, block: int) -> None:
    assert AllocatorRules(roundup_power2_divisions=((MIB, 4),)).block_bytes(requested) == block


def test_divisions_can_depend_on_the_request() -> None:
    rules = AllocatorRules(roundup_power2_divisions=((256 * MIB, 1), (512 * MIB, 2), (1024 * MIB, 8)))
    assert rules.block_bytes(5000) == 5120  # as the first says: by blocks of 512 bytes
    assert rules.block_bytes(300 * MIB + 1) == 300 * MIB + 512
    assert rules.block_bytes(600 * MIB) == 768 * MIB
    assert rules.block_bytes(1100 * MIB) == 1152 * MIB
    assert rules.block_bytes(5000 * MIB) == 5120 * MIB


def test_what_remains_of_a_block_is_split_off_from_one_size_on() -> None:
    assert CACHING.splits(512, 512, small=True)
    assert not CACHING.splits(2 * MIB, MIB, small=False)
    assert CACHING.splits(2 * MIB, MIB + 512, small=False)
    assert AllocatorRules(expandable_segments=True).splits(2 * MIB, 512, small=False)
    limited = AllocatorRules(max_split_size=100 * MIB)
    assert limited.splits(99 * MIB, 50 * MIB, small=False)
    assert not limited.splits(100 * MIB, 50 * MIB, small=False)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"round_bytes": 0}, "round_bytes is a whole number of bytes of at least 1"),
        ({"large_segment": "20MB"}, "large_segment is a whole number of bytes"),
        ({"max_split_size": -1}, "max_split_size is a whole number of bytes of at least 0"),
        ({"roundup_power2_divisions": ((0, 4),)}, "roundup_power2_divisions is a whole number of bytes"),
        ({"small_segment": MIB - 1}, "small_segment of 1048575 bytes serves requests of up to small_request"),
        ({"large_request": 21 * MIB}, "it has to be as large at least"),
    ],
)
def test_sizes_that_mean_nothing_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        AllocatorRules(**wrong)
