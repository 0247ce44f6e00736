"""Models made without memory for their weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graphopt
from graphopt.capture.devices.meta_tensors import LARGEST_KEPT
from graphopt.errors import CaptureError


def test_large_tensors_have_no_data_and_small_ones_their_values() -> None:
    with graphopt.without_data():
        layer = nn.Linear(1000, 1000)
        rates = torch.linspace(0, 1, 5)
    assert layer.weight.is_meta
    assert not layer.bias.is_meta
    assert rates.tolist() == [0, 0.25, 0.5, 0.75, 1]


def test_devices_that_are_not_here_are_not_looked_at() -> None:
    with graphopt.without_data():
        model = nn.Sequential(nn.Linear(300, 300, device="cuda:1"), nn.BatchNorm1d(300)).to("cuda").cuda()
        x = torch.zeros(8, 300, device=torch.device("cuda")).to("cuda:0").cuda().pin_memory()
        y = torch.ones_like(x, device="cuda").to(device="cuda", dtype=torch.bfloat16)
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers(), x, y)} <= {"cpu", "meta"}
    assert y.dtype is torch.bfloat16


def test_modules_change_their_dtype() -> None:
    with graphopt.without_data():
        model = nn.TransformerEncoderLayer(512, 8).to(torch.bfloat16).half()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}


def test_initialisation_of_weights_runs() -> None:
    with graphopt.without_data():
        layer = nn.Linear(400, 400)
        nn.init.trunc_normal_(layer.weight, std=0.02)
        nn.init.orthogonal_(layer.weight)
        layer.weight.data.mul_(torch.full((400,), 0.5))
        layer.bias.data.zero_()
    assert layer.weight.is_meta
    assert layer.bias.count_nonzero() == 0


@pytest.mark.parametrize("grow", [lambda x: x.repeat(1000, 1000), lambda x: torch.outer(x[0], x[0].repeat(300))])
def test_what_grows_large_has_no_data(grow: object) -> None:
    with graphopt.without_data():
        result = grow(torch.ones(8, 300))  # type: ignore[operator]
    assert result.numel() > LARGEST_KEPT
    assert result.is_meta


def test_random_numbers_of_small_tensors_are_as_without() -> None:
    torch.manual_seed(3)
    wanted = torch.randn(5), torch.randperm(4, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(3)
    with graphopt.without_data():
        found = torch.randn(5), torch.randperm(4, generator=torch.Generator().manual_seed(1))
    assert all(map(torch.equal, wanted, found))


@pytest.mark.parametrize("read", [torch.Tensor.item, bool, torch.Tensor.tolist, float, torch.Tensor.numpy])
def test_values_that_there_are_none_of_are_refused_by_name(read: object) -> None:
    with graphopt.without_data(), pytest.raises(CaptureError, match=r"the code reads values \(.*65,536 elements"):
        read(torch.zeros(1000, 1000).sum())  # type: ignore[operator]


def test_values_that_would_be_lost_are_refused() -> None:
    with graphopt.without_data(), pytest.raises(CaptureError, match="writes a tensor without values"):
        torch.zeros(4).copy_(torch.zeros(1000, 1000)[0, :4])


def test_everything_is_as_before_behind_the_block() -> None:
    with pytest.raises(ValueError, match="mine"), graphopt.without_data():
        raise ValueError("mine")
    assert not torch.zeros(1000, 1000).is_meta
