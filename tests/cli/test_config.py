"""``--config FILE`` on every command that takes passes."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphopt import configs
from graphopt.passes import OffloadState
from tests.support.command import RECOMPUTE, Command, target


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


@pytest.mark.sweep(but=("memory",))
@pytest.mark.parametrize("command", ["dump", "memory", "diff", "compare", "plan", "view"])
def test_a_file_says_what_passes_say(run: Command, command: str, tmp_path: Path) -> None:
    path = configs.save(RECOMPUTE, tmp_path / "pipeline.toml")
    rest = {"plan": ["--cost", "a100-80gb"], "view": ["-o", str(tmp_path / "page.html")]}.get(command, [])
    name = target("with_loss" if command == "compare" else "plain")
    by_file = run(command, name, *rest, "--config", str(path), "--json")
    by_text = run(command, name, *rest, "--passes", RECOMPUTE, "--json")
    assert (by_file.code, by_text.code) == (0, 0), by_file.err + by_text.err
    for key in ("nodes", "diff", "program"):
        assert by_file.data.get(key) == by_text.data.get(key)
    assert by_file.data["title"] == by_text.data["title"]


def test_one_of_both(run: Command, tmp_path: Path) -> None:
    path = tmp_path / "pipeline.json"
    both = run("dump", target("plain"), "--config", str(path), "-p", RECOMPUTE)
    assert both.code == 2
    assert "not allowed with argument" in both.err
    assert run("diff", target("plain")).code == 2
    missing = run("dump", target("plain"), "--config", str(path))
    assert missing.code == 2
    assert f"there is no file '{path}'" in missing.err


def test_the_page_says_how_it_was_made(run: Command, tmp_path: Path) -> None:
    path = configs.save(RECOMPUTE, tmp_path / "pipeline.toml")
    assert run("view", target("plain"), "-o", str(tmp_path / "page.html"), "--config", str(path)).code == 0
    assert f"--config {path}" in (tmp_path / "page.html").read_text()


def test_a_file_writes_below_the_folder_that_is_allowed_alone(
    run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRAPHOPT_DUMP", raising=False)
    path = configs.save(OffloadState(folder=str(tmp_path / "states")), tmp_path / "pipeline.toml")
    refused = run("dump", target("step"), "--config", path)
    assert (refused.code, refused.out) == (2, "")
    assert f"offload-state is to write to folder='{tmp_path / 'states'}'" in refused.err
    assert "--allow-write FOLDER" in refused.err
    for command in ("dump", "memory", "diff", "plan"):
        rest = ("--cost", "a100-80gb") if command == "plan" else ()
        allowed = run(command, target("step"), "--config", path, "--allow-write", tmp_path, *rest)
        assert allowed.code == 0, allowed.err
    assert "--allow-write" in run("dump", target("step"), "--config", path, "--allow-write", "elsewhere").err
    alone = run("dump", target("step"), "--allow-write", tmp_path)
    assert alone.code == 2
    assert "--allow-write is for the passes of a file: give --config too" in alone.err
