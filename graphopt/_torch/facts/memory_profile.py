"""The CPU allocator's own events, and peaks between marks in the running program.

The public profiler sums allocations per op; single events are in ``kineto_results`` and in the classes of
``torch._C._profiler``.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

import torch

from graphopt._torch.private_names import MEMORY, attribute, require
from graphopt.errors import GraphoptError

__all__ = ["allocator_events", "peaks_between_marks", "profile_memory", "profiler_is_running"]


def profiler_is_running() -> bool:
    """Whether this thread is inside of a profile of torch, of which there is one at a time."""
    require(MEMORY)
    return bool(attribute(torch, "autograd._profiler_enabled", MEMORY)())


@contextlib.contextmanager
def profile_memory() -> Iterator[torch.profiler.profile]:
    """While the block runs, a profile of the CPU records every allocation and release.

    Raises:
        GraphoptError: inside of another profile, which this one would end.
    """
    if profiler_is_running():
        raise GraphoptError(
            "memory is measured by torch's profiler, which is running already, and there is one at a time: measure "
            "outside of that profile"
        )
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler otherwise announces itself on stderr
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    with contextlib.ExitStack() as stack:
        with warnings.catch_warnings():  # torch 2.11 and 2.12 warn that an earlier cycle is lost where there is none
            warnings.filterwarnings("ignore", "Warning: Profiler clears events", UserWarning)
            stack.enter_context(profile)
        yield profile


def peaks_between_marks(profile: Any, prefix: str) -> dict[int, int]:
    """For every ``record_function`` mark called ``prefix<number>``: its peak of CPU bytes above what it left behind."""
    changes = deque((when, count) for when, where, count in allocator_events(profile) if where == "cpu")
    peaks: dict[int, int] = {}
    for start, end, number in _marks(profile, prefix):
        alive = peak = 0
        while changes and changes[0][0] <= end:
            when, count = changes.popleft()
            if when >= start:
                alive += count
                peak = max(peak, alive)
        peaks[number] = peak - alive
    return peaks


def _marks(profile: Any, prefix: str) -> list[tuple[int, int, int]]:
    """``(start, end, number)`` of every mark called ``prefix<number>``, in order; times in ns."""
    return sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns(), int(event.name().removeprefix(prefix)))
        for event in _results(profile).events()
        if event.name().startswith(prefix)
    )


def allocator_events(profile: Any) -> list[tuple[int, str, int]]:
    """``(time in ns, device type, signed bytes)`` of every allocation that a profile saw, and its release, in order.

    Releases of blocks from before the profile are left out: torch reports them only where an earlier profile happened
    to see a block at the same address, and with that block's size.
    """
    # Blocks are told apart with their sizes too: another thread may take an address before its release is reported.
    alive: Counter[tuple[str, int, int]] = Counter()
    events = []
    for when, where, address, count in _reported(profile):
        block = (where, address, abs(count))
        if count > 0:
            alive[block] += 1
        elif alive[block]:
            alive[block] -= 1
        else:
            continue
        events.append((when, where, count))
    return events


def _reported(profile: Any) -> list[tuple[int, str, int, int]]:
    """``(time in ns, device type, address, signed bytes)`` of everything the allocator reported, in order of time."""
    require(MEMORY)
    from torch._C._profiler import _EventType

    found = []
    pending = list(_results(profile).experimental_event_tree())
    while pending:
        event = pending.pop()
        pending += event.children
        if event.tag == _EventType.Allocation:
            block = event.extra_fields
            found.append((event.start_time_ns, block.device.type, block.ptr, block.alloc_size))
    return sorted(found, key=lambda event: event[0])


def _results(profile: Any) -> Any:
    """What the profiler's own library recorded."""
    return attribute(profile, "profiler.kineto_results", MEMORY)
