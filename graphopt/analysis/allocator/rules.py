"""How an allocator lays out blocks: the sizes of torch's caching allocator for CUDA, and those of a plain heap."""

from __future__ import annotations

from dataclasses import dataclass

from graphopt.errors import ArgumentError, whole_number

__all__ = ["CACHING", "PLAIN", "AllocatorRules"]

_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class AllocatorRules:
    """Sizes, in bytes, by which an allocator rounds requests and asks the device for memory.

    The names and the defaults are those of torch's ``CUDACachingAllocator`` (``c10/cuda/CUDACachingAllocator.cpp``).

    Attributes:
        caching: whether freed blocks stay with the allocator; without, a block is what was asked for.
        round_bytes: each request is a multiple of this.
        small_request: requests up to this come from the pool of small blocks.
        small_segment: what the pool of small blocks asks the device for.
        large_segment: what the pool of large blocks asks for, for requests under ``large_request``.
        large_request: requests from this on are asked for by themselves, rounded up to ``round_large``.
        round_large: multiple of which large segments are.
        expandable_segments: one growing segment for each pool and stream, in pages of ``small_segment`` and
            ``large_segment`` bytes, in place of separate ones.
        max_split_size: blocks of this size or more are not split; 0 for no limit (torch's
            ``max_split_size_mb``).
        roundup_power2_divisions: pairs of bytes, powers of two, and numbers of divisions: requests from the bytes of
            a pair up to those of the next are rounded up to the next of so many equal parts between two powers of two;
            smaller ones than the first as the first says. 0 or 1 divisions: as ``round_bytes`` says.

    Raises:
        ArgumentError: for sizes that are no numbers of bytes, and for segments that the requests they serve do not fit
            into.
    """

    caching: bool = True
    round_bytes: int = 512
    small_request: int = _MIB
    small_segment: int = 2 * _MIB
    large_segment: int = 20 * _MIB
    large_request: int = 10 * _MIB
    round_large: int = 2 * _MIB
    expandable_segments: bool = False
    max_split_size: int = 0
    roundup_power2_divisions: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        for name in _SIZES:
            whole_number(f"AllocatorRules' {name}", getattr(self, name), least=1, of="bytes")
        whole_number("AllocatorRules' max_split_size", self.max_split_size, of="bytes")
        for start, divisions in self.roundup_power2_divisions:
            whole_number("AllocatorRules' roundup_power2_divisions", start, least=1, of="bytes")
            whole_number("AllocatorRules' roundup_power2_divisions", divisions, of="divisions")
        for request, segment in (("small_request", "small_segment"), ("large_request", "large_segment")):
            if getattr(self, segment) < getattr(self, request):
                raise ArgumentError(
                    f"AllocatorRules' {segment} of {getattr(self, segment)} bytes serves requests of up to {request}, "
                    f"{getattr(self, request)} bytes: it has to be as large at least"
                )

    def block_bytes(self, requested: int) -> int:
        """The bytes of the block for a request; those of a block that is not split can be more."""
        if requested < self.round_bytes:
            return self.round_bytes
        divisions = self._divisions(requested)
        if divisions > 1 and requested > self.round_bytes * divisions:
            return _next_division(requested, divisions)
        return _multiple(requested, self.round_bytes)

    def segment_bytes(self, block: int) -> int:
        """What the device is asked for where no free block serves a block of so many bytes."""
        if not self.caching:
            return block
        if block <= self.small_request:
            return self.small_segment
        return self.large_segment if block < self.large_request else _multiple(block, self.round_large)

    def is_small(self, block: int) -> bool:
        """Whether a block of so many bytes comes from the pool of small blocks."""
        return block <= self.small_request

    def splits(self, block: int, remainder: int, *, small: bool) -> bool:
        """Whether what remains of a free block, behind a new one of ``block`` bytes, becomes a free block by itself."""
        if small or self.expandable_segments:
            return remainder >= self.round_bytes
        return remainder > self.small_request and not self.is_oversize(block)

    def is_oversize(self, block: int) -> bool:
        """Whether a block is as large as ``max_split_size``, or larger."""
        return bool(self.max_split_size) and block >= self.max_split_size

    def _divisions(self, requested: int) -> int:
        if not self.roundup_power2_divisions:
            return 0
        floor = 1 << (requested.bit_length() - 1)
        found = self.roundup_power2_divisions[0][1]
        for start, divisions in self.roundup_power2_divisions:
            if start <= floor:
                found = divisions
        return found


_SIZES = (
    "round_bytes",
    "small_request",
    "small_segment",
    "large_segment",
    "large_request",
    "round_large",
)


def _multiple(number: int, of: int) -> int:
    return -(-number // of) * of


def _next_division(requested: int, divisions: int) -> int:
    """The next of ``divisions`` equal steps between the powers of two around a request."""
    if requested & (requested - 1) == 0:
        return requested
    floor = 1 << (requested.bit_length() - 1)
    step = floor >> (divisions.bit_length() - 1)
    return _multiple(requested, step) if step else 2 * floor


CACHING = AllocatorRules()
"""torch's allocator for CUDA and ROCm, with its default settings."""

PLAIN = AllocatorRules(caching=False, round_bytes=1)
"""Memory of the host: what is asked for is what is taken, and freed memory goes back."""
