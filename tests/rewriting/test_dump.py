"""The run directory that ``GRAPHOPT_DUMP`` asks for: what is in it, and the script that reproduces a failure."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphopt
from graphopt import PassError, Program
from graphopt.ir.files.serialization import SCHEMA_VERSION
from graphopt.passes import Recompute
from tests.support.training import Net

X = torch.linspace(-1, 1, 8).reshape(2, 4)


@pytest.fixture
def dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRAPHOPT_DUMP", str(tmp_path / "runs"))
    return tmp_path / "runs"


def model() -> Net:
    return Net(nn.Linear(4, 4), nn.Dropout(0.5), nn.GELU(), nn.Linear(4, 4))


def manifest_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "manifest.json").read_text(encoding="utf-8"))


def programs_of(run: Path) -> list[Program]:
    return [
        Program.from_json(json.loads((run / name).read_text(encoding="utf-8"))) for name in manifest_of(run)["files"]
    ]


def test_nothing_is_written_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    graphopt.optimize(model(), [Recompute("net.3")])(X)
    assert list(tmp_path.iterdir()) == []


def test_a_run_has_a_manifest_and_a_file_per_stage_and_pass(dump: Path) -> None:
    optimized = graphopt.optimize(model(), [Recompute("net.3")])
    optimized(X)
    run = dump / "run0" / "rank0"
    manifest = manifest_of(run)
    assert manifest["schema"] == SCHEMA_VERSION
    assert manifest["state"] == "finished"
    assert manifest["title"] == "Net"
    assert manifest["pipeline"] == "recompute{checkpoints=net.3}"
    assert manifest["environment"]["torch"] == torch.__version__
    assert manifest["environment"]["graphopt"] == graphopt.__version__
    assert manifest["error"] is None
    assert manifest["files"] == ["00-captured-forward.json", "01-captured-joint.json", "02-recompute.json"]
    assert sorted(p.name for p in run.iterdir()) == [*manifest["files"], "manifest.json"]
    (record,) = manifest["passes"]
    assert record["name"] == "recompute"
    assert record["changed"] == dict(optimized.records[0].changed.counts)
    assert record["nodes"] == [optimized.records[0].nodes_before, optimized.records[0].nodes_after]
    assert record["peak_bytes"] == [optimized.records[0].peak_before, optimized.records[0].peak_after]


@pytest.mark.sweep
def test_the_files_are_the_snapshots(dump: Path) -> None:
    optimized = graphopt.optimize(model(), [Recompute("net.3")])
    optimized(X)
    programs = programs_of(dump / "run0" / "rank0")
    assert [program.stage for program in programs] == ["forward", "joint", "joint"]
    for read, (_, kept) in zip(programs, optimized.snapshots, strict=True):
        assert read.to_text() == kept.to_text()


@pytest.mark.sweep
def test_every_capture_and_rank_has_its_own_place(dump: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    optimized = graphopt.optimize(model())
    optimized(X)
    optimized(X[:1])
    monkeypatch.setenv("RANK", "1")
    graphopt.optimize(model())(X)
    assert sorted(str(p.parent.relative_to(dump)) for p in dump.rglob("manifest.json")) == [
        "run0/rank0",
        "run1/rank0",
        "run2/rank1",
    ]


def test_a_step_is_dumped_to_its_last_stage(dump: Path) -> None:
    candidate = model()
    step = graphopt.optimize_step(
        candidate,
        torch.optim.SGD(candidate.parameters(), lr=0.1),
        [Recompute("net.3")],
        loss=lambda m, x: m(x).square().mean(),
    )
    step(X)
    (run,) = {p.parent for p in dump.rglob("manifest.json")}
    assert [program.stage for program in programs_of(run)] == ["forward", "joint", "joint", "step"]
    assert manifest_of(run)["state"] == "finished"


def test_a_failure_leaves_a_script_that_reproduces_it(dump: Path) -> None:
    optimized = graphopt.optimize(model(), [Recompute(["net.0", "net.33"])])
    with pytest.raises(PassError) as caught:
        optimized(X)
    run = dump / "run0" / "rank0"
    manifest = manifest_of(run)
    assert manifest["state"] == "failed"
    assert "'net.33' names no tensor" in manifest["error"]
    assert manifest["files"][-1].endswith("-before-recompute.json")
    notes = "\n".join(caught.value.__notes__)
    assert str(run / manifest["files"][-1]) in notes
    assert str(run / "repro.py") in notes
    done = subprocess.run([sys.executable, run / "repro.py"], capture_output=True, text=True, check=False, cwd=dump)
    assert done.returncode == 1
    assert "PassError: pass 1/1 of the joint stage, 'recompute', failed: 'net.33' names no tensor" in done.stderr
    assert "did you mean 'net.3'" in done.stderr


def test_options_with_quotes_survive_in_the_script(dump: Path) -> None:
    strange = 'it\'s "here" \\ {now}'
    with pytest.raises(PassError):
        graphopt.optimize(model(), [Recompute(["net.0", strange])])(X)
    script = dump / "run0" / "rank0" / "repro.py"
    compile(script.read_text(encoding="utf-8"), str(script), "exec")
    with pytest.raises(PassError, match=r"here.* names no tensor"):
        runpy.run_path(str(script), run_name="__main__")


def test_training_is_the_same_with_a_dump(dump: Path) -> None:
    candidate = model()
    torch.manual_seed(1)
    expected = candidate(X)
    torch.manual_seed(1)
    assert torch.equal(graphopt.optimize(candidate, [Recompute("net.3")])(X), expected)
    assert (dump / "run0").is_dir()
