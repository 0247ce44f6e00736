"""``graphopt cache``: what is kept, why it was captured, what was not kept, and removing it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.command import Command
from tests.support.running import X, network, rows, sgd
from tests.support.storing import count, is_loaded, step_run, use_programs


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two captures, of which the second was made for other rows, and one that was not kept."""
    folder = use_programs(tmp_path, monkeypatch)
    step_run(network(), sgd, [(X,)], "recompute{checkpoints=net.3}")
    step_run(network(), sgd, [(rows(3),)], "recompute{checkpoints=net.3}")
    model = network()
    model.generator = torch.Generator()
    step_run(model, sgd, [(X,)])
    return folder


def keys(run: Command) -> list[str]:
    return [entry["key"] for entry in json.loads(run("cache", "--json").out)["entries"]]


def test_list_names_each_capture(run: Command, folder: Path) -> None:
    text = run("cache").out
    assert "2 captures" in text
    assert str(folder) in text
    assert text.count("recompute{checkpoints=net.3}") == 2
    data = json.loads(run("cache", "list", "--json").out)
    assert data["on"] is True
    assert [entry["model"] for entry in data["entries"]] == ["Net", "Net"]
    assert all(entry["bytes"] > 1_000 and entry["seconds"] > 0 for entry in data["entries"])


def test_list_says_which_sizes_vary(run: Command, folder: Path) -> None:
    step_run(network(), sgd, [(rows(5),), (rows(6),)])
    text = run("cache").out
    assert text.count(" fixed ") == 3
    assert "dimension 0 of args[0]: 2 to unlimited" in text
    sizes = [entry["sizes"] for entry in json.loads(run("cache", "--json").out)["entries"]]
    assert sizes == ["dimension 0 of args[0]: 2 to unlimited", "", "", ""]


def test_explain_says_what_differed_and_what_was_not_kept(run: Command, folder: Path) -> None:
    text = run("cache", "explain").out
    assert "there is no capture of Net yet" in text
    assert "call: tensor 0 was" in text
    assert "Net: .generator of Net: an object of the class torch._C.Generator" in text
    data = json.loads(run("cache", "explain", "--json").out)
    assert [item["model"] for item in data["refused"]] == ["Net"]


@pytest.mark.sweep
def test_explain_one_lists_what_it_depends_on(run: Command, folder: Path) -> None:
    newest = keys(run)[0]
    text = run("cache", "explain", newest[:8]).out
    assert f"torch: {torch.__version__}" in text
    assert "net.0.weight: float32[16, 8] on cpu" in text
    assert "function tests.support.training.mean_square" in text
    assert set(json.loads(run("cache", "explain", newest, "--json").out)["depends_on"]) >= {"model", "call", "code"}


def test_clear_removes_one_or_all(run: Command, folder: Path) -> None:
    newest = keys(run)[0]
    assert "removed 1 capture" in run("cache", "clear", newest).out
    assert count(folder) == 1
    assert not is_loaded(step_run(network(), sgd, [(rows(3),)], "recompute{checkpoints=net.3}")[1])
    assert "removed 2 captures" in run("cache", "clear").out
    assert count(folder) == 0
    assert "not kept" not in run("cache", "explain").out


@pytest.mark.sweep
def test_path_is_the_folder(run: Command, folder: Path) -> None:
    assert run("cache", "path").out.strip() == str(folder)


def test_an_unknown_key_is_an_error_and_a_broken_entry_is_shown(run: Command, folder: Path) -> None:
    unknown = run("cache", "explain", "zzz")
    assert unknown.code == 2
    assert "no capture in" in unknown.err
    newest = keys(run)[0]
    (folder / newest / "capture").write_text("nothing")
    assert "cannot be read" in run("cache").out


@pytest.mark.sweep
def test_where_it_is_off_list_says_so(run: Command, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHOPT_CACHE_PROGRAMS", "0")
    assert "it is off here" in run("cache").out
