"""What ops allocate while they run is counted, or bounded where it depends on values."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import graphopt


class Exponential(nn.Module):
    """A matrix exponential of a weight of some norm."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-scale, scale, 24 * 24).view(24, 24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.matrix_exp(self.weight) @ x).mean()


def predicted_and_measured(model: nn.Module, x: torch.Tensor) -> tuple[int, int]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = graphopt.optimize_step(model, optimizer, loss=lambda model, x: model(x).mean())
    step(x)
    peak = graphopt.measure_peak(lambda: step(x)).allocated_peak_bytes
    return step.program.memory().allocated_peak_bytes, peak


@pytest.mark.parametrize("scale", [0.0, 1e-3, 0.05, 0.5])
def test_a_matrix_exponential_is_bounded_for_every_norm(scale: float) -> None:
    predicted, measured = predicted_and_measured(Exponential(scale), torch.ones(24, 2))
    assert measured <= predicted
    if scale == 0.5:
        assert measured == predicted  # the largest norm takes what is said


def test_orthogonal_parametrizations_are_bounded() -> None:
    predicted, measured = predicted_and_measured(parametrizations.orthogonal(nn.Linear(24, 24)), torch.ones(4, 24))
    assert measured <= predicted
