"""A recorded trace, replayed: what the simulated allocator takes for the same requests, beside what torch's took."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from graphopt.analysis.allocator.block_pool import Block
from graphopt.analysis.allocator.caching_allocator import CachingAllocator
from graphopt.analysis.allocator.recorded_layout import PlacedRange, RecordedLayout, layout_before
from graphopt.analysis.allocator.recorded_trace import RecordedEvent, RecordedSegment, Recording
from graphopt.analysis.allocator.rules import AllocatorRules
from graphopt.errors import GraphoptError, public, whole_number
from graphopt.ir.words.columns import aligned
from graphopt.ir.words.written_units import format_bytes

__all__ = ["TraceComparison", "compare_trace"]


@dataclass(frozen=True, slots=True)
class BytesBeside:
    """Bytes of one kind over a trace: as recorded and as predicted.

    Attributes:
        recorded_peak: the most at once, as recorded.
        predicted_peak: likewise, as predicted.
        difference: the largest distance between both at one moment.
        event: the number of the event behind which it is reached; -1 where both are equal throughout.
    """

    recorded_peak: int = 0
    predicted_peak: int = 0
    difference: int = 0
    event: int = -1

    @property
    def share(self) -> float:
        """The largest distance, as a share of the recorded peak."""
        return self.difference / self.recorded_peak if self.recorded_peak else float(self.difference > 0)


@dataclass(frozen=True, slots=True)
class TraceComparison:
    """What the simulated allocator made of a recorded trace.

    Attributes:
        events: how many there are.
        allocations: how many of them are requests.
        same_place: how many of those got the block that torch's allocator gave.
        resident: bytes in use when the recording began.
        reserved: segments.
        allocated: blocks in use.
        active: blocks in use or waiting for another stream.
        released: segments that were given back to the device, which the trace says, since the program decides it.
        not_there: those of them that the simulated allocator did not have.
    """

    events: int
    allocations: int
    same_place: int
    resident: int
    reserved: BytesBeside
    allocated: BytesBeside
    active: BytesBeside
    released: int
    not_there: int

    @property
    def largest_share(self) -> float:
        """The largest distance at any moment, as a share of the recorded peak."""
        return max(self.reserved.share, self.allocated.share, self.active.share)

    def __str__(self) -> str:
        share = f"{self.same_place / self.allocations:.1%}" if self.allocations else "none"
        rows = [("", "recorded peak", "predicted peak", "largest distance", "behind event")]
        for name in ("reserved", "allocated", "active"):
            found: BytesBeside = getattr(self, name)
            peaks = format_bytes(found.recorded_peak), format_bytes(found.predicted_peak)
            where = "never" if found.event < 0 else str(found.event)
            rows.append((name, *peaks, f"{format_bytes(found.difference)} ({found.share:.2%})", where))
        lines = [
            f"{self.events} events, {self.allocations} requests, {format_bytes(self.resident)} in use before them",
            *aligned(rows, right=(1, 2, 3, 4)),
            f"{self.same_place} of {self.allocations} requests ({share}) got the block that torch gave",
        ]
        if self.released:
            lines.append(f"{self.released} segments went back to the device, {self.not_there} of which were not there")
        return "\n".join(lines)


@public
def compare_trace(recording: Recording, device: int = 0, *, rules: AllocatorRules | None = None) -> TraceComparison:
    """Replay what a device was asked for, and compare what is taken for it with what torch's allocator took.

    The simulated allocator begins with the blocks and segments that there were before the first event, and decides
    itself where each request is served from and when the device is asked for a segment. When segments are given back is
    taken from the trace: the program (``torch.cuda.empty_cache``) and other users of the device decide it.

    Args:
        recording: as ``read_recording`` gives it.
        device: the index of the device.
        rules: of the allocator; by default those of the recording.

    Raises:
        ArgumentError: for a device without a trace.
        GraphoptError: for a trace whose events do not fit each other or the segments, with the number of the event.

    Example:
        >>> from graphopt.analysis.allocator import compare_trace, recording_of
        >>> segment = {"action": "segment_alloc", "addr": 2**40, "size": 2**21, "stream": 0}
        >>> block = {"action": "alloc", "addr": 2**40, "size": 1000, "stream": 0}
        >>> used = {"size": 1024, "requested_size": 1000, "address": 2**40, "state": "active_allocated"}
        >>> free = {"size": 2**21 - 1024, "requested_size": 0, "address": 2**40 + 1024, "state": "inactive"}
        >>> at_the_end = {"address": 2**40, "total_size": 2**21, "stream": 0, "segment_type": "small"}
        >>> at_the_end |= {"blocks": [used, free], "device": 0}
        >>> recording = recording_of({"segments": [at_the_end], "device_traces": [[segment, block]]})
        >>> compare_trace(recording).largest_share
        0.0
    """
    device = whole_number("compare_trace's device", device)
    if device >= len(recording.traces):
        raise GraphoptError(f"device={device}: the recording has traces of {len(recording.traces)} devices")
    events = recording.traces[device]
    segments = [segment for segment in recording.segments if segment.device == device]
    rules = rules or _rules_of(recording, events)
    layout = layout_before(segments, events, rules)
    return _Replay(layout, rules, segments, events).run(events)


def _rules_of(recording: Recording, events: Sequence[RecordedEvent]) -> AllocatorRules:
    rules = recording.rules
    if rules.expandable_segments or not any(event.action == "segment_map" for event in events):
        return rules
    return AllocatorRules(
        expandable_segments=True,
        max_split_size=rules.max_split_size,
        roundup_power2_divisions=rules.roundup_power2_divisions,
    )


class _Replay:
    """A recording and the simulated allocator, side by side."""

    def __init__(
        self,
        layout: RecordedLayout,
        rules: AllocatorRules,
        segments: Sequence[RecordedSegment],
        events: Sequence[RecordedEvent],
    ) -> None:
        self._layout = layout
        self._allocator = CachingAllocator(rules, addresses=self._address)
        self._offered: dict[int, list[int]] = {}
        self._elsewhere = 2**60
        self._distances: dict[int, int] = {}
        self._private = sorted((s.address, s.address + s.size, s.pool) for s in segments if any(s.pool))
        self._blocks: dict[int, Block] = {}
        self._same_place = self._allocations = self._released = self._not_there = 0
        self._adopt()
        self._resident = layout.active
        self._compared = {name: BytesBeside() for name in ("reserved", "allocated", "active")}

    def _address(self, size: int) -> int:
        """The address that torch's allocator got for a segment of this size, where the trace is at one."""
        for address in self._offered.pop(size, ()):
            end = address + size
            if not any(s.start < end and address < s.start + s.size for s in self._allocator.segments()):
                return address
        self._elsewhere += -(-size // 2**21) * 2**21
        return self._elsewhere - size

    def _adopt(self) -> None:
        """Begin with the blocks that there are before the first event."""
        blocks = self._layout.blocks
        addresses = [block.address for block in blocks]
        for joined in _joined(self._layout.ranges):
            first, last = joined[0], joined[-1]
            end = last.address + last.size
            inside = blocks[bisect_left(addresses, first.address) : bisect_left(addresses, end)]
            self._blocks |= self._allocator.adopt(
                [(piece.address, piece.size) for piece in joined],
                [(block.address, block.size, block.requested, block.waiting) for block in inside],
                small=first.small,
                stream=first.stream,
                pool=first.pool if any(first.pool) else None,
                grows=first.grows,
            )

    def run(self, events: Sequence[RecordedEvent]) -> TraceComparison:
        """Follow all events."""
        self._compare(-1)
        for number, event in enumerate(events):
            try:
                self._layout.follow(event)
                self._follow(event)
            except GraphoptError as error:
                raise GraphoptError(f"event {number} does not follow from those before it: {error}") from None
            if event.action in ("alloc", "free_requested", "free_completed"):
                self._compare(number)
        return TraceComparison(
            events=len(events),
            allocations=self._allocations,
            same_place=self._same_place,
            resident=self._resident,
            reserved=self._compared["reserved"],
            allocated=self._compared["allocated"],
            active=self._compared["active"],
            released=self._released,
            not_there=self._not_there,
        )

    def _follow(self, event: RecordedEvent) -> None:
        if event.action == "alloc":
            pool = self._pool_of(event.address)
            block = self._allocator.allocate(event.size, stream=event.stream, pool=pool)
            self._blocks[event.address] = block
            self._allocations += 1
            self._same_place += self._is_same_place(block, event.address)
            self._offered.clear()
        elif event.action == "free_requested":
            if not self._blocks[event.address].waiting:
                self._allocator.request_free(self._blocks[event.address])
        elif event.action == "free_completed":
            block = self._blocks.pop(event.address)
            if block.allocated:
                self._allocator.request_free(block)
            self._allocator.complete_free(block)
        elif event.action in ("segment_alloc", "segment_map"):
            self._offered.setdefault(event.size, []).append(event.address)
        elif event.action in ("segment_free", "segment_unmap"):
            self._released += 1
            self._not_there += not self._release(event)

    def _is_same_place(self, block: Block, address: int) -> bool:
        """Whether a block is where torch's was; of a growing segment, as far from others as torch's was."""
        distance = address - block.address
        return distance == (self._distances.setdefault(block.segment.start, distance) if block.segment.grows else 0)

    def _pool_of(self, address: int) -> tuple[int, ...] | None:
        """The private pool of an address, as far as the segments at the end tell; None for the common one."""
        place = bisect_right(self._private, address, key=lambda item: item[0]) - 1
        return self._private[place][2] if place >= 0 and address < self._private[place][1] else None

    def _release(self, event: RecordedEvent) -> bool:
        """Give back the segment at the same address, or else one of the same size; whether there is one."""
        found = None
        for segment in self._allocator.segments():
            address = event.address - self._distances.get(segment.start, 0)
            for block in segment.blocks if segment.grows else [segment.first]:
                if block not in block.pool or (block.is_split and not segment.grows):
                    continue
                if block.address <= address and address + event.size <= block.address + block.size:
                    return self._allocator.release(block, address, event.size) > 0
                same = block.size == event.size and block.pool.stream == event.stream
                found = block if same and not segment.grows else found
        return found is not None and self._allocator.release(found) > 0

    def _compare(self, number: int) -> None:
        predicted, recorded = self._allocator.totals, self._layout
        for name, beside in self._compared.items():
            there, here = getattr(recorded, name), getattr(predicted, name)
            distance = abs(there - here)
            if distance > beside.difference or there > beside.recorded_peak or here > beside.predicted_peak:
                worse = distance > beside.difference
                self._compared[name] = BytesBeside(
                    max(beside.recorded_peak, there),
                    max(beside.predicted_peak, here),
                    distance if worse else beside.difference,
                    number if worse else beside.event,
                )


def _joined(ranges: Sequence[PlacedRange]) -> list[list[PlacedRange]]:
    """Segments by themselves, and the ranges of growing ones of each stream and pool together."""
    found: list[list[PlacedRange]] = []
    growing: dict[tuple[object, ...], list[PlacedRange]] = {}
    for piece in ranges:
        key = piece.stream, piece.small, piece.pool
        if not piece.grows:
            found.append([piece])
        elif key in growing:
            growing[key].append(piece)
        else:
            growing[key] = [piece]
            found.append(growing[key])
    return found
