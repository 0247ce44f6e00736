"""Files that torch's recording of its allocator is in, whole and damaged."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from graphopt.analysis.allocator import CACHING, AllocatorRules, read_recording, recorded_trace, recording_of
from graphopt.errors import GraphoptError

MIB = 2**20
BASE = 2**46

SNAPSHOT: dict[str, Any] = {
    "segments": [
        {
            "device": 0,
            "address": BASE,
            "total_size": 2 * MIB,
            "allocated_size": 1024,
            "active_size": 1024,
            "requested_size": 1000,
            "stream": 0,
            "segment_type": "small",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [],
            "blocks": [
                {"address": BASE, "size": 1024, "requested_size": 1000, "state": "active_allocated", "frames": []},
                {"address": BASE + 1024, "size": 2 * MIB - 1024, "requested_size": 0, "state": "inactive"},
            ],
        }
    ],
    "device_traces": [
        [
            {"action": "segment_alloc", "addr": BASE, "size": 2 * MIB, "stream": 0, "time_us": 7, "frames": []},
            {"action": "alloc", "addr": BASE, "size": 1000, "stream": 0, "time_us": 8, "frames": []},
            {"action": "snapshot", "addr": 0, "size": 1024, "stream": 0},
            {"action": "oom", "device_free": 5, "size": 10**12, "stream": 0},
        ],
        [],
    ],
    "allocator_settings": {
        "PYTORCH_CUDA_ALLOC_CONF": "",
        "max_split_size": -1,
        "garbage_collection_threshold": 0.0,
        "expandable_segments": False,
        "roundup_power2_divisions": {str(2**power): 0 for power in range(16)},
    },
    "external_annotations": [],
}


def as_pickle(snapshot: Any) -> bytes:
    return pickle.dumps(snapshot)


def as_json(snapshot: Any) -> bytes:
    return json.dumps(snapshot).encode()


@pytest.mark.parametrize("write", [as_pickle, as_json])
def test_a_recording_is_read_from_a_pickle_and_from_json(write: Callable[[Any], bytes], tmp_path: Path) -> None:
    file = tmp_path / "snapshot"
    file.write_bytes(write(SNAPSHOT))
    found = read_recording(file)
    (segment,) = found.segments
    assert (segment.address, segment.size, segment.small, segment.grows) == (BASE, 2 * MIB, True, False)
    assert [(block.address, block.size, block.requested) for block in segment.blocks] == [(BASE, 1024, 1000)]
    assert [event.action for event in found.traces[0]] == ["segment_alloc", "alloc", "snapshot", "oom"]
    assert found.traces[1] == ()
    assert found.rules == CACHING


def test_settings_give_rules() -> None:
    snapshot = copy.deepcopy(SNAPSHOT)
    divisions = {str(2**power): 1 if power < 8 else 4 for power in range(16)}
    snapshot["allocator_settings"] |= {
        "max_split_size": 200 * MIB,
        "expandable_segments": True,
        "roundup_power2_divisions": divisions,
    }
    rules = recording_of(snapshot).rules
    assert (rules.max_split_size, rules.expandable_segments) == (200 * MIB, True)
    assert rules.block_bytes(100 * MIB + 1) == 100 * MIB + 512
    assert rules.block_bytes(300 * MIB) == 320 * MIB


def test_older_recordings_lack_addresses_of_blocks_and_settings() -> None:
    snapshot = copy.deepcopy(SNAPSHOT)
    del snapshot["allocator_settings"]
    for block in snapshot["segments"][0]["blocks"]:
        del block["address"], block["requested_size"]
    found = recording_of(snapshot)
    assert found.rules == AllocatorRules()
    assert [(block.address, block.requested) for block in found.segments[0].blocks] == [(BASE, 1024)]


def test_a_segment_that_grows_says_so_without_settings() -> None:
    snapshot = copy.deepcopy(SNAPSHOT)
    del snapshot["allocator_settings"]
    snapshot["segments"][0]["is_expandable"] = True
    assert recording_of(snapshot).rules.expandable_segments


def damaged(path: str, value: Any) -> dict[str, Any]:
    """The recording with another value at a place."""
    snapshot = copy.deepcopy(SNAPSHOT)
    place: Any = snapshot
    *above, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    for part in above:
        place = place[part]
    if value is KeyError:
        del place[last]
    else:
        place[last] = value
    return snapshot


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("segments", KeyError, r"'segments' is missing"),
        ("segments", {}, r"\$\.segments: expected a list"),
        ("segments.0.address", -1, r"\$\.segments\[0\]\.address: expected a whole number"),
        ("segments.0.address", 1.0, r"\$\.segments\[0\]\.address: expected a whole number"),
        ("segments.0.total_size", 4 * MIB, r"segments\[0\]: a segment of 4194304 bytes, whose blocks have 2097152"),
        ("segments.0.segment_type", "middle", r"segment_type: 'middle' is not known here"),
        ("segments.0.segment_pool_id", (0, 0, 1), r"segment_pool_id: expected two whole numbers"),
        ("segments.0.blocks.1.address", BASE, r"blocks\[1\]: a block at \d+; the one before it ends at"),
        ("segments.0.blocks.0.state", "activ_allocated", r"state: .* did you mean 'active_allocated'"),
        ("segments.0.blocks.0.size", True, r"size: expected a whole number"),
        ("device_traces.0", None, r"device_traces\[0\]: expected a list"),
        ("device_traces.0.1.action", "allocate", r"device_traces\[0\]\[1\].action: .* did you mean 'alloc'"),
        ("device_traces.0.1.addr", "x", r"device_traces\[0\]\[1\].addr: expected a whole number"),
        ("device_traces.0.1.size", 2**60, r"device_traces\[0\]\[1\].size: expected a whole number"),
        ("device_traces.0.1.size", KeyError, r"device_traces\[0\]\[1\].?: 'size' is missing"),
        ("device_traces.0.1", [1], r"device_traces\[0\]\[1\]: 'action' is missing"),
        ("allocator_settings", 3, r"allocator_settings: expected an object"),
        ("allocator_settings.expandable_segments", 1, r"expandable_segments: expected true or false"),
        ("allocator_settings.roundup_power2_divisions", {"a": 2}, r"'a' is no number of MiB"),
    ],
)
def test_what_has_another_form_is_an_error_with_its_place(path: str, value: Any, message: str) -> None:
    with pytest.raises(GraphoptError, match=message):
        recording_of(damaged(path, value))


@pytest.mark.parametrize("data", [b"", b"{", b"\x80", b"[1]", b"3", b"\xff\xfe", b"[" * 100_000, b"\x80\x04N."])
def test_files_of_other_kinds_are_errors_with_their_name(data: bytes, tmp_path: Path) -> None:
    file = tmp_path / "other.pickle"
    file.write_bytes(data)
    with pytest.raises(GraphoptError, match=r"other\.pickle: "):
        read_recording(file)


def test_files_that_cannot_be_read_are_errors(tmp_path: Path) -> None:
    with pytest.raises(GraphoptError, match="none: No such file"):
        read_recording(tmp_path / "none")
    with pytest.raises(GraphoptError, match="Is a directory"):
        read_recording(tmp_path)


def test_one_list_that_stands_for_many_events_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_trace, "_MOST_EVENTS", 1000)
    trace = SNAPSHOT["device_traces"][0] * 100
    with pytest.raises(GraphoptError, match=r"device_traces\[2\]: a list of 400 items; at most 200 are read"):
        recording_of({"segments": [], "device_traces": [trace] * 10})
