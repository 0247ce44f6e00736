"""The examples at tiny sizes: what they print, write and return, and that they notice differences."""

from __future__ import annotations

import importlib
import io
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch

import graphopt
from graphopt.cli.target.target import load_target
from graphopt.rewriting.precision.devices import fast_dtype
from tests.support.paths import EXAMPLES

GPT = ["--steps", "3", "--batch", "2", "--context", "16", "--layers", "2", "--d", "16", "--heads", "2"]
SIZES = {
    "train_gpt": [*GPT, "--dropout", "0.1"],
    "resnet50_checkpoints": ["--steps", "3", "--batch", "2", "--pixels", "64", "--width", "4"],
}
WAYS = {
    "train_gpt": ["eager PyTorch", "captured", "with Recompute"],
    "resnet50_checkpoints": ["eager PyTorch", "with Recompute"],
}
ROW = re.compile(r"^ *(\S.*?) +(–|[\d.]+ MB) +([\d.]+) MB +×([\d.]+) +\d+ ms +×[\d.]+ +(\d+\.\d{6}) *$", re.MULTILINE)

Load = Callable[[str], ModuleType]


@contextmanager
def loading() -> Iterator[Load]:
    """Import examples as running them does, and forget them afterwards: their neighbours have general names."""
    names = [path.stem for path in EXAMPLES.glob("*.py")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
        for name in names:
            patch.delitem(sys.modules, name, raising=False)
        yield importlib.import_module
        for name in names:
            sys.modules.pop(name, None)


@pytest.fixture
def load() -> Iterator[Load]:
    """What ``loading`` gives, for one test."""
    with loading() as found:
        yield found


@dataclass
class Run:
    """One run of an example: its name, the status that it returned, what it printed and the folder that it wrote."""

    name: str
    status: int
    printed: str
    folder: Path


@pytest.fixture(scope="module", params=SIZES)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("example") / "new" / "folder"
    with loading() as load, redirect_stdout(io.StringIO()) as printed:
        status = load(request.param).main([*SIZES[request.param], "--out", str(folder)])
    return Run(request.param, status, printed.getvalue(), folder)


def test_results_are_equal_and_memory_is_as_predicted(run: Run) -> None:
    assert run.status == 0
    ways = WAYS[run.name]
    rows = ROW.findall(run.printed)
    rounded = [row for row in rows if "float16" in row[0]]
    assert [row[0] for row in rows if row not in rounded] == ways
    assert len(rounded) == int(run.name == "train_gpt" and fast_dtype() is not None)
    assert rows[0][1] == "–"
    for _, predicted, measured, _, _ in rows[1:]:
        assert float(predicted.removesuffix(" MB")) == pytest.approx(float(measured), rel=1e-3)
    assert float(rows[len(ways) - 1][2]) < float(rows[0][2])
    assert len({loss for *_, loss in rows[: len(ways)]}) == 1
    assert all(float(row[4]) == pytest.approx(float(rows[0][4]), rel=0.01) for row in rounded)
    assert "equal to the last bit" in " ".join(run.printed.split())


@pytest.mark.sweep(but=("train_gpt",))
def test_the_rewritten_program_is_written_and_named(run: Run) -> None:
    for file in run.folder.iterdir():
        assert str(file) in run.printed
    program = graphopt.Program.from_json(json.loads((run.folder / "step.json").read_text()))
    assert program.stage == "step"
    assert program.history[0].startswith("recompute{checkpoints=")
    assert program.to_text() == (run.folder / "step.txt").read_text()
    assert ElementTree.parse(run.folder / "step.svg").getroot().tag.endswith("svg")


# --- fitting ---------------------------------------------------------------------------------------------------------

FITTED = ["--steps", "3", "--batch", "8", "--context", "64", "--layers", "2", "--d", "32", "--heads", "2"]


@pytest.fixture(scope="module")
def fit(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The demo in a pipe: a step that takes 5.1 MB is given 2 MB."""
    folder = tmp_path_factory.mktemp("fitted") / "new" / "folder"
    with loading() as load, redirect_stdout(io.StringIO()) as printed, pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        status = load("fit_gpt").main([*FITTED, "--budget", "2MB", "--out", str(folder)])
    return Run("fit_gpt", status, printed.getvalue(), folder)


def test_a_step_that_does_not_fit_is_fitted_and_equal(fit: Run) -> None:
    assert fit.status == 0, fit.printed
    rows = re.findall(r"^ (eager PyTorch|FitMemory) +([\d.]+) MB +(no|yes) +\d+ ms +(\d+\.\d{6})", fit.printed, re.M)
    (eager, measured, no, loss), (fitted, small, yes, same) = rows
    assert (eager, no, fitted, yes) == ("eager PyTorch", "no", "FitMemory", "yes")
    assert float(small) <= 2.0 < float(measured)
    assert loss == same
    assert "equal to the last bit (torch.equal)" in " ".join(fit.printed.split())


def test_memory_is_drawn_before_and_after_on_one_scale(fit: Run) -> None:
    before, after = fit.printed.split("3 steps each way")
    charts = [re.findall(r"^.*│.*│$", text, re.M) for text in (before, after)]
    assert len(charts[0]) == len(charts[1])
    assert charts[0][0].split("│")[0] == charts[1][0].split("│")[0]
    assert "█" in charts[0][1]
    assert "█" not in "".join(charts[1][:4])
    for chart in charts:
        (line,) = [row for row in chart if row.lstrip().startswith("2.0 MB")]
        assert "┄" in line


def test_the_demo_is_readable_in_80_columns(fit: Run) -> None:
    path = str(fit.folder / "step.html")
    assert max(len(line) for line in fit.printed.splitlines() if path not in line) <= 80
    assert "\x1b" not in fit.printed


def test_the_page_of_the_fit_is_written_and_named(fit: Run) -> None:
    page = fit.folder / "step.html"
    assert str(page) in fit.printed
    assert "fit-memory" in page.read_text(encoding="utf-8")


@pytest.mark.sweep
def test_a_budget_that_is_no_limit_is_told(load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert load("fit_gpt").main([*FITTED, "--budget", "1GB", "--out", str(tmp_path)]) == 1
    assert "which fits into 1GB as it is: lower --budget" in " ".join(capsys.readouterr().out.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--budget", "much"], "is not a number of bytes"), (["--d", "30", "--heads", "4"], "is not a multiple of")],
)
def test_wrong_options_of_the_fit_are_refused(
    arguments: list[str], message: str, load: Load, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        load("fit_gpt").main(arguments)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_a_difference_is_printed_and_returned(
    load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison = load("comparison")
    right = comparison.eager_step

    def wrong(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loss: object) -> object:
        optimizer.param_groups[0]["lr"] *= 1.001
        return right(model, optimizer, loss)

    monkeypatch.setattr(comparison, "eager_step", wrong)
    assert load("train_gpt").main([*GPT, "--out", str(tmp_path)]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "captured: " in printed
    assert "values differ from eager PyTorch: loss 1, loss 2, model.wte.weight" in printed
    assert "equal to the last bit" not in printed


@pytest.mark.parametrize("name", SIZES)
def test_too_few_steps_are_refused(name: str, load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        load(name).main(["--steps", "2"])
    assert error.value.code == 2
    assert "take at least 3" in capsys.readouterr().err


@pytest.mark.sweep(but=("fit_gpt-4.9",))
@pytest.mark.parametrize(("name", "millions"), [("train_gpt", 9.7), ("fit_gpt", 4.9), ("resnet50_checkpoints", 23.5)])
def test_factories_are_targets_of_the_command_line(name: str, millions: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    target = load_target(f"{EXAMPLES / name}.py:factory")
    assert target.last_stage == "step"
    assert sum(p.numel() for p in target.model.parameters()) / 1e6 == pytest.approx(millions, abs=0.1)
    assert callable(target.loss)
    with torch.no_grad():
        assert target.loss(target.model.eval(), *(part[:1] for part in target.args)).shape == ()


@pytest.mark.sweep
def test_resnet_names_its_blocks(load: Load) -> None:
    models = load("models")
    model = models.ResNet50(classes=3, width=4)
    program = graphopt.capture(model, (torch.randn(2, 3, 32, 32),))
    named = [name for name in program.names() if re.fullmatch(r"res\d[a-f]", name)]
    assert named == models.ResNet50.block_names()
    stages = {"2": "abc", "3": "abcd", "4": "abcdef", "5": "abc"}
    assert named == [f"res{stage}{letter}" for stage, letters in stages.items() for letter in letters]


def test_batches_are_text_and_what_follows_it(load: Load) -> None:
    text = load("text")
    tokens, held_out = text.split_tokens()
    whole = bytes(torch.cat([tokens, held_out]).tolist())
    assert whole.decode() == text.english_text()
    assert len(held_out) / len(whole) == pytest.approx(0.1, abs=0.001)
    state = torch.get_rng_state()
    batches = text.draw_batches(tokens, count=3, size=2, length=40, seed=0)
    assert torch.equal(state, torch.get_rng_state())
    assert len({bytes(x[0].tolist()) for x, _ in batches}) == 3
    for x, y in batches:
        assert x.shape == y.shape == (2, 40)
        assert torch.equal(x[:, 1:], y[:, :-1])
        assert all(bytes(row.tolist()) in whole for row in x)


@pytest.mark.sweep
def test_batches_of_all_sizes_share_a_capture(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--steps", "4", "--batch", "2", "--layers", "1", "--d", "16", "--heads", "2", "--longest", "160"]
    assert load("packing").main([*sizes, "--share", "0.85"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"padded +[2-4] ", printed)
    assert re.search(r"packed +[2-4] ", printed)
    assert "no" not in re.findall(r"\b(?:yes|no)\b", printed)


# --- loops that others own -------------------------------------------------------------------------------------------

LOOPS = {
    "trainer": ["--steps", "2", "--batch", "2", "--context", "16", "--layers", "1", "--d", "16", "--budget", "1GB"],
    "lightning_fit": ["--epochs", "1", "--batch", "500", "--width", "4"],
    "accelerate_loop": ["--steps", "1", "--batch", "2", "--context", "16", "--layers", "1", "--d", "16"],
}


@pytest.mark.filterwarnings("ignore")  # of the libraries, about themselves
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_that_others_own_gives_equal_results(name: str, load: Load) -> None:
    with redirect_stdout(io.StringIO()) as printed:
        status = load(name).main(LOOPS[name])
    assert status == 0, printed.getvalue()
    assert printed.getvalue().count("equal to the last bit") == {"trainer": 3, "lightning_fit": 1}.get(name, 2)
    assert "DIFFERENT" not in printed.getvalue()
