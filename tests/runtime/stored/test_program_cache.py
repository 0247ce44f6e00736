"""Captures that survive the process: what is read trains like what was captured, to the last bit, or is not used."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graphopt
from graphopt.report.page import page_of_snapshots
from graphopt.report.page.story import story_of_snapshots
from tests.support.paths import ROOT
from tests.support.running import X, adamw, network, rows, sgd
from tests.support.storing import count, drop_in_run, is_loaded, reasons, step_run, use_programs
from tests.support.training import Blocks, Training, assert_same, mean_square, next_token

TOKENS = torch.arange(12).reshape(2, 6) % 11
PASSES = {
    "none": "",
    "recompute": "recompute{checkpoints=net.3}",
    "offload": "offload",
    "mixed-precision": "mixed-precision{dtype=bfloat16}",
    "loss scale": "mixed-precision{dtype=float16}",
    "fuse-update": "fuse-update",
    "fit-memory": "fit-memory{budget=6.1kB}",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use_programs(tmp_path, monkeypatch)


# --- what is read is what was captured -------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("passes", PASSES.values(), ids=PASSES)
def test_a_stored_step_trains_like_a_captured_one(folder: Path, passes: str) -> None:
    first, captured = step_run(network(), adamw, [(X,)] * 3, passes)
    second, loaded = step_run(network(), adamw, [(X,)] * 3, passes)
    assert (is_loaded(captured), is_loaded(loaded), count(folder)) == (False, True, 1)
    assert_same(first, second, "loaded")
    assert [(r.spec, r.stage, r.changed.counts) for r in loaded.records] == [
        (r.spec, r.stage, r.changed.counts) for r in captured.records
    ]
    assert loaded.program.memory().peak_bytes == captured.program.memory().peak_bytes
    assert loaded.program.to_graph_module().code == captured.program.to_graph_module().code


@pytest.mark.sweep(but=("recompute",))
@pytest.mark.parametrize(
    "passes", ["", PASSES["recompute"], PASSES["mixed-precision"]], ids=["none", "recompute", "bf16"]
)
def test_a_stored_drop_in_model_trains_like_a_captured_one(folder: Path, passes: str) -> None:
    first, captured = drop_in_run(network(), sgd, [(X,)] * 3, passes)
    second, loaded = drop_in_run(network(), sgd, [(X,)] * 3, passes)
    assert (is_loaded(captured), is_loaded(loaded)) == (False, True)
    assert_same(first, second, "loaded")


class Several(nn.Module):
    """Batch statistics, a constant, an integer result, results in containers, an input with a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 5)
        self.drop, self.shift = nn.Dropout(0.3), torch.arange(5.0)

    def forward(self, x: torch.Tensor, number: int = 2) -> dict[str, Any]:
        h = self.drop(torch.relu(self.norm(self.conv(x)))).mean((2, 3))
        return {"y": self.head(h) + self.shift, "more": [h.argmax(1), (number, None)]}


@pytest.mark.sweep
def test_results_in_containers_buffers_and_gradients_of_inputs_are_as_before(folder: Path) -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        result = model(x)
        assert result["more"][1] == (2, None)
        assert result["more"][0].dtype == torch.int64
        return result["y"].square().mean()

    torch.manual_seed(3)
    model, batches = Several(), [(torch.randn(2, 3, 6, 6, requires_grad=True),)] * 3
    first, _ = drop_in_run(model, sgd, batches, loss=loss)
    second, loaded = drop_in_run(model, sgd, batches, loss=loss)
    assert is_loaded(loaded)
    assert_same(first, second, "loaded")


def test_a_constant_is_the_models_own_tensor(folder: Path) -> None:
    torch.manual_seed(3)
    model, x = Several(), torch.randn(2, 3, 6, 6)
    for _ in range(2):
        optimized = graphopt.optimize(model)
        torch.manual_seed(1)
        before = optimized(x)["y"]
        model.shift.add_(1)
        torch.manual_seed(1)
        assert not torch.equal(optimized(x)["y"], before)
        model.shift.sub_(1)
    assert is_loaded(optimized)


