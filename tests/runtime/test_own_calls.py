"""Classes of models with a ``__call__`` of their own, and with attributes outside of ``__dict__``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import graphopt
from graphopt.errors import CaptureError
from graphopt.passes import Recompute
from tests.support.training import OPTIMIZERS, mean_square

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


class Plain(nn.Module):
    """Breaks its graph where that is wanted."""

    def __init__(self, looks: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.looks, self.calls = nn.Linear(6, 6), looks, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        return y.sin() if self.looks and y.sum() > 0 else y.cos()


class Scales(Plain):
    def __call__(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return super().__call__(x * 2) * self.calls


class CallsForward(Plain):
    def __call__(self, x: torch.Tensor) -> Any:
        return self.forward(x * 2)


class Inside(Plain):
    def _call_impl(self, x: torch.Tensor) -> Any:
        return super()._call_impl(x * 2)


class Wrapped(Inside):
    def _wrapped_call_impl(self, x: torch.Tensor) -> Any:
        return super()._wrapped_call_impl(x * 2)

    __call__ = _wrapped_call_impl


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("cls", [Scales, CallsForward, Inside, Wrapped])
def test_a_call_of_the_class_acts_once(cls: type[Plain], looks: bool) -> None:
    optimized = graphopt.optimize(cls(looks), [Recompute("**")])
    for current in (copy.deepcopy(optimized), optimized):
        eager = cls(looks)
        for _ in range(3):
            found, expected = mean_square(current, X), mean_square(eager, X)
            found.backward()
            expected.backward()
            assert torch.equal(found, expected)
            assert torch.equal(current.linear.weight.grad, eager.linear.weight.grad)


@pytest.mark.parametrize("cls", [CallsForward, Inside, Wrapped])
def test_a_whole_step_calls_as_eager_mode_does(cls: type[Plain]) -> None:
    eager, model = cls(), cls()
    stepped, plain = OPTIMIZERS["sgd"](model.parameters()), OPTIMIZERS["sgd"](eager.parameters())
    step = graphopt.optimize_step(model, stepped, loss=mean_square)
    for _ in range(3):
        plain.zero_grad()
        expected = mean_square(eager, X)
        expected.backward()
        plain.step()
        assert torch.equal(step(X), expected)
        assert torch.equal(model.linear.weight, eager.linear.weight)


class Slotted(nn.Module):
    __slots__ = ("factor",)

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(6, 6), 3.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x) * self.factor
        return y


@pytest.mark.parametrize("make", [Slotted, lambda: nn.Sequential(nn.Linear(6, 6), Slotted())])
def test_attributes_outside_of_dict_are_refused_by_name(make: Any) -> None:
    with pytest.raises(CaptureError, match=r"Slotted keeps 'factor' in __slots__.*leave __slots__ out"):
        graphopt.optimize(make())
    model = make()
    with pytest.raises(CaptureError, match=r"__slots__"):
        graphopt.optimize_step(model, OPTIMIZERS["sgd"](model.parameters()), loss=mean_square)


def test_an_optimized_part_of_a_model_is_not_refused() -> None:
    inner = graphopt.optimize(Plain())
    model = graphopt.optimize(nn.Sequential(nn.Linear(6, 6), inner))
    assert model(X).shape == X.shape
