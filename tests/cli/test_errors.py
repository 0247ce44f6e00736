from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.command import FILE, RECOMPUTE, Command, Crash, Double, Idle, Rename, install, target


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


# --- passes that do not fit ------------------------------------------------------------------------------------------


def test_all_mistakes_in_passes_reach_the_user_at_once(run: Command) -> None:
    outcome = run("dump", target("plain"), "-p", "recmpute,recompute{chekpoints=blocks.0}")
    assert (outcome.code, outcome.out) == (2, "")
    assert "there is no pass called 'recmpute'; did you mean 'recompute', 'recompute-evenly'?" in outcome.err
    assert "no option 'chekpoints'; did you mean 'checkpoints'?" in outcome.err
    assert "Traceback" not in outcome.err


def test_a_failing_pass_names_itself_and_the_pipeline(run: Command) -> None:
    outcome = run("dump", target("plain"), "-p", "recompute{checkpoints=block.0}")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err.startswith(
        "graphopt: error: pass 1/1 of the joint stage, 'recompute', failed: 'block.0' names no tensor;"
    )
    assert "did you mean 'blocks.0'" in outcome.err
    assert "\n  pipeline: >>> recompute{checkpoints=block.0} <<<\n" in outcome.err
    assert "Traceback" not in outcome.err


def test_traceback_on_request(run: Command) -> None:
    outcome = run("dump", target("plain"), "-p", "recompute{checkpoints=block.0}", "--traceback")
    assert (outcome.code, outcome.out) == (1, "")
    assert "Traceback (most recent call last):" in outcome.err
    assert "PassError: pass 1/1" in outcome.err
    assert "pipeline: >>> recompute" in outcome.err


def test_passes_of_a_later_stage_are_not_dropped_silently(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = run("dump", target("plain"), "-p", RECOMPUTE, "--stage", "forward")
    assert outcome.code == 2
    assert "'recompute' (a joint pass) would not run" in outcome.err
    assert "use --stage joint" in outcome.err
    install(monkeypatch, Crash)
    outcome = run("dump", target("plain"), "-p", "crash")
    assert outcome.code == 2
    assert "'crash' (a step pass) would not run" in outcome.err
    assert "'optimizer'" in outcome.err


def test_a_pass_that_crashes(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Crash)
    outcome = run("memory", target("step"), "-p", "crash")
    assert (outcome.code, outcome.out) == (1, "")
    assert "'crash', failed: ValueError: nobody expected this" in outcome.err
    assert outcome.err.count("nobody expected this") == 1


def test_the_step_stage_needs_an_optimizer(run: Command) -> None:
    outcome = run("dump", target("plain"), "--stage", "step")
    assert outcome.code == 2
    assert "gives no optimizer" in outcome.err


@pytest.mark.sweep
def test_a_pass_that_did_nothing_is_reported(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Idle)
    outcome = run("dump", target("plain"), "-p", "idle")
    assert outcome.code == 0
    assert outcome.err.startswith("graphopt: warning: idle: nothing: there is no work; ")
    assert outcome.err.count("\n") == 1


def test_verify_numerics_compares_results(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("dump", target("with_loss"), "-p", RECOMPUTE, "--verify", "numerics").code == 0
    install(monkeypatch, Double)
    assert run("dump", target("with_loss"), "-p", "double").code == 0
    outcome = run("dump", target("with_loss"), "-p", "double", "--verify", "numerics")
    assert (outcome.code, outcome.out) == (1, "")
    assert "the loss loss differs" in outcome.err
    outcome = run("dump", target("with_loss"), "--stage", "forward", "--verify", "numerics")
    assert outcome.code == 2
    assert "--verify numerics compares outputs and gradients" in outcome.err


@pytest.mark.sweep
def test_verify_off_skips_the_invariants(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Rename)
    outcome = run("dump", target("plain"), "-p", "rename")
    assert outcome.code == 1
    assert "the outputs changed" in outcome.err
    assert run("dump", target("plain"), "-p", "rename", "--verify", "off").code == 0


@pytest.mark.sweep
def test_dump_directory_of_the_environment(run: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GRAPHOPT_DUMP", str(tmp_path))
    assert run("diff", target("plain"), "-p", RECOMPUTE).code == 0
    (manifest,) = tmp_path.glob("run*/rank0/manifest.json")
    assert json.loads(manifest.read_text(encoding="utf-8"))["pipeline"] == RECOMPUTE


# --- targets ---------------------------------------------------------------------------------------------------------


def written(folder: Path, code: str) -> str:
    file = folder / "made.py"
    file.write_text(code, encoding="utf-8")
    return f"{file}:build"


def test_mistakes_in_a_target_are_errors_without_a_traceback(run: Command, tmp_path: Path) -> None:
    near = run("dump", target("plane"))
    assert (near.code, near.out, near.err) == (
        2,
        "",
        f"graphopt: error: {FILE} has no 'plane'; did you mean 'plain'?\n",
    )
    code = "def build():\n    error = ValueError('no')\n    error.add_note('a note')\n    raise error\n"
    text = written(tmp_path, code)
    raising = run("dump", text)
    assert (raising.code, raising.out) == (1, "")
    where = text.removesuffix(":build")
    assert (
        raising.err
        == f"graphopt: error: {text} raised ValueError: no\n  where: {where}:4 in build: raise error\n  a note\n"
    )
    assert "ValueError: no\n" in run("dump", text, "--traceback").err


def test_a_model_that_cannot_be_captured(run: Command, tmp_path: Path) -> None:
    code = (
        "import torch\nfrom torch import nn\n\n\n"
        "class Jumpy(nn.Module):\n    def forward(self, x):\n        return x if x.sum() > 0 else -x\n\n\n"
        "def build():\n    return Jumpy(), torch.zeros(2)\n"
    )
    text = written(tmp_path, code)
    outcome = run("dump", text)
    assert (outcome.code, outcome.out) == (1, "")
    assert "\ngraphopt: error: Jumpy cannot be captured" in f"\n{outcome.err}"
    assert f"where: {text.removesuffix(':build')}:7 in forward: return x if" in outcome.err


def test_interruption(run: Command, tmp_path: Path) -> None:
    outcome = run("dump", written(tmp_path, "def build():\n    raise KeyboardInterrupt\n"))
    assert (outcome.code, outcome.out, outcome.err) == (130, "", "graphopt: interrupted\n")


def test_example_inputs_that_eager_mode_does_not_take_either(run: Command, tmp_path: Path) -> None:
    code = (
        "import torch\nfrom torch import nn\n\n\n"
        "class Net(nn.Module):\n    def forward(self, x):\n        return x @ torch.zeros(3, 3)\n\n\n"
        "def build():\n    return Net(), torch.zeros(2, 5)\n"
    )
    text = written(tmp_path, code)
    outcome = run("dump", text)
    assert (outcome.code, outcome.out) == (1, "")
    assert "calling Net raises RuntimeError: " in outcome.err
    assert f"where: {text.removesuffix(':build')}:7 in forward: return x @" in outcome.err
    assert "NumPy" not in outcome.err
