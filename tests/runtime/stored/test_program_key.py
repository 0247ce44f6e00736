"""The key of a stored capture: what changes without a change of code, model, call or passes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from graphopt.passes import FitMemory
from tests.support.costs import TOY
from tests.support.running import X, network, sgd
from tests.support.storing import is_loaded, reasons, step_run, use_programs


def test_a_plan_by_a_profile_in_a_file_is_made_again_when_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_programs(tmp_path, monkeypatch)
    path = TOY.save(tmp_path / "mine.toml")
    passes = [FitMemory("6.1kB", cost=str(path))]
    step_run(network(), sgd, [(X,)], passes)
    assert is_loaded(step_run(network(), sgd, [(X,)], passes)[1])
    replace(TOY, overhead=2.0).save(path)
    assert not is_loaded(step_run(network(), sgd, [(X,)], passes)[1])


loss, a = object(), torch.Generator()
"""Global variables, as in a script, that are called like attributes of the model; neither can be compared."""


class Scripted(nn.Module):
    """Reads attributes that are called like global variables."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.loss = nn.Linear(8, 8), nn.MSELoss()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss(self.a(x), x)


def test_a_global_variable_called_like_an_attribute_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = use_programs(tmp_path, monkeypatch)
    step_run(Scripted(), sgd, [(X,)], loss=lambda model, x: model(x))
    assert reasons(folder) == ""
    assert is_loaded(step_run(Scripted(), sgd, [(X,)], loss=lambda model, x: model(x))[1])