def test_accumulation_has_its_programs_there_too(folder: Path) -> None:
    batches = [(rows(4),), (rows(4) * 2,)] * 3
    first, _ = step_run(network(), adamw, batches, accumulate=2)
    second, loaded = step_run(network(), adamw, batches, accumulate=2)
    assert is_loaded(loaded)
    assert_same(first, second, "loaded")
    assert_same(step_run(network(), adamw, batches, accumulate=3)[0], _plainly(batches, accumulate=3), "another number")


def _plainly(batches: list[tuple[Any, ...]], **options: Any) -> Training:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRAPHOPT_CACHE_PROGRAMS", "0")
        found, step = step_run(network(), adamw, batches, **options)
        assert not is_loaded(step)
        return found


def test_settings_that_change_are_traced_anew(folder: Path) -> None:
    def run() -> tuple[list[torch.Tensor], Any]:
        model = network()
        optimizer = sgd(model.parameters())
        step = graphopt.optimize_step(model, optimizer, loss=mean_square)
        torch.manual_seed(1)
        losses = [step(X)]
        optimizer.param_groups[0]["momentum"] = 0.5
        optimizer.param_groups[0]["lr"] = 0.01
        return [*losses, step(X), step(X)], step

    first, captured = run()
    second, _ = run()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert captured.records == []


def test_a_run_goes_on_from_a_checkpoint(folder: Path) -> None:
    whole, _ = step_run(network(0.0), adamw, [(X,)] * 4)
    model = network(0.0)
    optimizer = adamw(model.parameters())
    step = graphopt.optimize_step(model, optimizer, loss=mean_square)
    for _ in range(2):
        step(X)
    again, resumed = network(0.0), None
    again.load_state_dict(model.state_dict())
    other = adamw(again.parameters())
    other.load_state_dict(optimizer.state_dict())
    resumed = graphopt.optimize_step(again, other, loss=mean_square)
    losses = [resumed(X) for _ in range(2)]
    assert is_loaded(resumed)
    assert [torch.equal(losses[n], whole.tensors[f"{n + 2}.loss"]) for n in range(2)] == [True, True]


def test_a_language_model_and_its_evaluation(folder: Path) -> None:
    torch.manual_seed(0)
    model = Blocks(layers=2)
    first, captured = step_run(model, adamw, [(TOKENS,)] * 3, "recompute{checkpoints=blocks.*}", loss=next_token)
    second, loaded = step_run(model, adamw, [(TOKENS,)] * 3, "recompute{checkpoints=blocks.*}", loss=next_token)
    assert is_loaded(loaded)
    assert_same(first, second, "loaded")
    assert torch.equal(captured.evaluate(TOKENS), loaded.evaluate(TOKENS))


_SCRIPT = """
import sys, torch, graphopt
from graphopt.passes import Recompute
sys.path.insert(0, {root!r})
from tests.support.training import Blocks, next_token
torch.manual_seed(0)
model = Blocks(layers=2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens = torch.arange(12).reshape(2, 6) % 11
def loss(model, tokens):
    return next_token(model, tokens)
step = graphopt.optimize_step(model, optimizer, [Recompute("blocks.*")], loss=loss)
losses = [step(tokens).item() for _ in range(3)]
print(step.snapshots[-1][0], losses, model.head.weight.sum().item(), torch.rand(1).item(), sep="|")
"""


