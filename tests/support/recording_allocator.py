"""An allocator that keeps a record of what it does, in the form in which torch records its own."""

from __future__ import annotations

from typing import Any

from graphopt.analysis.allocator import AllocatorRules, Block, CachingAllocator

__all__ = ["RecordingAllocator"]


class RecordingAllocator(CachingAllocator):
    """``events`` has what happened since ``forget``, and ``snapshot`` what torch would write."""

    def __init__(self, rules: AllocatorRules) -> None:
        super().__init__(rules)
        self.events: list[dict[str, Any]] = []

    def forget(self) -> None:
        """Begin to record here."""
        self.events.clear()

    def _note(self, action: str, address: int, size: int, stream: int) -> None:
        self.events.append({"action": action, "addr": address, "size": size, "stream": stream, "frames": []})

    def _ranges(self) -> dict[int, int]:
        """The end of each range of addresses with memory behind it, by its start."""
        found: dict[int, int] = {}
        last = -1
        for segment in self.segments():
            for block in segment.blocks if segment.grows else [segment.first]:
                size = block.size if segment.grows else segment.size
                if not block.mapped:
                    continue
                if segment.grows and found and found[last] == block.address != segment.start:
                    found[last] += size
                else:
                    last = block.address
                    found[last] = last + size
        return found

    def allocate(self, requested: int, *, stream: int = 0, pool: Any = None) -> Block:
        before = self._ranges()
        block = super().allocate(requested, stream=stream, pool=pool)
        self._note_memory(before, stream)
        self._note("alloc", block.address, requested, stream)
        return block

    def _note_memory(self, before: dict[int, int], stream: int) -> None:
        """Note memory that is new: whole segments, or what a range has grown by at its end."""
        grows = self.rules.expandable_segments
        for start, end in self._ranges().items():
            inside = [(first, last) for first, last in before.items() if start <= first < end]
            place = start
            for first, last in [*sorted(inside), (end, end)]:
                if place < first:
                    self._note("segment_map" if grows else "segment_alloc", place, first - place, stream)
                place = last

    def request_free(self, block: Block) -> None:
        super().request_free(block)
        self._note("free_requested", block.address, block.requested, block.pool.stream)

    def complete_free(self, block: Block) -> None:
        self._note("free_completed", block.address, block.requested, block.pool.stream)
        super().complete_free(block)

    def release(self, block: Block, address: int = 0, size: int | None = None) -> int:
        start, end, stream = block.address, block.address + block.size, block.pool.stream
        if block.segment.grows:
            page, base = block.segment.page, block.segment.start
            start = base + -(-(start - base) // page) * page
            end = base + (end - base) // page * page
        released = super().release(block, address, size)
        if released:
            self._note("segment_unmap" if block.segment.grows else "segment_free", start, end - start, stream)
        return released

    def snapshot(self) -> dict[str, Any]:
        """The state and the events, as ``torch.cuda.memory._snapshot()`` gives them."""
        blocks = [block for segment in self.segments() for block in segment.blocks]
        found = []
        for start, end in self._ranges().items():
            inside = [block for block in blocks if start <= block.address < end]
            found.append(
                {
                    "device": 0,
                    "address": start,
                    "total_size": end - start,
                    "stream": inside[0].pool.stream,
                    "segment_type": "small" if inside[0].pool.small else "large",
                    "segment_pool_id": (0, 0),
                    "is_expandable": inside[0].segment.grows,
                    "blocks": [_described(block) for block in inside],
                }
            )
        return {"segments": found, "device_traces": [list(self.events)]}


def _described(block: Block) -> dict[str, Any]:
    state = "active_allocated" if block.allocated else "active_pending_free" if block.waiting else "inactive"
    requested = 0 if block.is_free else block.requested
    return {"address": block.address, "size": block.size, "requested_size": requested, "state": state, "frames": []}
