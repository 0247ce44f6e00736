"""Steps that are saved to a file and loaded for another model, another process or another machine."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphopt
from graphopt import ArgumentError, FxPass, GraphoptError, PipelineError
from graphopt.runtime.stored import program_key
from graphopt.runtime.stored.checked_file import read_checked, write_checked
from tests.support.running import Compiler, X, adamw, network, rows, sgd
from tests.support.storing import is_loaded
from tests.support.training import Training, assert_same, copied, mean_square

PASSES = "recompute{checkpoints=net.3}"


def trained(step: graphopt.TrainStep, model: nn.Module, optimizer: torch.optim.Optimizer, *batches: Any) -> Training:
    found = Training()
    torch.manual_seed(1)
    for number, batch in enumerate(batches):
        found.add(f"{number}.loss", step(*copied([batch])))
    return found.end(model, optimizer)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Training]:
    """A file, and what three steps left behind before it was written."""
    model = network()
    optimizer = adamw(model.parameters())
    step = graphopt.optimize_step(model, optimizer, PASSES, loss=mean_square)
    found = trained(step, model, optimizer, X, X, X)
    step.save(tmp_path / "step")
    return tmp_path / "step", found


def load(path: Path, model: nn.Module, make: Any = adamw, **options: Any) -> graphopt.TrainStep:
    return graphopt.load_step(path, model, make(model.parameters()), **{"loss": mean_square, **options})


def test_a_loaded_step_trains_like_the_one_that_was_saved(saved: tuple[Path, Training]) -> None:
    path, expected = saved
    model = network()
    optimizer = adamw(model.parameters())
    step = graphopt.load_step(path, model, optimizer, loss=mean_square)
    assert_same(expected, trained(step, model, optimizer, X, X, X), "loaded")
    assert is_loaded(step)
    assert [record.name for record in step.records] == ["recompute"]
    assert str(step.pipeline) == PASSES


@pytest.mark.sweep
def test_other_calls_are_captured_behind_the_first(saved: tuple[Path, Training]) -> None:
    model = network()
    step = load(saved[0], model)
    step(X)
    assert step(rows(3)).isfinite()
    assert not is_loaded(step)


@pytest.mark.sweep
def test_a_machine_of_another_kind_takes_it(saved: tuple[Path, Training], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_key, "_machine", lambda devices: {"device cpu": "another one", "threads": "64"})
    step = load(saved[0], network())
    step(X)
    assert is_loaded(step)


def _wider() -> nn.Module:
    model = network()
    model.net[3] = nn.Linear(16, 9)
    return model


def _renamed() -> nn.Module:
    model = network()
    model.add_module("other", model._modules.pop("net"))
    model.forward = lambda x: model.other(x)  # type: ignore[method-assign]
    return model


OTHERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "shape": (lambda path: load(path, _wider()), r"net.3.weight was float32\[8, 16\] on cpu.*is float32\[9, 16\]"),
    "parameter name": (lambda path: load(path, _renamed()), "model: net.0.weight is gone"),
    "optimizer": (lambda path: load(path, network(), sgd), "optimizer: class was torch.optim.adamw.AdamW"),
    "loss": (lambda path: load(path, network(), loss=lambda model, x: model(x).sum()), "loss: loss has changed"),
    "batch": (lambda path: load(path, network())(rows(3)), "call: tensor 0 was"),
    "dropout": (lambda path: load(path, network(0.1)), "net.2"),
    "missing file": (lambda path: load(path.with_name("nothing"), network()), "No such file"),
}


@pytest.mark.sweep
@pytest.mark.parametrize(("use", "words"), OTHERS.values(), ids=OTHERS)
def test_what_differs_is_named(saved: tuple[Path, Training], use: Callable[[Path], Any], words: str) -> None:
    with pytest.raises(GraphoptError, match=words):
        use(saved[0])


def test_another_version_is_named(saved: tuple[Path, Training], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "9.9")
    with pytest.raises(GraphoptError, match=r"versions: torch was .*, is 9\.9"):
        load(saved[0], network())


def test_before_a_capture_there_is_nothing_to_save(tmp_path: Path) -> None:
    model = network()
    step = graphopt.optimize_step(model, adamw(model.parameters()), loss=mean_square)
    with pytest.raises(GraphoptError, match="nothing is captured yet"):
        step.save(tmp_path / "step")


def _nothing(module: Any) -> None:
    """A pass on a GraphModule that changes nothing."""


def test_passes_that_their_text_does_not_say_cannot_be_saved(tmp_path: Path) -> None:
    model = network()
    step = graphopt.optimize_step(model, adamw(model.parameters()), [FxPass(_nothing, stage="joint")], loss=mean_square)
    step.prepare(X)
    with pytest.raises(GraphoptError, match="cannot be saved"):
        step.save(tmp_path / "step")


def test_an_optimizer_that_runs_as_it_is_cannot_be_saved(tmp_path: Path) -> None:
    model = network()
    optimizer = sgd(model.parameters())
    optimizer.register_step_post_hook(lambda *_: None)
    step = graphopt.optimize_step(model, optimizer, loss=mean_square)
    step.prepare(X)
    with pytest.raises(GraphoptError, match="runs in eager mode"):
        step.save(tmp_path / "step")


@pytest.mark.sweep
def test_a_backend_of_the_user_is_given_again(tmp_path: Path) -> None:
    model, compiler = network(), Compiler()
    step = graphopt.optimize_step(model, adamw(model.parameters()), loss=mean_square, backend=compiler)
    step(X)
    step.save(tmp_path / "step")
    with pytest.raises(ArgumentError, match="backend="):
        load(tmp_path / "step", network())
    given = len(compiler.given)
    loaded = load(tmp_path / "step", network(), backend=compiler)
    loaded(X)
    assert is_loaded(loaded)
    assert len(compiler.given) == given + 1


def test_files_of_strangers_are_errors(saved: tuple[Path, Training], tmp_path: Path) -> None:
    data = read_checked(saved[0]).value
    changes: list[dict[str, Any]] = [
        {"kind": "something"},
        {"captures": []},
        {"captures": [{}]},
        {"captures": [{"capture": 3}]},
        {"compiled": "§"},
        {"pipeline": "nothing{"},
        {"backend": "os.system"},
        {"verify": "perhaps"},
    ]
    for change in changes:
        write_checked(tmp_path / "other", {**copy.deepcopy(data), **change})
        with pytest.raises(GraphoptError):
            load(tmp_path / "other", network())


@pytest.mark.sweep
def test_what_is_compiled_is_left_alone_unless_it_is_trusted(
    saved: tuple[Path, Training], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bytes] = []
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", asked.append)
    write_checked(tmp_path / "other", {**read_checked(saved[0]).value, "compiled": "YWJj"})
    load(tmp_path / "other", network())
    assert asked == []
    load(tmp_path / "other", network(), trust_compiled=True)
    assert asked == [b"abc"]


def test_a_file_does_not_say_where_its_passes_write(
    saved: tuple[Path, Training], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRAPHOPT_DUMP", raising=False)
    path, states = saved[0], tmp_path / "states"
    data = read_checked(path).value
    write_checked(path, {**data, "pipeline": f'{PASSES},offload-state{{folder="{states}"}}'})
    with pytest.raises(PipelineError, match=r"(?s)is to write to folder='.*load_step\(\.\.\., allow_write=FOLDER"):
        load(path, network())
    assert not states.exists()
    with pytest.raises(GraphoptError, match="offload-state is new"):  # allowed, and not what was saved
        load(path, network(), allow_write=tmp_path)
