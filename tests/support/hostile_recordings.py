"""Recordings of torch's allocator as a stranger may have changed them: their data, or the bytes of their files."""

from __future__ import annotations

import functools
import json
import pickle
import random
from collections.abc import Callable
from typing import Any

from graphopt.analysis.allocator import AllocatorRules, compare_trace, recording_of
from graphopt.analysis.allocator.plain_pickle import read_plain_pickle
from tests.support.recording_allocator import RecordingAllocator

__all__ = ["recording"]


@functools.cache
def _snapshots() -> list[str]:
    """Recordings of a few requests, from their beginning and from later on, with growing segments and without."""
    found = []
    for rules in (AllocatorRules(), AllocatorRules(expandable_segments=True)):
        allocator = RecordingAllocator(rules)
        blocks = [allocator.allocate(size) for size in (1000, 3_000_000, 12_000_000, 500)]
        found.append(json.dumps(allocator.snapshot()))
        allocator.forget()
        for block in blocks[1:]:
            allocator.free(block)
        allocator.release_cached()
        allocator.allocate(5_000_000)
        settings = {"expandable_segments": rules.expandable_segments, "roundup_power2_divisions": {"1": 0, "2": 4}}
        found.append(json.dumps(allocator.snapshot() | {"allocator_settings": settings}))
    return found


def recording(
    changed: Callable[[Any, random.Random], Any], chance: random.Random
) -> tuple[bytes, Callable[[], object]]:
    """A changed pickle, and a call that reads it and replays its traces.

    Args:
        changed: makes changes to plain data.
        chance: decides.
    """
    data = json.loads(chance.choice(_snapshots()))
    if chance.random() < 0.6:
        file = pickle.dumps(changed(data, chance), chance.randint(2, 5))
    else:
        file = _changed_bytes(pickle.dumps(data, chance.randint(2, 5)), chance)

    def read() -> None:
        found = recording_of(read_plain_pickle(file))
        for device in range(len(found.traces)):
            str(compare_trace(found, device))

    return file, read


def _changed_bytes(data: bytes, chance: random.Random) -> bytes:
    """One to four bytes that are others, a part that is missing, or one that is there twice."""
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data) + 1)
        end = min(len(data), at + chance.randint(0, 40))
        inside = chance.choice([bytes([chance.randrange(256)]), b"", data[at:end] * 2, b"cos\nsystem\n(S'true'\ntR."])
        data = data[:at] + inside + data[end:]
    return data
