"""Sizes that change from call to call: the third capture says which, and what it says to write works."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graphopt
from tests.support.training import Net


def squared(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), target)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "dynamic_shapes" in record.getMessage()]


def test_what_the_warning_says_to_write_captures_once(caplog: pytest.LogCaptureFixture) -> None:
    model = Net(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    step = graphopt.optimize_step(model, optimizer, loss=squared, dynamic_shapes=None)
    for rows in (3, 5):
        step(torch.zeros(rows, 4), torch.zeros(rows, 4))
    assert warnings_of(caplog) == []
    for rows in (6, 7):
        step(torch.zeros(rows, 4), torch.zeros(rows, 4))
    (text,) = warnings_of(caplog)
    assert "axis 0 of x was 3, 5, 6; axis 0 of target was 3, 5, 6" in text
    assert re.search(r"3 captures for sizes that change took \d+\.\d s", text)
    written = re.search(r"dynamic_shapes=(\{.*\})", text)
    assert written is not None
    shapes = eval(written[1], {"torch": torch})
    again = graphopt.optimize_step(model, optimizer, loss=squared, dynamic_shapes=shapes)
    for rows in (3, 5, 6, 9):
        again(torch.zeros(rows, 4), torch.zeros(rows, 4))
    assert len(again._runner.captures.all()) == 1


@pytest.mark.sweep
def test_a_drop_in_model_names_the_arguments_of_forward(caplog: pytest.LogCaptureFixture) -> None:
    model = graphopt.optimize(Net(nn.Linear(4, 4)), dynamic_shapes=None)
    for rows in (3, 5, 6):
        model(torch.zeros(rows, 4))
    (text,) = warnings_of(caplog)
    assert "axis 0 of x was 3, 5, 6" in text
    assert "dynamic_shapes={'x': {0: torch.export.Dim('x_0')}}" in text
