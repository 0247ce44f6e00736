"""`largest_batch`: the largest batch whose predicted peak is within a budget, and nothing is run or changed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graphopt
from graphopt import ArgumentError, GraphoptError
from graphopt.passes import FitMemory
from graphopt.runtime.drop_in import largest_batch as module


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.BatchNorm1d(64), nn.Linear(64, 8))


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    value: torch.Tensor = model(x).square().mean()
    return value


def peak(model: nn.Module, rows: int, optimizer: torch.optim.Optimizer | None) -> int:
    whole = {"loss": loss, "optimizer": optimizer} if optimizer is not None else {}
    return graphopt.capture(model, (torch.zeros(rows, 32),), **whole).memory().peak_bytes


@pytest.mark.sweep
@pytest.mark.parametrize("whole", [False, True])
def test_one_row_more_would_not_fit(whole: bool) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True) if whole else None
    before = {name: value.clone() for name, value in model.state_dict().items()}
    options = {"loss": loss, "optimizer": optimizer} if whole else {}
    rows = graphopt.largest_batch(model, torch.zeros(2, 32), budget="200kB", least=2, **options)
    assert peak(model, rows, optimizer) <= 200_000 < peak(model, rows + 1, optimizer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert optimizer is None or not optimizer.state


@pytest.mark.sweep
def test_passes_that_save_memory_give_a_larger_one() -> None:
    model = net()
    rows = graphopt.largest_batch(model, {"input": torch.zeros(2, 32)}, budget="120kB", least=2)
    passes = [FitMemory("120kB", cost="roofline")]
    more = {"budget": "120kB", "least": rows + 1, "most": rows + 1}
    assert graphopt.largest_batch(model, lambda rows: torch.zeros(rows, 32), passes, **more) == rows + 1
    with pytest.raises(GraphoptError, match="no batch fits"):
        graphopt.largest_batch(model, lambda rows: torch.zeros(rows, 32), **more)


def test_the_search_ends_at_what_is_wanted_at_most() -> None:
    assert graphopt.largest_batch(net(), torch.zeros(2, 32), budget="auto", least=2, most=40) == 40


@pytest.mark.parametrize("edge", [1, 2, 3, 7, 100, 1000])
@pytest.mark.parametrize("shape", [lambda n: 3 * n, lambda n: n * n, lambda n: n // 16, lambda n: int(n**0.5)])
def test_any_growth_is_searched_in_few_tries(edge: int, shape: object) -> None:
    tried: list[int] = []

    def excess(rows: int) -> int:
        tried.append(rows)
        return shape(rows) - shape(edge)  # type: ignore[operator]

    found = module._search(excess, 1, 4096)
    assert excess(found) <= 0 < excess(found + 1)
    assert len(tried) < 40
    assert len(set(tried[:-2])) == len(tried) - 2


@pytest.mark.sweep(cases=("options0-no batch fits: with 1 row the step takes .* more than the budget",))
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": "20kB"}, r"no batch fits: with 1 row the step takes .* more than the budget"),
        ({"budget": "50%"}, "give bytes, or auto"),
        ({"budget": "1MB", "least": 4, "most": 2}, "most is the smaller one"),
        ({"budget": "1MB", "batch": (torch.zeros(2, 32), torch.zeros(3))}, "the sizes 2, 3"),
    ],
)
def test_what_cannot_be_found(options: dict[str, object], message: str) -> None:
    model = nn.Sequential(nn.Linear(32, 256))
    with pytest.raises((ArgumentError, GraphoptError), match=message):
        graphopt.largest_batch(model, **{"batch": torch.zeros(2, 32), **options})  # type: ignore[arg-type]
