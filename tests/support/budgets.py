"""What the tests of FitMemory share: the pass with figures of the roofline, the smallest budget, small models."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from graphopt import PassError, Program
from graphopt.passes import FitMemory
from graphopt.rewriting.memory.fit.budget import BudgetError, least_bytes
from tests.support.fitting import applied
from tests.support.training import Net

ROWS = torch.linspace(-1, 1, 256 * 8).reshape(256, 8).cos()
TOKENS = torch.arange(64).reshape(4, 16) % 11


def fit(budget: int | str, **options: Any) -> FitMemory:
    """The pass with figures from the roofline, which measures nothing."""
    return FitMemory(budget, cost=options.pop("cost", "roofline"), **options)


def smallest_of(program: Program, **options: Any) -> int:
    """The smallest peak that is found, which the error for a budget below it holds."""
    least = least_bytes(program.memory())
    try:
        applied(program, fit(least, **options))
    except PassError as error:
        if isinstance(error.__cause__, BudgetError):
            return error.__cause__.smallest_bytes
        raise
    return least


def budgets_of(program: Program, count: int) -> list[int]:
    """Budgets from the smallest that is feasible to the peak without recomputation, both included."""
    low, high = smallest_of(program), program.memory().peak_bytes
    assert low < high
    return [low + (high - low) * number // (count - 1) for number in range(count)]


def conv() -> Net:
    torch.manual_seed(0)
    return Net(
        nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8),
        nn.GELU(), nn.Dropout(0.2), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(144, 4),
    )  # fmt: skip


IMAGES = torch.linspace(-1, 1, 8 * 2 * 64).reshape(8, 2, 8, 8).cos()
