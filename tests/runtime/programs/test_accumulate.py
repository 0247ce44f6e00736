"""`step.accumulate(k)`: one update for k batches, as `(loss / k).backward()` on each and one `optimizer.step()`."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

import graphopt
from graphopt import GraphoptError, Pass
from graphopt.passes import ClipGradients, Recompute
from tests.support.covering import covering
from tests.support.running import X, adamw, network, rows, same, sgd
from tests.support.training import Training, assert_same, mean_square

RECOMPUTE: list[Pass] = [Recompute("net.3")]
BATCHES = [(X.roll(number, 0),) for number in range(6)]
Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def accumulated(make: Make, every: int, batches: list[tuple[Any, ...]]) -> Training:
    """What ``accumulate`` stands for."""
    model = network()
    optimizer, found = make(model.parameters()), Training()
    torch.manual_seed(1)
    for number, batch in enumerate(batches):
        loss = mean_square(model, *batch)
        (loss / every).backward()
        found.add(f"{number}.loss", loss)
        if number % every == every - 1:
            optimizer.step()
            optimizer.zero_grad()
    return found.end(model, optimizer)


@pytest.mark.sweep(but=("2-sgd-False",))
@covering(every=[2, 3, 1], make={"sgd": sgd, "adamw": adamw}, interrupted=[False, True])
def test_accumulation_equals_eager(make: Make, every: int, interrupted: bool) -> None:
    model = network()
    optimizer, found = make(model.parameters()), Training()
    step = graphopt.optimize_step(model, optimizer, RECOMPUTE, loss=mean_square).accumulate(every)
    torch.manual_seed(1)
    for number, batch in enumerate(BATCHES):
        if interrupted and number == 4:  # with every = 3 in the middle of an accumulation
            state = pickled(step.state_dict())
            step = graphopt.optimize_step(model, optimizer, RECOMPUTE, loss=mean_square)
            step.load_state_dict(state)
        found.add(f"{number}.loss", step(*batch))
    assert_same(accumulated(make, every, BATCHES), found.end(model, optimizer), f"accumulate({every})")


def pickled(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file)
    return loaded


def test_batches_of_an_accumulation_may_have_different_shapes() -> None:
    batches = [(rows(count),) for count in (4, 2, 4, 2)]
    model = network()
    optimizer, found = sgd(model.parameters()), Training()
    step = graphopt.optimize_step(model, optimizer, RECOMPUTE, loss=mean_square).accumulate(2)
    torch.manual_seed(1)
    for number, batch in enumerate(batches):
        found.add(f"{number}.loss", step(*batch))
    assert_same(accumulated(sgd, 2, batches), found.end(model, optimizer), "shapes")


class Sometimes(nn.Module):
    """Uses its second layer where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        y = self.a(x).tanh()
        return self.b(y) if use else y


@pytest.mark.sweep
@pytest.mark.parametrize("order", [(True, False), (False, True), (False, True, False, True)], ids=str)
def test_batches_may_train_different_parameters(order: tuple[bool, ...]) -> None:
    model, every = Sometimes(), 2
    expected = copy.deepcopy(model)
    step = graphopt.optimize_step(model, sgd(model.parameters()), loss=mean_square).accumulate(every)
    optimizer = sgd(expected.parameters())
    for number, use in enumerate(order):
        step(X, use)
        (mean_square(expected, X, use) / every).backward()
        if number % every == every - 1:
            optimizer.step()
            optimizer.zero_grad()
    assert same(list(model.parameters()), list(expected.parameters()))


def test_mistakes_with_accumulation() -> None:
    model = network()
    step = graphopt.optimize_step(model, sgd(model.parameters()), loss=mean_square)
    for bad in (0, -1, 2.5):
        with pytest.raises(GraphoptError, match=f"a whole number of batches of at least 1, got {bad}"):
            step.accumulate(bad)  # type: ignore[arg-type]
    step.accumulate(3)(X)
    with pytest.raises(GraphoptError, match="1 of 3 batches are accumulated: change the number after an update"):
        step.accumulate(2)
    state = step.state_dict()
    assert (state["accumulate"], state["batches"], len(state["gradients"])) == (3, 1, 6)
    with pytest.raises(GraphoptError, match=r"no state of a TrainStep of this version.*got .*'more'"):
        step.load_state_dict({**state, "more": 1})
    with pytest.raises(GraphoptError, match="version 7"):
        step.load_state_dict({**state, "version": 7})
    with pytest.raises(GraphoptError, match=r"gradients of .*other\.weight.*, which the model does not have"):
        step.load_state_dict({**state, "gradients": {"other.weight": X}})


# --- sums ------------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("limit", [0.05, math.inf])
def test_sums_of_windows_of_any_length_are_clipped_as_eager_does(limit: float) -> None:
    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 4))

    batches = torch.randn(9, 5, 8, generator=torch.Generator().manual_seed(0))
    windows = [3, 1, 4, 1]
    plain, ours = net(), net()
    eager, optimizer = (torch.optim.AdamW(model.parameters(), fused=True) for model in (plain, ours))
    torch.manual_seed(1)
    norms, rest = [], iter(batches)
    for window in windows:
        for _ in range(window):
            plain(next(rest)).square().mean().backward()
        norms.append(torch.nn.utils.clip_grad_norm_(plain.parameters(), limit))
        eager.step()
        eager.zero_grad()
    passes = [ClipGradients(limit, keep_norm=True)]
    step = graphopt.optimize_step(ours, optimizer, passes, loss=lambda model, x: model(x).square().mean())
    assert step.gradient_norm is None
    torch.manual_seed(1)
    rest = iter(batches)
    for window, norm in zip(windows, norms, strict=True):
        for number in range(1, window + 1):
            step.accumulate(step.accumulated + (1 if number == window else 2), mean=False)(next(rest))
        assert step.accumulated == 0
        assert torch.equal(step.gradient_norm, norm)
    assert all(map(torch.equal, ours.parameters(), plain.parameters()))
    assert len(step.programs) <= 5
    step.accumulate(3, mean=False)(batches[0])
    assert step.state_dict()["mean"] is False
    for options in ({"batches": 1, "mean": False}, {"batches": 3}):
        with pytest.raises(GraphoptError, match="1 of 3 batches are accumulated"):
            step.accumulate(**options)


def test_only_a_norm_without_a_limit_may_be_infinite() -> None:
    with pytest.raises(GraphoptError, match="above 0 and finite"):
        ClipGradients(math.inf)
    with pytest.raises(GraphoptError, match="keep_norm is for max_norm"):
        ClipGradients(max_value=1.0, keep_norm=True)
