"""Parts of a model that torch's Dynamo has cut: a second process reads their programs, with the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graphopt
from graphopt.passes import FitMemory, Recompute
from graphopt.rewriting.pass_ import Pass
from tests.support.storing import count, use_programs

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's

X = torch.linspace(-1, 1, 64 * 16).view(64, 16)


class Looking(nn.Module):
    """Looks at values in the middle, and uses one layer on both sides of that."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.shared, self.norm, self.scale = nn.Linear(16, 16), nn.Linear(16, 16), nn.LayerNorm(16), scale
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.shared(F.gelu(self.shared(self.first(x)))) + x
        if x.detach().sum() > 1e9:
            x = x * 2
        return self.drop(self.shared(self.norm(x)) + x * x) * self.scale


Train = Callable[[nn.Module, list[Pass]], Any]


def in_parts(model: nn.Module, passes: list[Pass]) -> Any:
    return graphopt.optimize(model, passes)


def by_backend(model: nn.Module, passes: list[Pass]) -> Any:
    torch._dynamo.reset()
    options = {"passes": " ".join(map(str, passes))} if passes else {}
    return torch.compile(model, backend="graphopt", options=options)


def gradients(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(1)
    found = []
    for _ in range(3):
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        found += [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
    return found


@pytest.mark.sweep(but=("in_parts-none", "in_parts-fit"))
@pytest.mark.parametrize(
    "passes",
    [[], [Recompute("auto")], [FitMemory("90%", cost="roofline")]],
    ids=["none", "recompute", "fit"],
)
@pytest.mark.parametrize("train", [in_parts, by_backend])
def test_a_second_start_reads_the_programs_of_parts(
    train: Train, passes: list[Pass], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = use_programs(tmp_path, monkeypatch)
    expected = gradients(Looking(), X)
    assert all(map(torch.equal, gradients(train(Looking(), passes), X), expected))
    kept = count(folder)
    assert kept >= 2
    written = {path: path.stat().st_mtime_ns for path in folder.glob("*/stage-joint")}
    second = train(Looking(), passes)
    assert all(map(torch.equal, gradients(second, X), expected))
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*/stage-joint")} == written
    assert count(folder) == kept


def test_other_graphs_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = use_programs(tmp_path, monkeypatch)
    gradients(graphopt.optimize(Looking()), X)
    kept = count(folder)
    for model, x in ((Looking(2.0), X), (Looking(), X[:32])):
        found = graphopt.optimize(model)
        assert all(map(torch.equal, gradients(found, x), gradients(model, x)))
        assert count(folder) > kept, (model, x.shape)
        kept = count(folder)


SECOND = """
import sys, torch, graphopt
sys.path.insert(0, {root!r})
from tests.runtime.stored.test_stored_parts import Looking, X, gradients
model = graphopt.optimize(Looking())
expected = gradients(Looking(), X)
print(all(map(torch.equal, gradients(model, X), expected)))
"""


@pytest.mark.sweep
def test_another_process_says_that_it_has_loaded_them(tmp_path: Path) -> None:
    root = str(Path(__file__).parents[3])
    environment = {**os.environ, "GRAPHOPT_CACHE": str(tmp_path), "GRAPHOPT_CACHE_PROGRAMS": "1"}
    said = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", SECOND.format(root=root)],
            capture_output=True, text=True, check=True, env=environment, cwd=root,
        )  # fmt: skip
        assert done.stdout.strip() == "True"
        lines = [line for line in done.stderr.splitlines() if "parts captured" in line]
        assert all(line.startswith("graphopt: ") for line in done.stderr.splitlines() if "Looking" in line)
        said += lines
    first, second = said
    assert "loaded" not in first
    assert "2 parts captured, 2 of them loaded from the cache" in second
