"""Tensors that code holds beside the model: its own parameters elsewhere, those of others, gradients that it reads."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import graphopt
from graphopt.errors import GraphBreakError
from tests.support.training import OPTIMIZERS, mean_square

X = torch.linspace(-1, 1, 24).view(4, 6)

READS: dict[str, Callable[[nn.Module], float]] = {
    "a gradient that is there": lambda m: 1.0 if m.linear.weight.grad is None else 1.5,
    "the size of a gradient": lambda m: 1.0 if m.linear.bias.grad is None else 1.0 + float(m.linear.bias.grad.norm()),
    "any gradient": lambda m: 1.0 + sum(p.grad is not None for p in m.parameters()),
    "a count of writes": lambda m: 1.0 + m.linear.weight._version % 2,
}


class Reads(nn.Module):
    def __init__(self, read: Callable[[nn.Module], float]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.read = nn.Linear(6, 6), read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.read(self)


def losses(model: nn.Module, called: nn.Module) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = []
    for _ in range(4):
        loss = mean_square(called, X)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


@pytest.mark.sweep(cases=("the size of a gradient", "any gradient"))
@pytest.mark.parametrize("kind", READS)
def test_a_drop_in_model_reads_what_eager_mode_reads_and_a_step_refuses(kind: str) -> None:
    model, plain, whole = (Reads(READS[kind]) for _ in range(3))
    step = graphopt.optimize_step(whole, torch.optim.SGD(whole.parameters(), 0.1), loss=mean_square)
    with pytest.raises(GraphBreakError, match=r"forward reads the .* of a parameter(.|\n)*test_tensor_effects.py"):
        step(X)
    assert losses(model, graphopt.optimize(model)) == losses(plain, plain)


def test_gradients_of_tensors_that_forward_makes_are_none_as_in_eager_mode() -> None:
    model = Reads(lambda m: 1.0 if (m.linear.weight.detach() * 2).grad is None else 2.0)
    step = graphopt.optimize_step(model, torch.optim.SGD(model.parameters(), 0.0), loss=mean_square)
    assert torch.equal(step(X), mean_square(model, X))


# --- parameters of the model that code holds elsewhere ---------------------------------------------------------------


def anchored(parameters: list[Any], start: list[torch.Tensor], mean: Any) -> Callable[[nn.Module, torch.Tensor], Any]:
    """A loss that holds parameters where they started, and reads a buffer."""

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        penalty = sum((now - then).square().sum() for now, then in zip(parameters, start, strict=True))
        return mean_square(model, x) + penalty * 0.1 + torch.stack([p.norm() for p in parameters]).sum() + mean.sum()

    return loss


def test_a_loss_over_a_list_of_the_models_parameters_trains_them() -> None:
    found = []
    for whole in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
        parameters, mean = list(model.parameters()), model[1].running_mean
        start = [parameter.detach().clone() for parameter in parameters]

        loss = anchored(parameters, start, mean)
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        step = graphopt.optimize_step(model, optimizer, loss=loss)
        losses = []
        for _ in range(4):
            if whole:
                losses.append(step(X))
                continue
            losses.append(loss(model, X))
            optimizer.zero_grad()
            losses[-1].backward()
            optimizer.step()
        found.append([*(value.detach() for value in losses), *model.state_dict().values()])
    assert all(map(torch.equal, *found))


class KeepsItsOwn(nn.Module):
    """Reads one of its parameters from a list as well."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 6)
        self.decayed = [self.linear.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + sum(w.square().sum() for w in self.decayed) + torch.mm(x, mat2=self.decayed[0])


def test_a_parameter_that_a_model_keeps_in_a_list_too() -> None:
    plain, model = KeepsItsOwn(), KeepsItsOwn()
    optimized: Any = graphopt.optimize(model)
    for called in (plain, optimized):
        mean_square(called, X).backward()
    assert len(optimized.programs) == 1
    assert "constant" not in {spec.role for spec in optimized.program.inputs}
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


# --- parameters of others --------------------------------------------------------------------------------------------


class Hides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.hidden = nn.Linear(6, 6), [nn.Linear(6, 6)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.hidden[0](x)


class Margin(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (model(x) * self.scale).square().mean()


def test_a_drop_in_model_gives_hidden_parameters_their_gradients_in_parts() -> None:
    plain, model = Hides(), Hides()
    optimized = graphopt.optimize(model)
    for _ in range(2):
        for called in (plain, optimized):
            mean_square(called, X).backward()
    found = [[*each.parameters(), *each.hidden[0].parameters()] for each in (plain, model)]
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("registered", [False, True])
def test_a_loss_with_parameters_that_the_optimizer_holds(registered: bool) -> None:
    model, loss = nn.Linear(6, 6), Margin()
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], 0.1)
    if registered:  # as the message says
        model.criterion = loss
    step = graphopt.optimize_step(model, optimizer, loss=loss)
    if registered:
        step(X)
        assert not torch.equal(loss.scale, torch.ones(6))
        return
    with pytest.raises(GraphBreakError, match=r"shape \(6,\) .* the optimizer holds(.|\n)*model\.criterion"):
        step(X)
    assert torch.equal(loss.scale, torch.ones(6))


def test_parameters_that_nobody_trains_are_told_once_by_their_line(caplog: pytest.LogCaptureFixture) -> None:
    teacher, model = nn.Linear(6, 6), nn.Linear(6, 6)
    plain = copy.deepcopy(model)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (model(x) - teacher(x)).square().mean()

    step = graphopt.optimize_step(model, torch.optim.SGD(model.parameters(), 0.0), loss=loss)
    with caplog.at_level(logging.WARNING, "graphopt"):
        for batch in (X, X[:2], X[:3]):
            assert torch.equal(step(batch), loss(plain, batch))
    assert sum("return (model(x) - teacher(x))" in record.getMessage() for record in caplog.records) == 1


def _under_no_grad(teacher: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return teacher(x)


QUIET: dict[str, Callable[[nn.Linear, torch.Tensor], torch.Tensor]] = {
    "no_grad": _under_no_grad,
    "detached": lambda teacher, x: nn.functional.linear(x, teacher.weight.detach()),
    "data": lambda teacher, x: nn.functional.linear(x, teacher.weight.data),
    "dtype": lambda teacher, x: x.to(teacher.weight.dtype) * teacher.weight.shape[0],
    "like": lambda teacher, x: x + torch.zeros_like(teacher.bias),
}


@pytest.mark.parametrize("kind", QUIET)
def test_others_that_need_no_gradient_are_taken_without_a_word(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    teacher, model = nn.Linear(6, 6), nn.Linear(6, 6)
    step = graphopt.optimize_step(
        model,
        torch.optim.SGD([*model.parameters(), *teacher.parameters()], 0.0),
        loss=lambda model, x: (model(x) - QUIET[kind](teacher, x)).square().mean(),
    )
    with caplog.at_level(logging.WARNING, "graphopt"):
        assert torch.equal(step(X), (model(X) - QUIET[kind](teacher, X)).square().mean())
    assert not [record for record in caplog.records if "require" in record.getMessage()]