def test_a_second_process_reads_what_the_first_captured(folder: Path, tmp_path: Path) -> None:
    """Also where it imports graphopt through a link to its folder."""
    link = tmp_path / "link"
    link.symlink_to(ROOT)
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT.format(root=str(ROOT)))
    found = []
    for seed, place in (("1", ROOT), ("2", link)):
        settings = {**os.environ, "PYTHONPATH": str(place), "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, str(script)], env=settings, capture_output=True, text=True, check=True)
        found.append(done.stdout.strip().split("|"))
    assert not found[0][0].endswith("loaded from the cache")
    assert found[1][0].endswith("loaded from the cache")
    assert found[0][1:] == found[1][1:]
    assert count(folder) == 1


# --- what is something else is captured ------------------------------------------------------------------------------

SLOPE = 2.0


class Reads(nn.Module):
    """Its result depends on an attribute, a global variable, a class attribute and a helper's closure."""

    power = 1

    def __init__(self, helper: Callable[[torch.Tensor], torch.Tensor] = torch.tanh) -> None:
        super().__init__()
        self.linear, self.scale, self.helper = nn.Linear(8, 8), 1.0, helper

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.helper(self.linear(x)) * self.scale * SLOPE
        return x * float(os.environ.get("GRAPHOPT_TEST_FACTOR", "1")) * self.power


def _times(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x * factor


def _reads(**changes: Any) -> Reads:
    torch.manual_seed(0)
    model = Reads(changes.pop("helper", _times(2.0)))
    for name, value in changes.items():
        setattr(model, name, value)
    return model


CHANGES: dict[str, Callable[[pytest.MonkeyPatch], Reads]] = {
    "attribute": lambda patch: _reads(scale=3.0),
    "attribute that an object has itself": lambda patch: _reads(power=2),
    "closure": lambda patch: _reads(helper=_times(4.0)),
    "function": lambda patch: _reads(helper=F.gelu),
    "training flag": lambda patch: _reads().eval(),
    "frozen parameter": lambda patch: _reads().requires_grad_(False).apply(_thaw_bias),
    "global": lambda patch: patch.setitem(globals(), "SLOPE", 3.0) or _reads(),
    "class attribute": lambda patch: patch.setattr(Reads, "power", 2) or _reads(),
    "environment": lambda patch: patch.setenv("GRAPHOPT_TEST_FACTOR", "3") or _reads(),
    "method": lambda patch: patch.setattr(Reads, "forward", lambda self, x: self.linear(x).sin()) or _reads(),
}


def _thaw_bias(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.bias.requires_grad_(True)


@pytest.mark.sweep(but=("global",))
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_forward_reads_decides(
    folder: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch], Reads]
) -> None:
    step_run(_reads(), sgd, [(X,)])
    assert is_loaded(step_run(_reads(), sgd, [(X,)])[1])
    model = change(monkeypatch)
    found, step = step_run(model, sgd, [(X,)] * 2)
    assert not is_loaded(step)
    monkeypatch.setenv("GRAPHOPT_CACHE_PROGRAMS", "0")
    assert_same(step_run(model, sgd, [(X,)] * 2)[0], found, "changed")


@pytest.mark.sweep
def test_options_call_and_optimizer_decide(folder: Path) -> None:
    step_run(network(), sgd, [(X,)])
    runs = [
        step_run(network(), adamw, [(X,)]),
        step_run(network(), sgd, [(rows(3),)]),
        step_run(network(), sgd, [(X,)], "recompute{checkpoints=net.3}"),
        step_run(network(), sgd, [(X,)], verify=False),
        step_run(network(), sgd, [(X,)], loss=lambda model, x: model(x).abs().mean()),
        step_run(network(), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5), [(X,)]),
        step_run(network(0.1), sgd, [(X,)]),
    ]
    assert [is_loaded(step) for _, step in runs] == [False] * len(runs)
    assert is_loaded(step_run(network(), lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9, fused=True), [(X,)])[1])


@pytest.mark.sweep
def test_a_forward_hook_is_part_of_the_program(folder: Path) -> None:
    def hooked(factor: float) -> nn.Module:
        model = network()
        model.net[0].register_forward_hook(lambda module, args, result: result * factor)
        return model

    step_run(hooked(2.0), sgd, [(X,)])
    assert is_loaded(step_run(hooked(2.0), sgd, [(X,)])[1])
    _, step = step_run(hooked(3.0), sgd, [(X,)])
    assert not is_loaded(step)


# --- what cannot be kept ---------------------------------------------------------------------------------------------


