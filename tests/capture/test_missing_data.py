"""A model without data that gets a batch with data is refused by name, whole steps and drop-in models alike."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graphopt
from graphopt import CaptureError
from tests.support.training import mean_square


def test_a_model_on_meta_is_refused_and_trains_when_it_has_its_values() -> None:
    with graphopt.without_data():
        model = nn.Linear(400, 300)
    batch = torch.randn(2, 400)
    with pytest.raises(CaptureError, match=r"'weight' is on the device meta.*materialize_shards"):
        graphopt.optimize_step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=mean_square)(batch)
    with pytest.raises(CaptureError, match=r"'weight' is on the device meta"):
        graphopt.optimize(model)(batch)
    graphopt.materialize_shards(model)
    step = graphopt.optimize_step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=mean_square)
    assert step(batch) > step(batch)
