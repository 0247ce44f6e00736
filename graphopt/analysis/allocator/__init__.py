"""torch's caching allocator, simulated: what a program takes of a device's memory, beyond the bytes of its tensors.

>>> from graphopt.analysis.allocator import CachingAllocator
>>> allocator = CachingAllocator(limit=30 * 2**20)
>>> small, large = allocator.allocate(1000), allocator.allocate(3_000_000)
>>> allocator.totals.reserved == 2 * 2**20 + 20 * 2**20
True

In reading order: ``caching_allocator``, ``block_pool``, ``growing_segments``, ``rules``, ``allocator_settings``,
``allocator_totals``, ``recorded_layout``, ``recorded_trace``, ``adopted_segments``, ``trace_comparison``,
``plain_pickle``.
"""

from graphopt.analysis.allocator.allocator_totals import AllocatorPeaks, AllocatorTotals, DeviceMemoryError
from graphopt.analysis.allocator.block_pool import Block
from graphopt.analysis.allocator.caching_allocator import CachingAllocator
from graphopt.analysis.allocator.recorded_trace import Recording, read_recording, recording_of
from graphopt.analysis.allocator.rules import CACHING, PLAIN, AllocatorRules
from graphopt.analysis.allocator.trace_comparison import TraceComparison, compare_trace

__all__ = [
    "CACHING",
    "PLAIN",
    "AllocatorPeaks",
    "AllocatorRules",
    "AllocatorTotals",
    "Block",
    "CachingAllocator",
    "DeviceMemoryError",
    "Recording",
    "TraceComparison",
    "compare_trace",
    "read_recording",
    "recording_of",
]
