"""Hooks on the gradients of parameters: those of a loop are called as in eager mode, and a whole step refuses them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import graphopt
from graphopt import CaptureError
from graphopt.passes import Recompute
from tests.support.running import sgd

X = torch.linspace(-1, 1, 16).reshape(4, 4)


class Layers(nn.Module):
    """Several layers, two of one weight, and one that forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.unused = (nn.Linear(4, 4) for _ in range(4))
        self.c.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.c(torch.relu(self.b(torch.tanh(self.a(x)))))


class Heads(Layers):
    """Has two results."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.a(x), self.b(x)


def given_to_hooks(model: nn.Module, doubled: str = "b.weight") -> dict[str, list[tuple[str, torch.Tensor | None]]]:
    """What hooks of all parameters are going to be given, in order, for each parameter; one of them doubles."""
    given: dict[str, list[tuple[str, torch.Tensor | None]]] = {}

    def note(name: str, kind: str, tensor: torch.Tensor | None) -> None:
        given.setdefault(name, []).append((kind, tensor if tensor is None else tensor.detach().clone()))

    for name, parameter in model.named_parameters():

        def first(gradient: torch.Tensor, name: str = name) -> torch.Tensor | None:
            note(name, "first", gradient)
            return gradient * 2 if name == doubled and gradient is not None else None

        def accumulated(parameter: torch.Tensor, name: str = name) -> None:
            note(name, "accumulated", parameter.grad)

        parameter.register_hook(first)  # type: ignore[no-untyped-call]
        parameter.register_hook(lambda gradient, name=name: note(name, "second", gradient))  # type: ignore[misc,no-untyped-call]
        parameter.register_post_accumulate_grad_hook(accumulated)
    return given


def steps(model: nn.Module, count: int = 2) -> None:
    """Some backwards whose gradients are added up; of several results, of the first one."""
    for _ in range(count):
        result = model(X)
        (result[0] if isinstance(result, tuple) else result).square().sum().backward()


def assert_same(one: Any, other: Any) -> None:
    assert one.keys() == other.keys()
    for name, mine in one.items():
        assert [kind for kind, _ in mine] == [kind for kind, _ in other[name]]
        for (_, here), (_, there) in zip(mine, other[name], strict=True):
            assert here is not None
            assert torch.equal(here, there)


DOORS: dict[str, Callable[[nn.Module], Any]] = {
    "optimize": graphopt.optimize,
    "recompute": lambda model: graphopt.optimize(model, [Recompute("auto")]),
    "compile": lambda model: torch.compile(model, backend="graphopt"),
}


@pytest.mark.sweep(but=("False-optimize", "True-optimize"))
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("later", [False, True])
def test_hooks_are_given_what_eager_mode_gives_them_and_no_more_often(later: bool, door: str) -> None:
    eager, model = Layers(), Layers()
    around = DOORS[door](model)
    if later:
        steps(around, 1), steps(eager, 1)
        around.zero_grad(), eager.zero_grad()
    expected, given = given_to_hooks(eager), given_to_hooks(model)
    steps(eager), steps(around)
    assert "unused.weight" not in given
    assert_same(expected, given)
    assert model.a.weight.grad is not None
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        assert mine.grad is None or torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "behind its whole backward" in record.getMessage()]


def test_that_hooks_of_several_parameters_run_in_another_order_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = Layers()
    optimized = graphopt.optimize(model)
    handle = model.a.weight.register_hook(lambda gradient: gradient)  # type: ignore[no-untyped-call]
    steps(optimized)
    assert not told(caplog)  # there is one order of one hook
    model.b.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    steps(optimized)
    handle.remove()
    steps(optimized)
    (line,) = told(caplog)
    assert "a.weight's hooks, b.bias's hooks run" in line
    assert "None" not in line


@pytest.mark.parametrize("door", ["optimize", pytest.param("compile", marks=pytest.mark.sweep)])
def test_that_a_hook_may_be_given_no_gradient_is_said(door: str, caplog: pytest.LogCaptureFixture) -> None:
    eager, model = Heads(), Heads()
    around = DOORS[door](model)
    expected, given = given_to_hooks(eager), given_to_hooks(model)
    steps(eager, 1), steps(around, 1)
    assert {name for name, calls in given.items() if calls[0][1] is None} == {"b.weight", "b.bias"}
    assert_same(expected, {name: calls for name, calls in given.items() if name in expected})
    assert all("and on None where the loss needs no gradient of a parameter" in line for line in told(caplog))
    assert told(caplog)


def test_no_gradient_of_a_parameter_that_is_not_used_can_be_asked_for() -> None:
    model = Layers()
    results = [around(copy.deepcopy(model)) for around in (lambda model: model, graphopt.optimize)]
    for current in results:
        with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
            torch.autograd.grad(current(X).sum(), [current.unused.weight])


@pytest.mark.sweep(but=("False-register_hook", "True-register_post_accumulate_grad_hook"))
@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("later", [False, True])
def test_a_whole_step_refuses_hooks_whenever_they_come(kind: str, later: bool) -> None:
    model = Layers()
    step = graphopt.optimize_step(model, sgd(model.parameters()), loss=lambda model, x: model(x).sum())
    if later:
        step(X)
    before = copy.deepcopy(model.state_dict())
    for _ in range(2):  # a hook that is removed leaves a step that runs, and the next one is found again
        handle = getattr(model.b.weight, kind)(lambda given: None)
        with pytest.raises(CaptureError, match=r"the parameter 'b\.weight' has a hook on its gradient"):
            step(X)
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        handle.remove()
        step(X)
        assert not torch.equal(before["b.weight"], model.b.weight)
        before = copy.deepcopy(model.state_dict())
