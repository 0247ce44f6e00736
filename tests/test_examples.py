"""Both examples at tiny sizes: what they print, write and return, and that they notice differences."""

from __future__ import annotations

import importlib
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import graphopt
from graphopt.precision.devices import fast_dtype
from graphopt.targets import load_target

EXAMPLES = Path(__file__).parent.parent / "examples"
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


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Import an example as running it does, and forget it afterwards: its neighbours have general names."""
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    names = [path.stem for path in EXAMPLES.glob("*.py")]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", SIZES)
def test_results_are_equal_and_memory_is_as_predicted(
    name: str, load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load(name).main([*SIZES[name], "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    rows = ROW.findall(printed)
    rounded = [row for row in rows if "float16" in row[0]]
    assert [row[0] for row in rows if row not in rounded] == WAYS[name]
    assert len(rounded) == int(name == "train_gpt" and fast_dtype() is not None)
    assert rows[0][1] == "–"
    for _, predicted, measured, _, _ in rows[1:]:
        assert float(predicted.removesuffix(" MB")) == pytest.approx(float(measured), rel=1e-3)
    assert float(rows[len(WAYS[name]) - 1][2]) < float(rows[0][2])
    assert len({loss for *_, loss in rows[: len(WAYS[name])]}) == 1
    assert all(float(row[4]) == pytest.approx(float(rows[0][4]), rel=0.01) for row in rounded)
    assert "equal to the last bit" in " ".join(printed.split())


@pytest.mark.parametrize("name", SIZES)
def test_the_rewritten_program_is_written_and_named(
    name: str, load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load(name).main([*SIZES[name], "--out", str(tmp_path / "new" / "folder")])
    printed = capsys.readouterr().out
    for file in (tmp_path / "new" / "folder").iterdir():
        assert str(file) in printed
    program = graphopt.Program.from_json(json.loads((tmp_path / "new" / "folder" / "step.json").read_text()))
    assert program.stage == "step"
    assert program.history[0].startswith("recompute{checkpoints=")
    assert program.to_text() == (tmp_path / "new" / "folder" / "step.txt").read_text()
    assert ElementTree.parse(tmp_path / "new" / "folder" / "step.svg").getroot().tag.endswith("svg")


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


@pytest.mark.parametrize(("name", "millions"), [("train_gpt", 9.7), ("resnet50_checkpoints", 23.5)])
def test_factories_are_targets_of_the_command_line(name: str, millions: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    target = load_target(f"{EXAMPLES / name}.py:factory")
    assert target.last_stage == "step"
    assert sum(p.numel() for p in target.model.parameters()) / 1e6 == pytest.approx(millions, abs=0.1)
    assert callable(target.loss)
    with torch.no_grad():
        assert target.loss(target.model.eval(), *(part[:1] for part in target.args)).shape == ()


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
