"""Gradients and counts of writes that forward reads: refused by name, and eager mode's in a drop-in model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import graphopt
from graphopt.errors import GraphBreakError
from tests.support.training import mean_square

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


@pytest.mark.parametrize("kind", READS)
def test_a_drop_in_model_reads_what_eager_mode_reads_and_a_step_refuses(kind: str) -> None:
    model, plain, whole = (Reads(READS[kind]) for _ in range(3))
    step = graphopt.optimize_step(whole, torch.optim.SGD(whole.parameters(), 0.1), loss=mean_square)
    with pytest.raises(GraphBreakError, match=r"forward reads the .* of a parameter(.|\n)*test_gradients_read.py"):
        step(X)
    assert losses(model, graphopt.optimize(model)) == losses(plain, plain)


def test_gradients_of_tensors_that_forward_makes_are_none_as_in_eager_mode() -> None:
    model = Reads(lambda m: 1.0 if (m.linear.weight.detach() * 2).grad is None else 2.0)
    step = graphopt.optimize_step(model, torch.optim.SGD(model.parameters(), 0.0), loss=mean_square)
    assert torch.equal(step(X), mean_square(model, X))
