"""What forward does outside of its process: told once, with the line, and what is read there is not kept."""

from __future__ import annotations

import io
import logging
import os
import re
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import graphopt
from graphopt.capture.effects.external_effects import effects_noted
from graphopt.errors import CaptureError
from tests.support.running import sgd
from tests.support.storing import is_loaded, reasons, step_run, use_programs

X = torch.linspace(-1, 1, 8).view(2, 4)

logger = logging.getLogger("of the model")


class Acts(nn.Module):
    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(4, 4), act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.act()
        return self.linear(x)


def written(path: Path) -> None:
    with path.open("a") as file:
        file.write("x")


EFFECTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "open": (lambda path: open(path).close(), r"reads the file '.*a\.txt' \(test_external_effects\.py:\d+\)"),
    "open by name": (lambda path: open(file=path).close(), r"reads the file '.*a\.txt'"),
    "read_text": (lambda path: path.read_text(), r"reads the file '.*a\.txt'"),
    "os.open": (lambda path: os.close(os.open(path, os.O_RDONLY)), r"reads the file '.*a\.txt'"),
    "exists": (lambda path: os.path.exists(path), r"looks at the file '.*a\.txt'"),
    "listdir": (lambda path: os.listdir(path.parent), r"looks at the file '"),
    "numpy.load": (lambda path: np.load(path.with_suffix(".npy")), r"reads the file '.*a\.npy'"),
    "write": (written, r"writes the file '.*a\.txt'"),
    "torch.save": (lambda path: torch.save([1], path.with_suffix(".pt")), r"writes the file '.*a\.pt'"),
    "torch.save by name": (lambda path: torch.save(obj=[1], f=path), r"writes the file '.*a\.txt'"),
    "subprocess by name": (lambda path: subprocess.run(args="true 1", shell=True), r"runs another program \(true\)"),
    "print": (lambda path: print(path, file=io.StringIO()), r"prints \(test_external_effects\.py:\d+\)"),
    "logging": (lambda path: logger.error("now"), r"logs \(test_external_effects\.py:\d+\)"),
    "subprocess": (lambda path: subprocess.run(["true"], check=True), r"runs another program \(true\)"),
    "os.system": (lambda path: os.system("true now"), r"runs another program \(true\)"),
}


@pytest.mark.sweep(but=("open", "open by name", "exists", "torch.save", "torch.save by name", "print", "subprocess"))
@pytest.mark.parametrize("kind", EFFECTS)
def test_an_effect_is_told_once(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.txt").write_text("1")
    np.save(tmp_path / "a.npy", np.ones(1))
    act, words = EFFECTS[kind]
    model = graphopt.optimize(Acts(lambda: act(tmp_path / "a.txt")))
    with caplog.at_level(logging.WARNING, "graphopt"):
        for batch in (X, X, X[:1], X[:1, :].repeat(5, 1)):
            model(batch)
    told = [record.getMessage() for record in caplog.records if record.name.startswith("graphopt")]
    assert len(told) == 1
    assert re.search(rf"forward of Acts .*{words}.*: a program has what there was at its capture", told[0])


@pytest.mark.parametrize("act", [lambda: None, lambda: __import__("wave"), lambda: torch.ones(1).sum()])
def test_nothing_is_told_of_what_is_not_done(
    act: Callable[[], object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "graphopt"):
        graphopt.optimize(Acts(act))(X)
    assert not caplog.records


def test_a_log_record_says_who_logged(caplog: pytest.LogCaptureFixture) -> None:
    graphopt.optimize(Acts(lambda: logger.error("now")))(X)
    (record,) = [record for record in caplog.records if record.name == "of the model"]
    assert record.filename == "test_external_effects.py"


def test_other_threads_are_not_noted(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("1")
    with effects_noted() as found:
        thread = threading.Thread(target=path.read_text)
        thread.start()
        thread.join()
        assert not found
        path.read_text()
    assert [effect.reads for effect in found] == [True]
    path.read_text()
    assert len(found) == 1


def test_a_capture_that_reads_a_file_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = use_programs(tmp_path / "programs", monkeypatch)
    path = tmp_path / "a.txt"
    path.write_text("1")

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean() * float(path.read_text())

    step_run(nn.Linear(4, 4), sgd, [(X,)], loss=loss)
    assert "reads the file" in reasons(folder)


def test_a_capture_that_prints_is_kept(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = use_programs(tmp_path, monkeypatch)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        print("here")
        return model(x).square().mean()

    for _ in range(2):
        caplog.clear()
        _, step = step_run(nn.Linear(4, 4), sgd, [(X,)], loss=loss)
        assert "the loss or forward of Linear prints" in caplog.text  # said again where it is read
    assert is_loaded(step)
    assert reasons(folder) == ""
    assert capsys.readouterr().out.count("here") == 1


def test_is_set_to_is_refused_by_name() -> None:
    class Asks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (2.0 if x.is_set_to(x) else 1.0)

    with pytest.raises(CaptureError, match="forward uses is_set_to"):
        graphopt.optimize(Asks(4, 4))(X)
