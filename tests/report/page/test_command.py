"""``graphopt view`` and ``graphopt dump --format html``: the page from the command line."""

from __future__ import annotations

import json
import webbrowser
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import RECOMPUTE, Command, target


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


def data_of(text: str) -> dict[str, Any]:
    """The data of a page."""
    return json.loads(text.split('id="data">')[1].split("</script>")[0])


def test_view_writes_one_page_and_says_where(run: Command, tmp_path: Path) -> None:
    file = tmp_path / "step.html"
    outcome = run("view", target("step"), "--passes", RECOMPUTE, "-o", file)
    assert outcome.code == 0
    assert outcome.out == ""
    assert f"wrote {file} ({file.stat().st_size} bytes)" in outcome.err
    assert "recompute" in outcome.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step.html"]
    shown = data_of(file.read_text())
    assert [one["name"] for one in shown["passes"]] == ["recompute"]
    assert shown["pipeline"] == RECOMPUTE
    assert shown["command"] == f"graphopt view {target('step')} --passes '{RECOMPUTE}'"
    assert [snapshot["label"] for snapshot in shown["snapshots"]] == [
        "captured", "lowered", RECOMPUTE, "without passes", "lowered",
    ]  # fmt: skip


def test_view_has_a_default_file(run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("view", target("plain"), "--stage", "forward").code == 0
    shown = data_of((tmp_path / "graphopt.html").read_text())
    assert shown["command"].endswith("--stage forward")
    assert shown["stage"] == "forward"


@pytest.mark.sweep
def test_view_tells_machines_what_it_wrote(run: Command, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    outcome = run("view", target("with_loss"), "--passes", RECOMPUTE, "-o", file, "--json")
    assert outcome.data["file"] == str(file)
    assert outcome.data["bytes"] == file.stat().st_size
    assert outcome.data["stage"] == "joint"
    assert [one["name"] for one in outcome.data["passes"]] == ["recompute"]


def test_view_opens_the_browser_where_it_is_asked_to(
    run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda address: shown.append(address) or False)
    file = tmp_path / "page.html"
    assert run("view", target("plain"), "-o", file).code == 0
    assert shown == []
    outcome = run("view", target("plain"), "-o", file, "--open")
    assert shown == [file.as_uri()]
    assert f"there is no browser here; open {file} yourself" in outcome.err


def test_what_the_model_prints_is_not_in_the_way(run: Command, tmp_path: Path) -> None:
    outcome = run("view", target("talkative"), "-o", tmp_path / "page.html", "--json")
    assert outcome.data["title"] == "Small"
    assert "building the model" in outcome.err


@pytest.mark.sweep
def test_dump_writes_the_same_page(run: Command, tmp_path: Path) -> None:
    plain = run("dump", target("step"), "--passes", RECOMPUTE, "--format", "html")
    assert plain.code == 0
    each = run("dump", target("step"), "--passes", RECOMPUTE, "--format", "html", "--after-each")
    one, other = data_of(plain.out), data_of(each.out)
    assert len(one["snapshots"]) == 5
    for shown in (one, other):
        for row in shown["passes"]:
            row.pop("seconds")
    assert one == other
    assert plain.out.startswith("<!doctype html>")
    assert run("dump", target("plain"), "--json", "--format", "html").code == 2


def test_errors_come_before_the_work(run: Command, tmp_path: Path) -> None:
    outcome = run("view", target("step"), "-o", tmp_path / "none" / "page.html")
    assert outcome.code == 2
    assert "there is no folder" in outcome.err
    assert run("view", target("plain"), "--passes", "nonsense", "-o", tmp_path / "page.html").code == 2
    assert list(tmp_path.iterdir()) == []
