"""``graphopt profile``: what is measured is printed, written, and taken by other commands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from graphopt.analysis.costs.calibration import measured_profile
from graphopt.analysis.costs.profiles import DeviceProfile
from tests.support.command import Command, target
from tests.support.costs import use_folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


@pytest.mark.sweep
def test_a_measured_machine_is_a_device_for_other_commands(
    run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_folder(tmp_path, monkeypatch)
    path = tmp_path / "mine.toml"
    outcome = run("profile", "cpu", "-o", path)
    assert outcome.code == 0, outcome.err
    assert "matrix products in bfloat16" in outcome.out
    assert "disk, the slower direction" in outcome.out
    assert f"wrote {path}" in outcome.err
    profile = DeviceProfile.load(path)
    assert profile == measured_profile("cpu")  # each figure is measured once
    assert profile.disk_bandwidth > 0
    assert "measured by graphopt" in profile.sources[0]
    again = run("profile", "--json")
    assert again.data["profile"]["flops"] == profile.flops
    for option in ("--cost", "--device"):
        planned = run("plan", target("plain"), option, path, "--json")
        assert planned.code == 0, planned.err
        assert planned.data["budgets"] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("cuda:99",), "nothing can be measured on 'cuda:99' here"),
        (("toaster",), "'toaster' is not a device of this machine: write cpu, cuda or cuda:1"),
        (("cqu",), "did you mean 'cpu'"),
        (("h101",), "figures of h100-80gb, h100-pcie-80gb come with graphopt"),
        (("cpu", "-o", "profile.json"), "let profile.json end in .toml"),
        (("cpu", "-o", "missing/profile.toml"), "there is no folder missing"),
    ],
)
def test_what_cannot_be_measured_or_written_is_refused(
    run: Command, arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = run("profile", *arguments)
    assert outcome.code == 2
    assert message in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_a_device_that_is_neither_a_name_nor_a_file_is_refused(run: Command, tmp_path: Path) -> None:
    for wrong in ("h100", "h101"):
        outcome = run("plan", target("plain"), "--device", wrong)
        assert outcome.code == 2
        assert "did you mean" in outcome.err
        assert "h100-80gb" in outcome.err.partition("did you mean")[2]
    gone = run("plan", target("plain"), "--cost", tmp_path / "gone.toml")
    assert gone.code == 2
    assert "there is no file" in gone.err
    both = run("plan", target("plain"), "--cost", tmp_path / "mine.toml", "--remeasure")
    assert both.code == 2


def test_calls_of_a_target_are_measured_for_other_machines(
    run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_folder(tmp_path, monkeypatch)
    path, plain = tmp_path / "mine.toml", tmp_path / "plain.toml"
    outcome = run("profile", "cpu", "--calls", target("wide_filters"), "-o", path)
    assert outcome.code == 0, outcome.err
    profile = DeviceProfile.load(path)
    assert {call.partition("(")[0] for call in profile.temporaries} == {
        "aten.convolution.default",
        "aten.convolution_backward.default",
    }
    assert f"{len(profile.temporaries)}, up to" in outcome.out
    replace(profile, temporaries={}).save(plain)
    peaks = {}
    for name, arguments in {"here": (), "measured": ("--device", path), "plain": ("--device", plain)}.items():
        planned = run("plan", target("wide_filters"), *arguments, "--json")
        assert planned.code == 0, planned.err
        peaks[name] = planned.data["plain"]["peak_bytes"]
    assert peaks["measured"] == peaks["here"]
    assert peaks["plain"] < peaks["here"]


def test_a_target_of_calls_that_is_not_there_is_refused(
    run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_folder(tmp_path, monkeypatch)
    outcome = run("profile", "cpu", "--calls", "missing.py:factory", "-o", tmp_path / "mine.toml")
    assert outcome.code == 2
    assert "there is no file 'missing.py'" in outcome.err
    assert not (tmp_path / "mine.toml").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--calls", "hf:config.json"), "hf:config.json is a configuration without a batch: give --tokens"),
        (("--batch", "2"), "--batch is for calls of a target such as hf:config.json, and --calls names none"),
        (("--calls", target("plain"), "--tokens", "4"), "--tokens is for calls of a target such as hf:config.json"),
    ],
)
def test_what_describes_no_batch_is_refused(run: Command, arguments: tuple[str, ...], message: str) -> None:
    outcome = run("profile", "cpu", *arguments)
    assert outcome.code == 2
    assert message in outcome.err
