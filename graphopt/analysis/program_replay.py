"""A program's allocations, replayed: what the allocator of a device reserves for them.

Inputs are there first, in the order of the program's inputs. Then each call takes its temporaries, as one block, and
its results, and gives the temporaries back, and after it what it read last. Transfers allocate on the stream of the
computation, as everything does (``graphopt.ir.ops.transfers.cuda``). A library's workspace is taken before the first
call that uses it, and stays.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from torch import fx

from graphopt.analysis.allocator.allocator_settings import rules_of_settings
from graphopt.analysis.allocator.block_pool import Block
from graphopt.analysis.allocator.caching_allocator import CachingAllocator
from graphopt.analysis.allocator.rules import PLAIN, AllocatorRules
from graphopt.analysis.costs.profiles import PROFILES, DeviceProfile
from graphopt.analysis.liveness import simulate
from graphopt.errors import GraphoptError, check_type, no_such_word
from graphopt.ir.memory.timeline import MemoryTimeline, ReservedMemory, Storage
from graphopt.ir.ops import schema
from graphopt.ir.program import Program

__all__ = ["reserved_memory", "reserved_of", "reserved_where_cached"]

_RUNS = 2
"""How often a program is replayed: what its first run leaves behind changes where the second finds its blocks."""

_LIBRARIES: Mapping[str, tuple[str, ...]] = {
    "cublas": ("mm", "bmm", "addmm", "baddbmm", "addmv", "mv", "dot", "linear", "matmul", "_scaled_mm", "_addmm"),
    "cudnn": ("convolution", "convolution_backward", "cudnn_batch_norm", "_cudnn_rnn", "_cudnn_rnn_backward"),
}
"""The ops that libraries with workspaces compute, by their names up to what follows them after an underscore."""


def reserved_memory(
    program: Program,
    device: str | DeviceProfile | None = None,
    *,
    measure: bool = True,
    sizes: Mapping[str, int] | None = None,
) -> ReservedMemory:
    """What a device's allocator takes for a program; ``Program.reserved`` is this.

    Args:
        program: of any stage.
        device: its profile or name; by default that of a program without data, else the type of the program's tensors.
        measure: as for ``Program.memory``.
        sizes: as for ``Program.memory``.

    Raises:
        ArgumentError: for a device that is not known, with the near names.
    """
    return reserved_of(program, simulate(program, measure=measure, sizes=sizes), device)


def reserved_of(
    program: Program, timeline: MemoryTimeline, device: str | DeviceProfile | None = None
) -> ReservedMemory:
    """The same from the program's timeline.

    Args:
        program: whose timeline it is.
        timeline: is only read.
        device: as for ``reserved_memory``.
    """
    profile = _profile(program, device)
    kind = _kind(timeline)
    allocator = CachingAllocator(_rules(profile, kind))
    workspaces = {} if profile is None else dict(profile.workspaces)
    replay = _Replay(allocator, timeline, workspaces)
    for _ in range(_RUNS):
        replay.run()
    peaks = allocator.peaks
    return ReservedMemory(
        device=kind if profile is None else profile.name,
        caching=allocator.rules.caching,
        requested_peak_bytes=peaks.requested,
        allocated_peak_bytes=peaks.allocated,
        active_peak_bytes=peaks.active,
        reserved_peak_bytes=peaks.reserved,
        allocated_bytes=peaks.at_reserved.allocated,
        inactive_split_bytes=peaks.at_reserved.inactive_split,
        segments=peaks.at_reserved.segments,
        workspaces=replay.workspaces,
        context_bytes=0 if profile is None else profile.context_bytes,
        memory_bytes=None if profile is None else profile.memory_bytes,
        timeline=timeline,
        position=replay.position,
    )


def reserved_where_cached(program: Program, timeline: MemoryTimeline) -> ReservedMemory | None:
    """What a program's device reserves for it, where that is more than its tensors; None where it is not.

    It is not where the allocator gives freed memory back, as that of the host does. For one part of a model it is not
    told: parts take the blocks of each other.

    Args:
        program: whose timeline it is.
        timeline: is only read.
    """
    if program.context.room is not None or not _rules(_profile(program, None), _kind(timeline)).caching:
        return None
    return reserved_of(program, timeline)


# --- the device ------------------------------------------------------------------------------------------------------


def _profile(program: Program, device: str | DeviceProfile | None) -> DeviceProfile | None:
    """The profile that is asked for, or else that of a program without data, where it is known."""
    if isinstance(device, str):
        if device not in PROFILES:
            raise no_such_word("device", device, tuple(PROFILES))
        return PROFILES[device]
    if device is not None:
        check_type("device", device, DeviceProfile, "the name of a device or a DeviceProfile")
        return device
    known = program.context.device
    if known is None or isinstance(known, DeviceProfile):
        return known
    return PROFILES.get(known.name)


def _kind(timeline: MemoryTimeline) -> str:
    """The type of the device whose bytes are counted."""
    known = timeline.device
    return timeline.where.partition(":")[0] if known is None else known.kind


def _rules(profile: DeviceProfile | None, kind: str) -> AllocatorRules:
    if profile is not None:
        return profile.allocator
    return rules_of_settings(next(filter(None, map(os.environ.get, _SETTINGS)), "")) if kind == "cuda" else PLAIN


_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Where torch reads its allocator's settings; the second is the older name."""


