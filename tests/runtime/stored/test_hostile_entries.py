"""Entries that are cut short, changed, or written by a stranger: training captures as usual, and says why."""

from __future__ import annotations

import copy
import json
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from graphopt import GraphoptError
from graphopt.runtime.stored.checked_file import read_checked, write_checked
from graphopt.runtime.stored.program_folder import entries, make_room
from tests.support.running import X, network, rows, sgd
from tests.support.storing import drop_in_run, is_loaded, step_run, use_programs
from tests.support.training import Training, assert_same

BATCHES = [(X,)] * 2


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use_programs(tmp_path, monkeypatch)


@pytest.fixture
def stored(folder: Path) -> tuple[Training, list[Path]]:
    """What training leaves, and the files of its capture."""
    found, _ = step_run(network(), sgd, BATCHES)
    (entry,) = entries(folder)
    return found, sorted(entry.folder.iterdir())


Change = Callable[[bytes], bytes]
CHANGES: dict[str, Change] = {
    "empty": lambda data: b"",
    "cut short": lambda data: data[: len(data) // 2],
    "one bit": lambda data: data[:-5] + bytes([data[-5] ^ 1]) + data[-4:],
    "other kind": lambda data: b"\x80\x04cos\nsystem\n(S'false'\ntR.",
    "text": lambda data: b"{}",
}


@pytest.mark.sweep
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_files_that_are_not_whole(
    stored: tuple[Training, list[Path]], change: Change, caplog: pytest.LogCaptureFixture
) -> None:
    expected, files = stored
    kept = {file: file.read_bytes() for file in files}
    for file in files:
        for other in files:
            other.write_bytes(kept[other])
        file.write_bytes(change(kept[file]))
        caplog.clear()
        found, _ = step_run(network(), sgd, BATCHES)
        assert_same(expected, found, file.name)
        is_read = file.name != "stage-joint"  # which only accumulation and new settings need
        assert (file.name in caplog.text) == is_read
        assert ("cannot be used" in caplog.text) == is_read


def test_a_missing_program_is_a_miss(stored: tuple[Training, list[Path]]) -> None:
    expected, files = stored
    next(file for file in files if file.name == "stage-joint").unlink()
    found, step = step_run(network(), sgd, BATCHES)
    assert not is_loaded(step)
    assert_same(expected, found, "missing")


def test_a_header_that_leaves_out_the_update_is_no_capture_of_a_step(
    stored: tuple[Training, list[Path]], caplog: pytest.LogCaptureFixture
) -> None:
    expected, files = stored
    header = next(file for file in files if file.name == "capture")
    write_checked(header, {**read_checked(header).value, "stages": ["joint"]})
    assert_same(expected, step_run(network(), sgd, BATCHES)[0], "without its update")
    assert "expected the stages joint and step" in caplog.text


def _places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a document outside of the arguments of calls, whose numbers decide what is computed."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    found = [path] if path else []
    for key, item in items:
        if key not in ("args", "kwargs", "base64", "seconds", "why"):
            found += _places(item, (*path, key))
    return found


def _put(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    changed = copy.deepcopy(data)
    owner = changed
    for key in path[:-1]:
        owner = owner[key]
    if value is _GONE:
        del owner[path[-1]]
    else:
        owner[path[-1]] = value
    return changed


_GONE = object()
VALUES = (None, True, -1, 2**70, 1.5, "", "x\nimport os", "__import__('os').system('false')", [], {}, [[[]]], _GONE)


def change_everywhere(stored: tuple[Training, list[Path]], number: int, run: Callable[[], Training]) -> None:
    expected, files = stored
    draw = random.Random(number)
    kept = {file: read_checked(file).value for file in files}
    file = draw.choice(files)
    path, value = draw.choice(_places(kept[file])), draw.choice(VALUES)
    write_checked(file, _put(kept[file], path, value))
    try:
        assert_same(expected, run(), f"{file.name} {path} {value!r}")
    finally:
        for other in files:
            write_checked(other, kept[other])


def test_entries_whose_data_is_changed_anywhere(stored: tuple[Training, list[Path]]) -> None:
    for number in range(12):
        change_everywhere(stored, number, lambda: step_run(network(), sgd, BATCHES)[0])


@pytest.mark.sweep
def test_entries_of_drop_in_models_whose_data_is_changed_anywhere(folder: Path) -> None:
    expected, _ = drop_in_run(network(), sgd, BATCHES)
    (entry,) = entries(folder)
    stored = expected, sorted(entry.folder.iterdir())
    for number in range(5):
        change_everywhere(stored, number, lambda: drop_in_run(network(), sgd, BATCHES)[0])


@pytest.mark.sweep
def test_many_entries_whose_data_is_changed(stored: tuple[Training, list[Path]]) -> None:
    for number in range(700):
        change_everywhere(stored, number, lambda: step_run(network(), sgd, BATCHES)[0])


def _first_call(data: Any) -> Any:
    return next(node for node in data["nodes"] if node["op"] == "call_function")


def _rename(data: Any, old: str, new: str) -> None:
    data["inputs"] = [[role, target.replace(old, new)] for role, target in data["inputs"]]


PROGRAMS: dict[str, Callable[[Any], None]] = {
    "a function of Python": lambda data: _first_call(data).update(target="os.system"),
    "a name that is code": lambda data: _first_call(data).update(name="x); import os; (y"),
    "a parameter that there is not": lambda data: _rename(data, "net.0.weight", "net.9.weight"),
    "another parameter of another shape": lambda data: _rename(data, "net.5.weight", "net.0.weight"),
    "a size": lambda data: data["symbols"].update({"__import__('os')": 3}),
}


@pytest.mark.sweep(but=("another parameter of another shape", "a size"))
@pytest.mark.parametrize("change", PROGRAMS.values(), ids=PROGRAMS)
def test_programs_that_a_stranger_wrote_do_not_run(
    stored: tuple[Training, list[Path]], change: Callable[[Any], None], caplog: pytest.LogCaptureFixture
) -> None:
    expected, files = stored
    for file in files:
        if file.name != "capture":
            data = read_checked(file).value
            change(data)
            write_checked(file, data)
    found, _ = step_run(network(), sgd, BATCHES)
    assert_same(expected, found, "hostile")
    assert "cannot be used" in caplog.text


def test_lists_of_a_fused_kernel_have_to_fit_each_other(stored: tuple[Training, list[Path]]) -> None:
    expected, files = stored
    for file in files:
        if file.name != "capture":
            data = read_checked(file).value
            for node in data["nodes"]:
                if "_fused_sgd" in str(node["target"]):
                    node["args"][0]["list"].reverse()
            write_checked(file, data)
    assert_same(expected, step_run(network(), sgd, BATCHES)[0], "reversed")


# --- files -----------------------------------------------------------------------------------------------------------


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_checked(tmp_path / "file", {"a": [1, "ü", None]})
    assert read_checked(tmp_path / "file").value == {"a": [1, "ü", None]}
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_text_that_is_no_json_or_too_deep_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    for text in (b"nothing", b"[" * 200_000, b"\xff\xfe"):
        with monkeypatch.context() as patch:
            patch.setattr(json, "dumps", lambda data, text=text, **_: text.decode("latin-1"))
            write_checked(path, {})
        with pytest.raises(GraphoptError, match="cannot be read"):
            read_checked(path)


def test_text_that_unpacks_to_more_than_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphopt.runtime.stored.checked_file._LARGEST_TEXT", 1_000)
    write_checked(tmp_path / "file", "x" * 10_000)
    assert len(zlib.compress(b"x" * 10_000)) < 1_000
    with pytest.raises(GraphoptError, match="more than 1000 bytes"):
        read_checked(tmp_path / "file")


@pytest.mark.sweep
def test_what_was_used_longest_ago_goes_first(folder: Path) -> None:
    for count in (2, 3, 4):
        step_run(network(), sgd, [(rows(count),)])
    oldest = entries(folder)[-1]
    assert is_loaded(step_run(network(), sgd, [(rows(2),)])[1])
    found = entries(folder)
    assert found[0].key == oldest.key
    assert make_room(folder, found[0].bytes + found[1].bytes) == 1
    assert [entry.key for entry in entries(folder)] == [entry.key for entry in found[:2]]


def test_two_that_write_one_entry_at_once_leave_a_whole_one(folder: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    path = folder / "entry" / "file"
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: write_checked(path, [number] * 5_000), range(20)))
    read = read_checked(path).value
    assert read == [read[0]] * 5_000
    assert [file.name for file in path.parent.iterdir()] == ["file"]
    assert torch.tensor(read).unique().numel() == 1
