"""What torch records of its CUDA allocator (``torch.cuda.memory._snapshot()``), read from a pickle or from JSON.

Nothing in a file is looked up, imported or called, work and memory are bounded by its bytes, and what does not have the
form that torch writes is an error with its place.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphopt.analysis.allocator.plain_pickle import read_plain_pickle
from graphopt.analysis.allocator.rules import CACHING, AllocatorRules
from graphopt.errors import GraphoptError, public
from graphopt.ir.files.checked_json import Field

__all__ = ["RecordedBlock", "RecordedEvent", "RecordedSegment", "Recording", "read_recording", "recording_of"]

ACTIONS = (
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "oom",
    "snapshot",
    "user_defined",
)
"""The kinds of events that torch records; the last three change nothing."""

_LARGEST_FILE = 2**29
_MOST_EVENTS = 4_000_000
_MOST_BLOCKS = 4_000_000
_ADDRESS = 2**64 - 1
_BYTES = 2**48


@dataclass(frozen=True, slots=True)
class RecordedEvent:
    """One event of a device.

    Attributes:
        action: what happened, as torch names it.
        address: of the block or segment; 0 where there is none.
        size: bytes that were asked for, or bytes of the segment.
        stream: of the block or segment.
    """

    action: str
    address: int
    size: int
    stream: int


@dataclass(frozen=True, slots=True)
class RecordedBlock:
    """A block in use when the recording ended.

    Attributes:
        address: of its first byte.
        size: in bytes.
        requested: bytes that were asked for.
        waiting: whether it is freed, and waits for another stream.
    """

    address: int
    size: int
    requested: int
    waiting: bool


@dataclass(frozen=True, slots=True)
class RecordedSegment:
    """A segment as it was when the recording ended; of a growing one, a range with memory behind it.

    Attributes:
        device: whose memory it is.
        address: of its first byte.
        size: in bytes.
        stream: whose blocks it holds.
        small: whether it belongs to the pool of small blocks.
        pool: the private pool that it belongs to; (0, 0) for the common one.
        grows: whether it is a part of an expandable segment.
        blocks: those in use or waiting.
    """

    device: int
    address: int
    size: int
    stream: int
    small: bool
    pool: tuple[int, ...]
    grows: bool
    blocks: tuple[RecordedBlock, ...]


@dataclass(frozen=True, slots=True)
class Recording:
    """What torch recorded: segments when it ended, and events until then.

    Attributes:
        segments: of all devices.
        traces: the events of each device, the oldest first; none where the history was not recorded.
        rules: of the allocator, by its settings in the recording; torch's defaults where it has none.
    """

    segments: tuple[RecordedSegment, ...]
    traces: tuple[tuple[RecordedEvent, ...], ...]
    rules: AllocatorRules = CACHING


@public
def read_recording(path: str | os.PathLike[str]) -> Recording:
    """Read a file that ``torch.cuda.memory._dump_snapshot`` wrote, or the same dict as JSON.

    Args:
        path: of the file, of 512 MiB at most.

    Raises:
        GraphoptError: for a file that cannot be read, is too large, or does not hold what torch writes, with the place.
    """
    file = Path(path)
    try:
        if file.stat().st_size > _LARGEST_FILE:
            raise GraphoptError(f"{file}: {file.stat().st_size} bytes; at most {_LARGEST_FILE} are read")
        data = file.read_bytes()
    except OSError as error:
        raise GraphoptError(f"{file}: {error.strerror or error}") from None
    try:
        return recording_of(read_plain_pickle(data) if data[:1] == b"\x80" else _json(data))
    except GraphoptError as error:
        raise GraphoptError(f"{file}: {error}") from None


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise GraphoptError(f"neither a pickle nor JSON: {error}") from None


@public
def recording_of(snapshot: Any) -> Recording:
    """The recording in what ``torch.cuda.memory._snapshot()`` returns.

    Args:
        snapshot: the dict, as it is or read from JSON.

    Raises:
        GraphoptError: where it does not have the form that torch gives it, with the place.

    Example:
        >>> from graphopt.analysis.allocator import recording_of
        >>> recording_of({"segments": [], "device_traces": [[]]}).traces
        ((),)
    """
    document = Field(snapshot)
    segments = tuple(_segments(document["segments"]))
    traces = tuple(_traces(document["device_traces"])) if "device_traces" in document else ()
    rules = _rules(document["allocator_settings"]) if "allocator_settings" in document else CACHING
    if any(segment.grows for segment in segments) and not rules.expandable_segments:
        rules = AllocatorRules(**{**_fields(rules), "expandable_segments": True})
    return Recording(segments, traces, rules)


def _fields(rules: AllocatorRules) -> dict[str, Any]:
    return {name: getattr(rules, name) for name in rules.__dataclass_fields__}


# --- events ----------------------------------------------------------------------------------------------------------

_KNOWN = {action: action for action in ACTIONS}


def _traces(field: Field) -> list[tuple[RecordedEvent, ...]]:
    traces: list[tuple[RecordedEvent, ...]] = []
    events = 0
    for trace in field.items(most=1024):
        found = tuple(map(_event, trace.items(most=_MOST_EVENTS - events)))
        events += len(found)
        traces.append(found)
    return traces


def _event(field: Field) -> RecordedEvent:
    action = field["action"].one_of(_KNOWN)
    known = field.value
    if action in ("oom", "snapshot", "user_defined"):
        return RecordedEvent(action, 0, 0, 0)
    address, size, stream = known.get("addr"), known.get("size"), known.get("stream", 0)
    if not (_is_whole(address, _ADDRESS) and _is_whole(size, _BYTES) and _is_whole(stream, _ADDRESS)):
        field["addr"].whole(0, _ADDRESS)
        field["size"].whole(0, _BYTES)
        field["stream"].whole(0, _ADDRESS)
    return RecordedEvent(action, address, size, stream)


def _is_whole(value: object, largest: int) -> bool:
    return type(value) is int and 0 <= value <= largest


# --- segments --------------------------------------------------------------------------------------------------------


def _segments(field: Field) -> list[RecordedSegment]:
    segments = []
    blocks = 0
    for item in field.items(most=_MOST_BLOCKS):
        segment, count = _segment(item, _MOST_BLOCKS - blocks)
        blocks += count
        segments.append(segment)
    return segments


def _segment(field: Field, most_blocks: int) -> tuple[RecordedSegment, int]:
    address, size = field["address"].whole(0, _ADDRESS), field["total_size"].whole(1, _BYTES)
    place, blocks, count = address, [], 0
    for item in field["blocks"].items(most=most_blocks):
        block, active = _block(item, place)
        if block.address != place:
            raise item.error(f"a block at {block.address}; the one before it ends at {place}")
        place += block.size
        count += 1
        if active:
            blocks.append(block)
    if place != address + size:
        raise field.error(f"a segment of {size} bytes, whose blocks have {place - address}")
    private = _pool(field["segment_pool_id"]) if "segment_pool_id" in field else (0, 0)
    small = field["segment_type"].one_of({"small": True, "large": False})
    grows = field["is_expandable"].truth() if "is_expandable" in field else False
    stream = field["stream"].whole(0, _ADDRESS)
    device = field["device"].whole(0, 1023) if "device" in field else 0
    return RecordedSegment(device, address, size, stream, small, private, grows, tuple(blocks)), count


_STATES = {"active_allocated": True, "active_pending_free": True, "active_awaiting_free": True, "inactive": False}


def _block(field: Field, place: int) -> tuple[RecordedBlock, bool]:
    """A block, and whether it is in use; older versions of torch do not write where it is."""
    active = field["state"].one_of(_STATES)
    size = field["size"].whole(1, _BYTES)
    address = field["address"].whole(0, _ADDRESS) if "address" in field else place
    requested = field["requested_size"].whole(0, _BYTES) if "requested_size" in field else size
    return RecordedBlock(address, size, requested, field.value["state"] != "active_allocated"), active


def _pool(field: Field) -> tuple[int, ...]:
    value = field.value
    if not isinstance(value, (tuple, list)) or len(value) != 2 or not all(_is_whole(part, _ADDRESS) for part in value):
        raise field.expected("two whole numbers")
    return tuple(value)


# --- settings --------------------------------------------------------------------------------------------------------


def _rules(field: Field) -> AllocatorRules:
    """The rules that settings of torch's allocator stand for."""
    if not field.is_object:
        raise field.expected("an object")
    most = field["max_split_size"].whole(-1, _ADDRESS) if "max_split_size" in field else -1
    grows = field["expandable_segments"].truth() if "expandable_segments" in field else False
    divisions: tuple[tuple[int, int], ...] = ()
    if "roundup_power2_divisions" in field:
        found = dict(field["roundup_power2_divisions"].entries(most=64))
        divisions = _divisions({name: item.whole(0, 2**16) for name, item in found.items()}, field)
    return AllocatorRules(
        expandable_segments=grows,
        max_split_size=most if 0 < most < _BYTES else 0,
        roundup_power2_divisions=divisions,
    )


def _divisions(found: Mapping[str, int], field: Field) -> tuple[tuple[int, int], ...]:
    """Divisions by the bytes from which on they hold; torch writes those in MiB."""
    wrong = next((name for name in found if not (name.isascii() and name.isdigit() and len(name) < 9)), None)
    if wrong is not None:
        raise field["roundup_power2_divisions"].error(f"{wrong!r} is no number of MiB")
    pairs = sorted((int(name) << 20, number) for name, number in found.items())
    return tuple(pairs) if any(number > 1 for _, number in pairs) else ()
