"""Ops that torch traces in another form than eager mode runs them: the gradients, strides and draws are eager's."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import graphopt
from graphopt.passes import Recompute
from tests.support.bits import first_difference
from tests.support.properties import examples

Function = Callable[[torch.Tensor], torch.Tensor]


class Weighted(nn.Module):
    """A function of a weighted input."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1.5, 2, 24).view(4, 6))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.weight * x).sin().sum()


def trained(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor | None]:
    torch.manual_seed(3)
    model.zero_grad()
    loss = model(x)
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters()), torch.get_rng_state()]


PRODUCTS: dict[str, Function] = {
    "all": lambda h: h.prod(),
    "rows": lambda h: h.prod(1),
    "columns, kept": lambda h: h.prod(0, keepdim=True),
    "last of a transposed": lambda h: h.t().prod(-1),
    "in another dtype": lambda h: h.prod(dtype=torch.float64).float(),
    "of a scalar": lambda h: h.sum().prod(),
    "of one column": lambda h: h[:, :1].prod(1),
}


@examples(10)
@given(
    name=st.sampled_from(sorted(PRODUCTS)),
    zeros=st.sets(st.integers(0, 23), max_size=3),
    recomputed=st.booleans(),
)
def test_products_look_for_zeros_as_eager_mode_does(name: str, zeros: set[int], recomputed: bool) -> None:
    model = Weighted(PRODUCTS[name])
    x = torch.linspace(0.5, 1.5, 24)
    optimized = graphopt.optimize(copy.deepcopy(model), [Recompute("*::sin*")] if recomputed else [])
    x[list(zeros)] = 0
    for _ in range(2):
        assert not first_difference(trained(optimized, x.view(4, 6)), trained(model, x.view(4, 6)))
        x = x.flip(0)


WRITES: dict[str, Function] = {
    "mul_": lambda h: h.mul_(torch.linspace(1, 2, h.numel()).view(h.shape)),
    "clamp_": lambda h: h.clamp_(-1, 1),
    "relu_": lambda h: F.relu_(h),
    "dropout_": lambda h: F.dropout(h, 0.5, inplace=True),
    "bernoulli_": lambda h: h * torch.empty_like(h).bernoulli_(0.5),
    "masked_fill_": lambda h: h.masked_fill_(h > 0.5, 2.0),
    "tril_": lambda h: h.tril_(),
    "cumsum_": lambda h: h.cumsum_(0),
}
LAYOUTS: dict[str, Function] = {
    "as it is": lambda h: h * 1.5,
    "transposed": lambda h: (h * 1.5).t(),
    "permuted": lambda h: (h * 1.5).view(2, 2, 6).permute(2, 0, 1)[:, 0],
}


@pytest.mark.sweep(but=("mul_-as it is", "relu_-as it is", "tril_-as it is"))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("write", WRITES)
def test_calls_that_write_keep_the_strides_of_what_they_write_to(write: str, layout: str) -> None:
    def function(h: torch.Tensor) -> torch.Tensor:
        written = WRITES[write](LAYOUTS[layout](h))
        return written * torch.arange(written.numel()).view(written.shape).cos()

    model = Weighted(function)
    optimized = graphopt.optimize(copy.deepcopy(model))
    x = torch.linspace(-1, 1, 24).view(4, 6)
    for _ in range(2):
        assert not first_difference(trained(optimized, x), trained(model, x))


@pytest.mark.sweep(but=("maximum",))
@pytest.mark.parametrize("op", [torch.maximum, torch.minimum])
def test_gradients_of_maxima_are_summed_in_the_order_of_eager_modes_layout(op: Function) -> None:
    def function(h: torch.Tensor) -> torch.Tensor:
        image = torch.outer(h.flatten(), torch.linspace(0.3, 2, 28)).view(2, 6, 7, 8)
        image = image.contiguous(memory_format=torch.channels_last)
        return op(image, h[0, :1]) * torch.arange(672).view(image.shape).cos()

    model = Weighted(function)
    optimized = graphopt.optimize(copy.deepcopy(model))
    for seed in range(5):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
        assert not first_difference(trained(optimized, x), trained(model, x))
