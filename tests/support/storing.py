"""What the tests of stored captures share: a folder for them, and training that says whether it was captured."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphopt
from graphopt import TrainStep
from graphopt.runtime.stored.program_folder import entries, refusals
from tests.support.training import Loss, MakeOptimizer, Passes, Training, copied, mean_square, train


def use_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which captures are kept from now on."""
    monkeypatch.setenv("GRAPHOPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("GRAPHOPT_CACHE_PROGRAMS", "1")
    return tmp_path / "cache" / "programs"


def is_loaded(owner: Any) -> bool:
    """Whether the latest capture of a step or of an optimized model was read instead of being made."""
    return owner.snapshots[-1][0].endswith("loaded from the cache")


def count(folder: Path) -> int:
    """How many captures there are."""
    return len(entries(folder))


def reasons(folder: Path) -> str:
    """Why captures were not kept."""
    return "; ".join(reason for _, reason in refusals(folder))


def step_run(
    model: nn.Module,
    make: MakeOptimizer,
    batches: Sequence[Sequence[Any]],
    passes: Passes = (),
    *,
    loss: Loss = mean_square,
    accumulate: int = 1,
    **options: Any,
) -> tuple[Training, TrainStep]:
    """Train a copy of a model with whole steps: what is left, and the step."""
    model = copy.deepcopy(model)
    optimizer, found = make(model.parameters()), Training()
    step = graphopt.optimize_step(model, optimizer, passes, loss=loss, **options).accumulate(accumulate)
    torch.manual_seed(1)
    for number, batch in enumerate(batches):
        found.add(f"{number}.loss", step(*copied(batch)))
    return found.end(model, optimizer), step


def drop_in_run(
    model: nn.Module,
    make: MakeOptimizer,
    batches: Sequence[Sequence[Any]],
    passes: Passes = (),
    *,
    loss: Loss = mean_square,
) -> tuple[Training, Any]:
    """Train a copy of a model in a usual loop: what is left, and the optimized model."""
    optimized = graphopt.optimize(copy.deepcopy(model), passes)
    return train(optimized, make, loss, batches), optimized
