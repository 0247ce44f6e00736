"""Models under ``torch.nn.utils.parametrize.cached()``: eager mode's bits, and nothing of a capture in the cache."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.nn.utils.parametrize import cached

import graphopt

X = torch.linspace(-1, 1, 24).view(4, 6)


def parametrized() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(weight_norm(nn.Linear(6, 6)), nn.Tanh(), spectral_norm(nn.Linear(6, 6)))


def twice(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) + model(2 * x)).square().mean()


def cached_inside(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with cached():
        return twice(model, x)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)


def trained(model: nn.Module, call: Any = None) -> list[torch.Tensor]:
    optimizer, losses = optimizer_of(model), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = cached_inside(model if call is None else call, X)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *model.parameters(), *model.buffers()]


def test_a_drop_in_model_runs_in_eager_mode_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = parametrized()
    with caplog.at_level(logging.WARNING, "graphopt"):
        found = trained(model, graphopt.optimize(model))
    assert all(map(torch.equal, found, trained(parametrized())))
    assert caplog.text.count("eager mode where torch.nn.utils.parametrize.cached() is at work") == 1


def test_a_drop_in_model_without_parametrizations_runs_its_program() -> None:
    model = graphopt.optimize(nn.Linear(6, 6))
    with cached():
        model(X)
    assert model.program.stage == "joint"


@pytest.mark.sweep
@pytest.mark.parametrize("around", [False, True])
def test_a_whole_step_computes_them_once(around: bool) -> None:
    model = parametrized()
    step = graphopt.optimize_step(model, optimizer_of(model), loss=twice if around else cached_inside)
    losses = []
    for _ in range(3):
        if around:
            with cached():
                losses.append(step(X))
        else:
            losses.append(step(X))
    found = [*losses, *model.parameters(), *model.buffers()]
    assert all(map(torch.equal, found, trained(parametrized())))


def test_a_capture_leaves_the_callers_cache_alone() -> None:
    model = parametrized()
    with cached():
        before = model[0].weight
        graphopt.capture(copy.deepcopy(model), (X,))
        graphopt.capture(model, (X,))
        assert model[0].weight is before
        assert torch.equal(model(X), parametrized()(X))
