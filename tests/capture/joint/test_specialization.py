"""A program whose sizes vary is compared, at some sizes, with the one that was captured for these sizes."""

from __future__ import annotations

import torch
from torch import nn

import graphopt
from graphopt import Program
from graphopt.capture.joint.specialization import first_difference


class Sliced(nn.Module):
    def __init__(self, factor: float = 2.0, drop: int = 0) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.factor, self.drop = factor, drop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)[None, :, self.drop :] * self.factor / x.shape[0]
        return nn.functional.dropout(x, 0.5)


def captured(model: nn.Module, rows: int, *, vary: bool) -> Program:
    shapes = ({0: torch.export.Dim("rows", min=2, max=64)},) if vary else None
    return graphopt.capture(model, (torch.zeros(rows, 4),), dynamic_shapes=shapes)


def difference(fixed: Program, varying: Program, rows: int) -> str:
    (symbol,) = varying.symbols
    return first_difference(fixed, varying, {symbol: rows})


def test_the_same_model_has_the_same_calls() -> None:
    varying = captured(Sliced(), 5, vary=True)
    for rows in (5, 9):
        assert difference(captured(Sliced(), rows, vary=False), varying, rows) == ""


def test_other_calls_arguments_and_sizes_are_named() -> None:
    varying = captured(Sliced(), 5, vary=True)
    fixed = captured(Sliced(), 9, vary=False)
    assert "other arguments" in difference(fixed, varying, 8)
    assert "mul in place of slice" in difference(captured(Sliced(drop=1), 9, vary=False), varying, 9)
    assert "mul in place of mul" in difference(captured(Sliced(factor=3.0), 9, vary=False), varying, 9)
    assert "in place of" in difference(captured(nn.Sequential(nn.Linear(4, 4), nn.GELU()), 9, vary=False), varying, 9)
