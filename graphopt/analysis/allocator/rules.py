"""How an allocator lays out blocks: the sizes of torch's caching allocator for CUDA, and those of a plain heap."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CACHING", "PLAIN", "AllocatorRules"]

_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class AllocatorRules:
    """Sizes, in bytes, by which an allocator rounds requests and asks the device for memory.

    The names and the defaults are those of torch's ``CUDACachingAllocator``.

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
    """

    caching: bool = True
    round_bytes: int = 512
    small_request: int = _MIB
    small_segment: int = 2 * _MIB
    large_segment: int = 20 * _MIB
    large_request: int = 10 * _MIB
    round_large: int = 2 * _MIB
    expandable_segments: bool = False


CACHING = AllocatorRules()
"""torch's allocator for CUDA and ROCm, with its default settings."""

PLAIN = AllocatorRules(caching=False, round_bytes=1)
"""Memory of the host: what is asked for is what is taken, and freed memory goes back."""