def _library(node: fx.Node) -> str | None:
    """The library that computes a call out of a workspace of its own."""
    name = schema.op_name(node)
    return next((library for library, names in _LIBRARIES.items() if name in names), None)


# --- the replay ------------------------------------------------------------------------------------------------------


class _Replay:
    """Runs of a program, as requests to an allocator."""

    def __init__(
        self,
        allocator: CachingAllocator,
        timeline: MemoryTimeline,
        workspaces: Mapping[str, int],
    ) -> None:
        self.position = -1
        self.workspaces: dict[str, int] = {}
        self._allocator = allocator
        self._timeline = timeline
        self._blocks: dict[int, Block] = {}
        self._made: dict[int, list[Storage]] = {}
        self._dead: dict[int, list[Storage]] = {}
        self._wanted = self._first_uses(workspaces)
        end = len(timeline.nodes)
        for storage in timeline.storages:
            if storage.bytes and storage.is_input:
                allocator.allocate(storage.bytes)
            elif storage.bytes:
                self._made.setdefault(storage.first, []).append(storage)
                self._dead.setdefault(min(storage.last, end), []).append(storage)

    def _first_uses(self, workspaces: Mapping[str, int]) -> dict[int, list[tuple[str, int]]]:
        """The workspaces by the call before which they are taken; those of unknown libraries by the first of all."""
        first: dict[str, int] = {name: 0 for name in workspaces if name not in _LIBRARIES}
        for position, node in enumerate(self._timeline.nodes):
            library = _library(node)
            if library is not None and library in workspaces:
                first.setdefault(library, position)
        found: dict[int, list[tuple[str, int]]] = {}
        for name, position in first.items():
            found.setdefault(position, []).append((name, workspaces[name]))
        return found

    def run(self) -> None:
        """One run; what the program hands out is freed at its end."""
        reserved = self._allocator.peaks.reserved
        for position, temporary in enumerate(self._timeline.temporaries):
            self._call(position, temporary)
            if self._allocator.peaks.reserved > reserved:
                reserved, self.position = self._allocator.peaks.reserved, position
        for storage in self._dead.get(len(self._timeline.nodes), ()):
            self._free(storage)

    def _call(self, position: int, temporary: int) -> None:
        allocator = self._allocator
        for name, size in self._wanted.pop(position, ()):
            if size:
                allocator.allocate(size)
            self.workspaces[name] = size
        inside = allocator.allocate(temporary) if temporary else None
        for storage in self._made.get(position, ()):
            self._blocks[id(storage)] = allocator.allocate(storage.bytes)
        if inside is not None:
            allocator.free(inside)
        for storage in self._dead.get(position, ()):
            self._free(storage)

    def _free(self, storage: Storage) -> None:
        block = self._blocks.pop(id(storage), None)
        if block is None:
            raise GraphoptError(f"{storage.owner.name} dies before it is made: the timeline is not one of a program")
        self._allocator.free(block)
