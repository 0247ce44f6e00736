"""Parameters and buffers that are replaced between calls of a drop-in model: the next call has the new ones."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

import graphopt


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def _new(tensor: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-1.0, 1.0, tensor.numel()).view_as(tensor)


def _assigned(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(_new(model[0].weight))


def _in_the_dictionary(model: nn.Sequential) -> None:
    model[2]._parameters["bias"] = nn.Parameter(_new(model[2].bias))


def _data(model: nn.Sequential) -> None:
    model[0].weight.data = _new(model[0].weight)


def _buffer(model: nn.Sequential) -> None:
    model[1].running_mean = _new(model[1].running_mean)


def _buffer_in_the_dictionary(model: nn.Sequential) -> None:
    model[1]._buffers["running_var"] = _new(model[1].running_var).abs()


def _loaded(model: nn.Sequential) -> None:
    model.load_state_dict(
        {name: _new(value.float()).to(value) for name, value in model.state_dict().items()}, assign=True
    )


def _layer(model: nn.Sequential) -> None:
    torch.manual_seed(5)
    model[2] = nn.Linear(4, 2)


@pytest.mark.parametrize(
    "replace", [_assigned, _in_the_dictionary, _data, _buffer, _buffer_in_the_dictionary, _loaded, _layer]
)
def test_the_next_call_has_the_new_one(replace: Callable[[nn.Sequential], None]) -> None:
    eager, model = _model(), graphopt.optimize(_model())
    for round in range(5):
        x = torch.randn(6, 3, generator=torch.Generator().manual_seed(round))
        if round in (2, 4):
            replace(eager)
            replace(model)
        expected, found = eager(x), model(x)
        assert torch.equal(found, expected)
        gradients = [
            torch.autograd.grad(out.square().sum(), list(each.parameters()))
            for out, each in ((expected, eager), (found, model))
        ]
        assert all(map(torch.equal, *gradients))
    for ours, theirs in zip(model.state_dict().values(), eager.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


def test_captures_for_two_sizes_both_see_it() -> None:
    eager, model = _model(), graphopt.optimize(_model(), dynamic_shapes=None)
    for rows in (6, 5, 6, 5):
        for changed in (False, True):
            if changed:
                _assigned(eager)
                _assigned(model)
            x = torch.randn(rows, 3)
            assert torch.equal(model(x), eager(x))


def test_one_that_was_replaced_is_not_kept_by_the_call_that_follows() -> None:
    model = graphopt.optimize(_model())
    x = torch.randn(6, 3)
    model(x)
    old = weakref.ref(model[0].weight)
    _assigned(model)
    model(x)
    gc.collect()
    assert old() is None