class Double(torch.autograd.Function):
    """Twice its argument."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


class Odd(nn.Module):
    """A linear layer, and what a test puts around it."""

    def __init__(self, around: str) -> None:
        super().__init__()
        self.linear, self.around = nn.Linear(8, 8), around
        self.generator = torch.Generator() if around == "generator" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.around == "sets":
            self.calls = 1
        y = self.linear(x)
        return Double.apply(y) if self.around == "function" else y


@pytest.mark.sweep(but=("sets-forward sets calls",))
@pytest.mark.parametrize(
    ("around", "reason"),
    [("generator", "torch._C.Generator"), ("sets", "forward sets calls")],
)
def test_what_has_no_stable_form_is_captured_each_time_and_the_reason_kept(
    folder: Path, around: str, reason: str
) -> None:
    for _ in range(2):
        _, step = step_run(Odd(around), sgd, [(X,)])
        assert not is_loaded(step)
    assert count(folder) == 0
    assert reason in reasons(folder)


def test_the_backward_of_a_function_of_the_user_decides(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step_run(Odd("function"), sgd, [(X,)])
    assert is_loaded(step_run(Odd("function"), sgd, [(X,)])[1])
    monkeypatch.setattr(Double, "backward", staticmethod(lambda ctx, gradient: gradient * 3))
    assert not is_loaded(step_run(Odd("function"), sgd, [(X,)])[1])


def _hooked(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = sgd(parameters)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


@pytest.mark.sweep
def test_an_optimizer_that_runs_as_it_is_stays_in_its_process(folder: Path) -> None:
    for _ in range(2):
        _, step = step_run(network(), _hooked, [(X,)])
        assert not is_loaded(step)
    assert "runs in eager mode" in reasons(folder)


def test_what_a_capture_warned_of_is_said_again(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logging.getLogger("graphopt.test").warning("something that holds for the program")
            return self.linear(x)

    torch.manual_seed(0)
    model = Views()
    for _ in range(2):
        caplog.clear()
        _, step = step_run(model, sgd, [(X,)])
        assert "something that holds for the program" in caplog.text
    assert is_loaded(step)


def test_the_log_says_where_a_capture_comes_from(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "graphopt"):
        step_run(network(), sgd, [(X,)], "offload")
        assert "loaded from the cache" not in caplog.text
        step_run(network(), sgd, [(X,)], "offload")
    assert "Net: loaded from the cache" in caplog.text


@pytest.mark.sweep
def test_a_dump_and_a_numeric_check_want_a_capture(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_run(network(), sgd, [(X,)])
    assert not is_loaded(step_run(network(), sgd, [(X,)], verify="numerics")[1])
    monkeypatch.setenv("GRAPHOPT_DUMP", str(tmp_path / "dump"))
    assert not is_loaded(step_run(network(), sgd, [(X,)])[1])
    assert (tmp_path / "dump").is_dir()


def test_it_is_off_without_a_folder_or_where_it_is_turned_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHOPT_CACHE_PROGRAMS", "0")
    step_run(network(), sgd, [(X,)])
    assert not folder.exists()
    monkeypatch.delenv("GRAPHOPT_CACHE_PROGRAMS")
    monkeypatch.delenv("GRAPHOPT_CACHE")
    step_run(network(), sgd, [(X,)])
    assert not folder.exists()


@pytest.mark.sweep
def test_training_goes_on_where_nothing_can_be_written(folder: Path) -> None:
    folder.parent.mkdir(parents=True)
    folder.write_text("a file where the folder should be")
    found, step = step_run(network(), sgd, [(X,)])
    assert not is_loaded(step)
    assert found.tensors["0.loss"].isfinite()


@pytest.mark.parametrize("passes", ["", "mixed-precision{dtype=bfloat16},fuse-update", "recompute{checkpoints=net.3}"])
def test_the_page_of_a_capture_that_was_read_names_its_passes(folder: Path, passes: str) -> None:
    for _ in range(2):
        _, step = step_run(network(), sgd, [(X,)], passes)
    assert is_loaded(step)
    page = page_of_snapshots(step.snapshots, step.records)
    assert "step, loaded from the cache" in page
    assert all(record.spec.split("{")[0] in page for record in step.records)
    story = story_of_snapshots(step.snapshots, step.records)
    assert [found.record for found in story.snapshots if found.record is not None] == list(step.records)
