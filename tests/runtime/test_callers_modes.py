"""Modes of the caller that see each call of torch: drop-in models run in eager mode under them, steps refuse one."""

from __future__ import annotations

import copy
import logging
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import graphopt
from graphopt.errors import CaptureError
from tests.support.training import mean_square

X = torch.linspace(-1, 1, 24).view(4, 6)


class Sigmoids(TorchFunctionMode):
    """Sigmoids in place of tangents."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (torch.sigmoid if func is torch.tanh else func)(*args, **(kwargs or {}))


class Doubled(TorchDispatchMode):
    """Tangents twice as large."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.ops.aten.tanh.default else result


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, foreach=True)


@pytest.mark.sweep(but=("Sigmoids-True", "Doubled-True"))
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("mode", [Sigmoids, Doubled])
def test_a_drop_in_model_runs_in_eager_mode(mode: Any, first: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    optimized = graphopt.optimize(copy.deepcopy(model))
    with caplog.at_level(logging.WARNING, "graphopt"):
        for number in range(4):
            with mode() if (number % 2 == 0) is first else nullcontext():
                found, expected = optimized(X), model(X)
            assert torch.equal(found, expected), number
    assert caplog.text.count(f"in eager mode where {mode.__name__} sees each call of torch") == 1


def test_operations_are_counted_as_in_eager_mode() -> None:
    model = network()
    optimized = graphopt.optimize(copy.deepcopy(model))
    counts = []
    for one in (model, optimized, optimized):
        with FlopCounterMode(display=False) as counter:
            one(X).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] == counts[2] > 0


def test_a_default_device_is_no_such_mode() -> None:
    model = graphopt.optimize(network())
    with torch.device("cpu"):
        model(X)
    assert model.program.stage == "joint"


def test_a_whole_step_refuses_what_it_would_not_meet_and_runs_under_the_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = network()
    step = graphopt.optimize_step(model, optimizer_of(model), loss=mean_square)
    with Sigmoids(), pytest.raises(CaptureError, match=r"Sigmoids \(a TorchFunctionMode\)"):
        step(X)
    with caplog.at_level(logging.WARNING, "graphopt"):
        for _ in range(2):
            with Doubled():
                step(X)
        assert caplog.text.count("Doubled (a TorchDispatchMode) sees the ops of the program") == 1
    expected_loss = mean_square(copy.deepcopy(model), X)
    assert torch.equal(step(X), expected_loss), "nothing of the mode is part of the program"
    with FlopCounterMode(display=False) as expected:
        mean_square(copy.deepcopy(model), X).backward()
    for _ in range(2):
        with FlopCounterMode(display=False) as found:
            step(X)
        assert found.get_total_flops() == expected.get_total_flops() > 0
