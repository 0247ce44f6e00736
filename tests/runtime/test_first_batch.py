"""No batch of numbers stays in memory behind its step, nor what leads to it; what is read of others can be read."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphopt
from tests.support.running import adamw
from tests.support.storing import is_loaded
from tests.support.training import mean_square

MODEL = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 2))
PASSES = ["", "recompute{checkpoints=*}", "mixed-precision{dtype=bfloat16}", "fit-memory{budget=100% cost=roofline}"]


def drop_in(passes: str, **options: Any) -> tuple[Callable[[torch.Tensor], Any], Any]:
    model = graphopt.optimize(copy.deepcopy(MODEL), passes, **options)
    return lambda x: model(x).sum().backward(), model


def whole_step(passes: str, **options: Any) -> tuple[Callable[[torch.Tensor], Any], Any]:
    model = copy.deepcopy(MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = graphopt.optimize_step(model, optimizer, passes, loss=mean_square, **options)
    return lambda x: step(x).item(), step


WAYS = {"drop-in": drop_in, "step": whole_step}


@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_no_batch_stays(way: Callable[..., Any], passes: str) -> None:
    train, _ = way(passes)
    seen = []
    for rows in (4, 4, 7, 3):  # one size, another one, and one of a program for all
        batch = torch.randn(rows, 6)
        seen.append(weakref.ref(batch))
        train(batch)
        del batch
    assert [found() is None for found in seen] == [True] * 4


def test_what_leads_to_a_batch_does_not_stay() -> None:
    model = graphopt.optimize(copy.deepcopy(MODEL))
    leaf = torch.randn(4, 6, requires_grad=True)
    for _ in range(2):
        batch = leaf * 2
        seen = weakref.ref(batch)
        model(batch).sum().backward()
        del batch
        assert seen() is None


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_where_numbers_are_verified_it_stays(way: Callable[..., Any]) -> None:
    """For the other programs of a step, which are compared when they are made."""
    train, _ = way("recompute{checkpoints=*}", verify="numerics")
    batch = torch.randn(4, 6)
    seen = weakref.ref(batch)
    train(batch)
    del batch
    assert seen() is not None
    train(torch.randn(4, 6))


def test_programs_are_lowered_without_it() -> None:
    train, model = drop_in("")
    train(torch.randn(4, 6))
    forward = model.snapshots[0][1]
    assert forward.stage == "forward"
    assert forward.lower(forward).to_text() == model.program.to_text()


def sum_of_both(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return mean_square(model, x + (y.abs() if y.is_complex() else y))


HALVES = torch.randn(8, 6).split(4)
NUMBERS = torch.arange(24).reshape(4, 6)
BATCHES = {
    "apart": (torch.randn(4, 6), torch.randn(4, 6)), "halves of one": HALVES, "one twice": (HALVES[0],) * 2,
    "numbers": (torch.randn(4, 6), NUMBERS), "a mask": (torch.randn(4, 6), NUMBERS % 2),
    "a mask of booleans": (torch.randn(4, 6), NUMBERS > 3), "complex": (torch.randn(4, 6), torch.ones(4, 6) * 1j),
}  # fmt: skip


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_a_saved_step_is_for_calls_like_the_first(batch: Any, tmp_path: Path) -> None:
    model = copy.deepcopy(MODEL)
    step = graphopt.optimize_step(model, adamw(model.parameters()), loss=sum_of_both)
    expected = [step(*batch) for _ in range(2)]
    step.save(tmp_path / "step")
    model = copy.deepcopy(MODEL)
    loaded = graphopt.load_step(tmp_path / "step", model, adamw(model.parameters()), loss=sum_of_both)
    assert [torch.equal(loaded(*batch), loss) for loss in expected] == [True, True]
    assert is_loaded(loaded)
