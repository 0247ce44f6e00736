"""What a step has looked up once it looks up again where that was replaced, and it keeps nothing of it alive."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import graphopt
from graphopt import GraphoptError, TrainStep
from graphopt.runtime.state.state_versions import optimizer_version
from tests.support.training import OPTIMIZERS, mean_square

ROWS = torch.randn(6, 4)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


Between = Callable[[nn.Module, torch.optim.Optimizer], None]


def replace_parameter(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Another parameter takes the place of one, in the model and in the optimizer, with its state."""
    old = model[0].weight  # type: ignore[index]
    new = nn.Parameter(old.detach() * 2)
    model[0].weight = new  # type: ignore[index]
    members = optimizer.param_groups[0]["params"]
    members[[p is old for p in members].index(True)] = new
    optimizer.state[new] = optimizer.state.pop(old)


def replace_buffer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[1].running_mean = torch.ones(8)  # type: ignore[index]


def replace_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = optimizer.state[model[0].weight]  # type: ignore[index]
    for key, value in list(state.items()):
        state[key] = value * 0.5 if key != "step" else value


def load_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    for values in state["state"].values():
        for key, value in values.items():
            if key != "step":
                value *= 3
    optimizer.load_state_dict(state)


def forget_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


def forget_state_one_by_one(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in list(optimizer.state):
        del optimizer.state[parameter]


def forget_state_of_one(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    del optimizer.state[model[0].weight]  # type: ignore[index]


def replace_parameter_without_its_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """As when an embedding is resized: what is new begins anew, and all others go on."""
    replace_parameter(model, optimizer)
    forget_state_of_one(model, optimizer)


def write_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        for key, value in state.items():
            if key != "step":
                value.mul_(0.5)


OF_ONE = (forget_state_of_one, replace_parameter_without_its_state)
BETWEEN = [
    replace_parameter, replace_buffer, replace_state, load_state, forget_state, forget_state_one_by_one, write_state,
    *OF_ONE,
]  # fmt: skip


@pytest.mark.sweep(
    but=(
        "adamw-forget_state_of_one",
        "adamw-replace_parameter_without_its_state",
        "momentum-forget_state_of_one",
        "momentum-replace_parameter_without_its_state",
    )
)
@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("name", ["adamw", "momentum"])
def test_what_is_replaced_between_steps_acts_on_the_next_one(name: str, between: Between) -> None:
    ours, theirs = network(), network()
    make = OPTIMIZERS[name]
    if name == "momentum" and between in OF_ONE:  # which the fused kernel cannot do, in eager mode either
        make = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True)
    optimizers = [make(model.parameters()) for model in (ours, theirs)]
    step = graphopt.optimize_step(ours, optimizers[0], loss=mean_square)
    for number in range(6):
        loss = mean_square(theirs, ROWS)
        loss.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        assert torch.equal(step(ROWS), loss.detach()), number
        if number in (2, 3):
            between(ours, optimizers[0])
            between(theirs, optimizers[1])
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True))


def assign(model: nn.Module) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def put_another(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(torch.zeros_like(model[0].weight))  # type: ignore[index]


@pytest.mark.sweep(cases=("adamw-assign", "adamw-put_another"))
@pytest.mark.parametrize("replace", [assign, put_another])
@pytest.mark.parametrize("make", [OPTIMIZERS["adamw"], OPTIMIZERS["momentum"]], ids=["adamw", "momentum"])
def test_parameters_that_the_optimizer_does_not_hold_any_more_are_refused(make: Any, replace: Any) -> None:
    model = network()
    step = graphopt.optimize_step(model, make(model.parameters()), loss=mean_square)
    step(ROWS)
    replace(model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(2):
        with pytest.raises(
            GraphoptError, match=r"0\.weight is another parameter than the one that the optimizer holds"
        ):
            step(ROWS)
    assert all(map(torch.equal, before, model.parameters()))


def trained() -> tuple[nn.Module, torch.optim.Optimizer, TrainStep]:
    model = network()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    step = graphopt.optimize_step(model, optimizer, loss=mean_square)
    for _ in range(3):
        step(ROWS)
    return model, optimizer, step


def test_state_that_was_replaced_is_not_kept_alive() -> None:
    model, optimizer, _ = trained()
    old = weakref.ref(optimizer.state[model[0].weight]["exp_avg"])  # type: ignore[index]
    load_state(model, optimizer)
    assert old() is None


def test_gradients_from_outside_are_refused_at_any_step() -> None:
    model, _, step = trained()
    model[3].bias.grad = torch.zeros(2)  # type: ignore[index]
    with pytest.raises(GraphoptError, match=r"^3\.bias\.grad is set from outside"):
        step(ROWS)
    model[3].bias.grad = None  # type: ignore[index]
    step(ROWS)


def test_a_gradient_of_a_parameter_that_is_new_is_refused() -> None:
    model, optimizer, step = trained()
    replace_parameter(model, optimizer)
    model[0].weight.grad = torch.zeros(8, 4)  # type: ignore[index]
    with pytest.raises(GraphoptError, match=r"^0\.weight\.grad is set from outside"):
        step(ROWS)


def test_a_version_changes_with_assignments_and_stays_with_writes() -> None:
    model, optimizer, step = trained()
    version = optimizer_version(optimizer)
    step(ROWS)
    assert optimizer_version(optimizer) == version
    replace_state(model, optimizer)
    assert optimizer_version(optimizer) != version


@pytest.mark.sweep
def test_state_that_has_no_versions_has_no_version() -> None:
    model, optimizer, _ = trained()
    optimizer.state[model[0].weight] = [1, 2]  # type: ignore[index, assignment]
    assert optimizer_version(optimizer) is None
