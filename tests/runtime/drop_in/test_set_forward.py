"""A `forward` that is set on a model: it is what a program computes, whether set before or after `optimize`."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

import graphopt
from graphopt.passes import Recompute

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Sequential(nn.Linear(8, 16), nn.GELU()), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.body(x))
        return result


def set_around(model: nn.Module) -> None:
    """As Accelerate does: the function of the method before, under one autocast that must not be entered twice."""
    model.forward = MethodType(torch.autocast("cpu", torch.bfloat16)(model.forward.__func__), model)


def set_in_place(model: nn.Module) -> None:
    """As TRL does: another head, with all attributes of the class's function; the one before on request."""
    before = model.forward

    @functools.wraps(type(model).forward)
    def forward(self: Any, x: torch.Tensor, plainly: bool = False) -> torch.Tensor:
        return before(x) if plainly else self.body(x).logsumexp(-1)

    model.forward = MethodType(forward, model)


def set_elsewhere(model: nn.Module) -> None:
    """A function that knows no model."""
    before = model.forward
    model.forward = lambda x: before(x).tanh()


SETTERS = [set_around, set_in_place, set_elsewhere]


def results(model: nn.Module, *args: Any) -> list[torch.Tensor]:
    model.zero_grad()
    value = model(X, *args)
    value.float().square().mean().backward()
    assert not torch.is_autocast_enabled("cpu")
    return [value.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def assert_equal(ours: list[torch.Tensor], plain: list[torch.Tensor]) -> None:
    assert [(tensor.dtype, tensor.shape) for tensor in ours] == [(tensor.dtype, tensor.shape) for tensor in plain]
    assert all(map(torch.equal, ours, plain))


@pytest.mark.sweep(but=("set_in_place-True",))
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("setter", SETTERS)
def test_it_is_captured(setter: Any, late: bool) -> None:
    plain, model = Net(), Net()
    setter(plain)
    if late:
        model = graphopt.optimize(model, [Recompute("auto")])
        assert_equal(results(model), results(Net()))
        setter(model)
    else:
        setter(model)
        model = graphopt.optimize(model, [Recompute("auto")])
    assert_equal(results(model), results(plain))
    assert len(model._graphopt.runner.captures.all()) == 1 + late
    model.eval()
    assert_equal(results(model), results(plain))
    assert len(model._graphopt.runner.captures.all()) == 1 + late


@pytest.mark.sweep
def test_several_and_what_a_caller_asks_of_them() -> None:
    plain, model = Net(), graphopt.optimize(Net())
    for each in (plain, model):
        set_in_place(each)
        set_around(each)
    assert_equal(results(model), results(plain))
    assert_equal(results(model, True), results(plain, True))
    assert list(inspect.signature(model.forward).parameters) == list(inspect.signature(plain.forward).parameters)


@pytest.mark.sweep
def test_taking_it_away_gives_the_one_of_the_class() -> None:
    model = graphopt.optimize(Net())
    original = model.forward
    set_in_place(model)
    del model.forward
    assert_equal(results(model), results(Net()))
    set_in_place(model)
    model.forward = original
    assert_equal(results(model), results(Net()))
    assert len(model._graphopt.runner.captures.all()) == 1
    assert not hasattr(model.forward, "__wrapped__")  # which would lead past the program


def test_one_that_was_replaced_runs_plainly_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = graphopt.optimize(Net())
    before = model.forward
    set_in_place(model)
    with caplog.at_level(logging.WARNING, "graphopt"):
        assert torch.equal(before(X), Net()(X))
    assert "eager mode where a forward is called that another one has replaced" in caplog.text


def test_a_copy_has_its_own() -> None:
    model = graphopt.optimize(Net())
    set_around(model)
    copied = copy.deepcopy(model)
    assert_equal(results(copied), results(model))
    assert copied.forward.__self__ is copied
    assert all(parameter.grad is not None for parameter in copied.parameters())


@pytest.mark.sweep
def test_a_model_in_parts_follows_it() -> None:
    class Branching(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.body(x)
            return self.head(hidden) if hidden.sum() > 0 else hidden

    plain, model = Branching(), graphopt.optimize(Branching())
    assert_equal(results(model), results(plain))
    for each in (plain, model):
        set_elsewhere(each)
    assert_equal(results(model), results(plain))


def test_a_whole_step_has_it() -> None:
    plain, model = Net(), graphopt.optimize(Net())
    for each in (plain, model):
        set_around(each)
    step = graphopt.optimize_step(model, torch.optim.SGD(model.parameters()), loss=lambda model, x: model(x).sum())
    assert step(X) == plain(X).sum()


def test_one_that_is_bound_by_a_partial_follows_the_training_flag() -> None:
    plain, given = Net(), Net()
    for each in (plain, given):
        each.forward = functools.partial(
            lambda self, x: type(self).forward(self, x) * (2 if self.training else 3), each
        )
    model = graphopt.optimize(given)
    assert_equal(results(model), results(plain))
    assert_equal(results(model.eval()), results(plain.eval()))
