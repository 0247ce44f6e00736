"""Recorded traces beside the simulated allocator: where both agree, where they do not, and traces that are damaged."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphopt.analysis.allocator import AllocatorRules, Block, CachingAllocator, compare_trace, recording_of
from graphopt.errors import ArgumentError, GraphoptError
from tests.support.recording_allocator import RecordingAllocator

MIB = 2**20
GROWING = AllocatorRules(expandable_segments=True)


def some_work(allocator: CachingAllocator, kept: list[Block]) -> None:
    """Requests of several sizes, of which every third stays, and a cache that is emptied once."""
    for number in range(60):
        block = allocator.allocate((number * 7919 % 97) * 100_000 + 1000, stream=number % 2)
        if number % 5 == 0:
            allocator.record_stream(block, 9)
        if number % 3:
            allocator.free(block)
        else:
            kept.append(block)
        if number == 40:
            allocator.release_cached()


@pytest.mark.parametrize("rules", [AllocatorRules(), GROWING])
@pytest.mark.parametrize("late", [False, True])
def test_a_recording_of_the_same_rules_is_predicted_to_the_byte(rules: AllocatorRules, late: bool) -> None:
    allocator = RecordingAllocator(rules)
    kept: list[Block] = []
    some_work(allocator, kept)
    if late:
        allocator.forget()
        some_work(allocator, kept)
        for block in kept[::2]:
            allocator.free(block)
        allocator.synchronize()
    found = compare_trace(recording_of(allocator.snapshot()))
    assert found.same_place == found.allocations == 60
    assert found.largest_share == 0.0
    assert found.reserved.predicted_peak == found.reserved.recorded_peak > 0
    assert found.allocated.predicted_peak == found.allocated.recorded_peak
    assert (found.resident > 0) is late
    assert found.not_there == 0


STEPS = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 30 * MIB), st.integers(0, 99)), min_size=1, max_size=40)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([AllocatorRules(), GROWING]), STEPS, st.integers(0, 39))
def test_whatever_was_recorded_is_predicted_within_what_is_not_split_off(
    rules: AllocatorRules, steps: list[tuple[int, int, int]], begin: int
) -> None:
    """Only bytes of blocks from before the recording, beyond what was asked for, are not known."""
    allocator = RecordingAllocator(rules)
    used: list[Block] = []
    for number, (kind, size, which) in enumerate(steps):
        if number == begin:
            allocator.forget()
        if kind == 0:
            allocator.release_cached()
        elif kind < 5 and used:
            allocator.free(used.pop(which % len(used)))
        else:
            used.append(allocator.allocate(size))
    found = compare_trace(recording_of(allocator.snapshot()))
    if begin == 0 or begin >= len(steps) or rules.expandable_segments:
        assert found.largest_share == 0.0
        assert found.same_place == found.allocations
    assert found.reserved.recorded_peak <= allocator.peaks.reserved


def test_other_rules_are_told_by_how_much_they_differ() -> None:
    allocator = RecordingAllocator(GROWING)
    for size in range(30, 100, 10):
        allocator.free(allocator.allocate(size * MIB))
    found = compare_trace(recording_of(allocator.snapshot()), rules=AllocatorRules())
    assert found.reserved.recorded_peak == 100 * MIB
    assert found.reserved.predicted_peak == sum(range(30, 100, 10)) * MIB
    assert found.reserved.difference == 320 * MIB
    text = str(found)
    assert "7 requests" in text
    assert "335.5 MB (320.00%)" in text


def test_a_trace_of_one_segment_has_known_figures() -> None:
    allocator = RecordingAllocator(AllocatorRules())
    first = allocator.allocate(3 * MIB)
    second = allocator.allocate(4 * MIB - 100)
    allocator.free(first)
    snapshot = allocator.snapshot()
    found = compare_trace(recording_of(snapshot))
    assert found.events == 5
    assert (found.reserved.recorded_peak, found.reserved.predicted_peak) == (20 * MIB, 20 * MIB)
    assert (found.allocated.recorded_peak, found.allocated.predicted_peak) == (7 * MIB, 7 * MIB)
    allocator.free(second)
    assert str(found).startswith("5 events, 2 requests, 0 B in use before them\n")


@pytest.mark.parametrize(
    ("event", "change", "message"),
    [
        (1, {"addr": 2**46 + 5}, "event 1 does not lead to what follows it: a block was given out at"),
        (3, {"addr": 2**46 + 5}, "event 2 does not lead to what follows it: a block was freed at .* and was not there"),
        (0, {"size": 40 * MIB}, "event 0 does not lead to what follows it: no segment is at"),
        (0, {"size": 4 * MIB}, "event 4 does not follow from those before it: a block of"),
        (2, {"action": "free_completed"}, "event 2 does not lead to what follows it: a block was freed"),
        (1, {"size": 30 * MIB}, "event 1 does not follow from those before it: a block of"),
    ],
)
def test_events_that_do_not_fit_each_other_are_errors(event: int, change: dict[str, Any], message: str) -> None:
    allocator = RecordingAllocator(AllocatorRules())
    allocator.free(allocator.allocate(3 * MIB))
    allocator.allocate(5 * MIB)
    snapshot = copy.deepcopy(allocator.snapshot())
    snapshot["device_traces"][0][event] |= change
    with pytest.raises(GraphoptError, match=message):
        compare_trace(recording_of(snapshot))


def test_a_device_without_a_trace_is_an_error() -> None:
    recording = recording_of({"segments": [], "device_traces": [[]]})
    with pytest.raises(GraphoptError, match="device=1: the recording has traces of 1 devices"):
        compare_trace(recording, 1)
    with pytest.raises(ArgumentError, match="device"):
        compare_trace(recording, -1)
    assert compare_trace(recording).largest_share == 0.0
