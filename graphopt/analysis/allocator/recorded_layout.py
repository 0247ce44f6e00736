"""Where the blocks of a recording are, event by event, backwards to its beginning and forwards again.

A recording holds the segments as they were when it ended, and events with addresses. From these every block's place is
known; its size is what was asked for, rounded up, and what was too little to be split off behind it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from graphopt.analysis.allocator.recorded_trace import RecordedEvent, RecordedSegment
from graphopt.analysis.allocator.rules import AllocatorRules
from graphopt.errors import GraphoptError

__all__ = ["PlacedBlock", "PlacedRange", "RecordedLayout", "layout_before"]


@dataclass(slots=True)
class PlacedBlock:
    """A block in use, or one that waits to be freed."""

    address: int
    size: int
    requested: int
    waiting: bool = False


@dataclass(frozen=True, slots=True)
class PlacedRange:
    """Addresses with memory behind them: a segment, or a part of a growing one."""

    address: int
    size: int
    stream: int
    small: bool
    pool: tuple[int, ...]
    grows: bool


class RecordedLayout:
    """The blocks and segments at one moment of a recording.

    Args:
        rules: of the allocator that was recorded.
    """

    def __init__(self, rules: AllocatorRules) -> None:
        self._rules = rules
        self._blocks: dict[int, PlacedBlock] = {}
        self._addresses: list[int] = []
        self._ranges: dict[int, PlacedRange] = {}
        self._starts: list[int] = []
        self.allocated = self.active = self.reserved = 0

    @property
    def blocks(self) -> list[PlacedBlock]:
        """Those in use or waiting, by address."""
        return [self._blocks[address] for address in self._addresses]

    @property
    def ranges(self) -> list[PlacedRange]:
        """The addresses with memory behind them, in order; neighbours are not joined."""
        return [self._ranges[start] for start in self._starts]

    def range_at(self, address: int) -> PlacedRange | None:
        """The range that an address lies in."""
        place = bisect_right(self._starts, address) - 1
        found = self._ranges[self._starts[place]] if place >= 0 else None
        return found if found is not None and address < found.address + found.size else None

    # --- forwards ----------------------------------------------------------------------------------------------------

    def follow(self, event: RecordedEvent) -> None:
        """What an event does.

        Raises:
            GraphoptError: for an event that cannot follow what was before it.
        """
        if event.action == "alloc":
            self.place(event.address, event.size)
        elif event.action == "free_requested":
            block = self._block(event)
            if not block.waiting:
                self.allocated -= block.size
            block.waiting = True
        elif event.action == "free_completed":
            self.remove(event.address)
        elif event.action in ("segment_alloc", "segment_map"):
            self.add_range(_range_of(event, self._rules))
        elif event.action in ("segment_free", "segment_unmap"):
            self.remove_range(event.address, event.size)

    def place(self, address: int, requested: int, size: int = 0, *, waiting: bool = False) -> None:
        """Put a block at an address.

        Args:
            address: of its first byte.
            requested: bytes that were asked for.
            size: its size, where it is known.
            waiting: whether it is freed, and waits.
        """
        if address in self._blocks:
            raise GraphoptError(f"a block at {address:#x}, where one is in use already")
        block = PlacedBlock(address, size or self._size(address, requested), requested, waiting)
        insort(self._addresses, address)
        self._blocks[address] = block
        self.active += block.size
        self.allocated += 0 if waiting else block.size

    def remove(self, address: int) -> None:
        """Take a block away."""
        block = self._blocks.pop(address, None)
        if block is None:
            raise GraphoptError(f"no block at {address:#x} is in use")
        del self._addresses[bisect_left(self._addresses, address)]
        self.active -= block.size
        self.allocated -= 0 if block.waiting else block.size

    def add_range(self, added: PlacedRange) -> None:
        """Put memory behind addresses."""
        last = self.range_at(added.address + added.size - 1)
        if last is not None or self.range_at(added.address) is not None:
            raise GraphoptError(f"a segment at {added.address:#x}, where one is already")
        insort(self._starts, added.address)
        self._ranges[added.address] = added
        self.reserved += added.size

    def remove_range(self, address: int, size: int) -> None:
        """Take the memory behind addresses away: of whole ranges, or of parts."""
        end = address + size
        while address < end:
            found = self.range_at(address)
            if found is None:
                raise GraphoptError(f"no segment is at {address:#x}")
            del self._ranges[found.address]
            self._starts.remove(found.address)
            self.reserved -= found.size
            found_end = found.address + found.size
            for start, stop in ((found.address, address), (end, found_end)):
                if start < stop:
                    self.add_range(PlacedRange(start, stop - start, found.stream, found.small, found.pool, found.grows))
            address = found_end

    def _block(self, event: RecordedEvent) -> PlacedBlock:
        block = self._blocks.get(event.address)
        if block is None:
            raise GraphoptError(f"{event.action} at {event.address:#x}, where no block is in use")
        return block

    def _size(self, address: int, requested: int) -> int:
        """The size of a block: what is behind it belongs to it where it is too little to be split off."""
        size = self._rules.block_bytes(requested)
        found = self.range_at(address)
        if found is None:
            raise GraphoptError(f"a block at {address:#x}, where no segment is")
        place = bisect_right(self._addresses, address)
        end = found.address + found.size
        if place < len(self._addresses):
            end = min(end, self._addresses[place])
        remainder = end - address - size
        if remainder < 0 and not found.grows:
            raise GraphoptError(f"a block of {size} bytes at {address:#x}, where {end - address} are free")
        if remainder <= 0 or found.grows or self._rules.splits(size, remainder, small=found.small):
            return size
        return size + remainder


def _range_of(event: RecordedEvent, rules: AllocatorRules) -> PlacedRange:
    """The addresses of an event; large blocks have pages of their own size, small ones come and go in any number."""
    grows = event.action.endswith("map")
    small = event.size % rules.large_segment != 0 if grows else event.size == rules.small_segment
    return PlacedRange(event.address, event.size, event.stream, small, (0, 0), grows)


# --- backwards -------------------------------------------------------------------------------------------------------


def layout_before(
    segments: Iterable[RecordedSegment], events: Iterable[RecordedEvent], rules: AllocatorRules
) -> RecordedLayout:
    """The layout before the first of some events.

    Args:
        segments: as they are after the last event.
        events: the oldest first.
        rules: of the allocator.

    Raises:
        GraphoptError: where the events do not lead to these segments, with the number of the event.
    """
    ranges = RecordedLayout(rules)
    blocks: dict[int, PlacedBlock] = {}
    for segment in segments:
        place = segment.address, segment.size, segment.stream, segment.small, segment.pool, segment.grows
        ranges.add_range(PlacedRange(*place))
        blocks |= {b.address: PlacedBlock(b.address, b.size, b.requested, b.waiting) for b in segment.blocks}
    known = list(events)
    for number in range(len(known) - 1, -1, -1):
        try:
            _undo(known[number], ranges, blocks, rules)
        except GraphoptError as error:
            raise GraphoptError(f"event {number} does not lead to what follows it: {error}") from None
    sizes = _sizes_told_later(blocks, known, rules)
    for address in sorted(blocks, reverse=True):
        block = blocks[address]
        ranges.place(address, block.requested, block.size or sizes.get(address, 0), waiting=block.waiting)
    return ranges


def _sizes_told_later(
    blocks: Mapping[int, PlacedBlock], events: Iterable[RecordedEvent], rules: AllocatorRules
) -> dict[int, int]:
    """Sizes of blocks of which the recording says what was asked for, where a later block says where they end.

    While such a block is in use, a large one that begins less than what is split off behind its requested bytes begins
    where it ends.
    """
    if rules.expandable_segments:
        return {}  # everything beyond what was asked for is split off
    unknown = sorted(address for address, block in blocks.items() if not block.size)
    found: dict[int, int] = {}
    for event in events:
        place = bisect_right(unknown, event.address) - 1
        if place < 0:
            continue
        address = unknown[place]
        if event.action == "free_completed" and address == event.address:
            del unknown[place]
        elif event.action == "alloc" and not rules.is_small(rules.block_bytes(event.size)):
            size = rules.block_bytes(blocks[address].requested)
            if not rules.is_small(size) and 0 < event.address - address - size <= rules.small_request:
                found[address] = min(event.address - address, found.get(address, event.address))
    return found


def _undo(event: RecordedEvent, ranges: RecordedLayout, blocks: dict[int, PlacedBlock], rules: AllocatorRules) -> None:
    """Take one event back."""
    if event.action == "alloc":
        if blocks.pop(event.address, None) is None:
            raise GraphoptError(f"a block was given out at {event.address:#x}, and is not there")
    elif event.action == "free_requested":
        if event.address not in blocks:
            raise GraphoptError(f"a block was freed at {event.address:#x}, and was not there")
        blocks[event.address].waiting = False
    elif event.action == "free_completed":
        if event.address in blocks:
            raise GraphoptError(f"a block was freed at {event.address:#x}, and is there")
        blocks[event.address] = PlacedBlock(event.address, 0, event.size, waiting=True)
    elif event.action in ("segment_alloc", "segment_map"):
        ranges.remove_range(event.address, event.size)
    elif event.action in ("segment_free", "segment_unmap"):
        ranges.add_range(_range_of(event, rules))
