"""Optimized models under ``torch.func``, with replaced parameters, differentiated twice: as in eager mode, or told."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, strategies
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jvp, vjp, vmap

import graphopt
from graphopt import CaptureError
from tests.support.properties import examples


@pytest.fixture
def models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    return model, graphopt.optimize(copy.deepcopy(model))


X = torch.linspace(-1, 1, 12).view(3, 4)


def loss(model: nn.Module, parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return functional_call(model, parameters, (x,)).square().sum()


TRANSFORMS: dict[str, Callable[[nn.Module], Any]] = {
    "grad": lambda m: grad(lambda p: loss(m, p, X))(dict(m.named_parameters())),
    "vmap": lambda m: vmap(m)(X),
    "vjp": lambda m: vjp(m, X)[1](torch.ones(3, 1)),
    "jvp": lambda m: jvp(m, (X,), (X + 1,)),
    "hessian": lambda m: hessian(lambda x: m(x).sum())(X),
    "per sample": lambda m: vmap(grad(lambda p, x: loss(m, p, x)), (None, 0))(dict(m.named_parameters()), X),
}


@pytest.mark.sweep(cases=("jvp",))
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own call
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_run_in_eager_mode_and_are_told_once(
    transform: Callable[[nn.Module], Any], models: tuple[nn.Module, nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    plain, optimized = models
    for _ in range(2):
        expected, found = transform(plain), transform(optimized)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert caplog.text.count("Sequential runs in eager mode where a transform of torch.func is at work") == 1


def forward_mode(model: nn.Module) -> torch.Tensor:
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(X, X + 1))).tangent
        return tangent.detach().clone()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own call
def test_forward_mode_runs_in_eager_mode_and_is_told(
    models: tuple[nn.Module, nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    plain, optimized = models
    assert torch.equal(forward_mode(plain), forward_mode(optimized))
    assert "Sequential runs in eager mode where forward-mode differentiation is at work" in caplog.text


def test_other_parameters_get_their_gradients(
    models: tuple[nn.Module, nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    found = []
    for model in models:
        others = {name: (p.detach() + 1).requires_grad_() for name, p in model.named_parameters()}
        loss(model, others, X).backward()
        found.append([other.grad for other in others.values()])
        assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))  # type: ignore[arg-type]
    assert "its parameters are other tensors in this call" in caplog.text
    assert graphopt.optimize(models[0])(X).requires_grad  # and a plain call is captured as ever


def test_a_second_derivative_is_refused_by_name(models: tuple[nn.Module, nn.Module]) -> None:
    plain, optimized = models
    x = X.clone().requires_grad_()
    for _ in range(2):
        (first,) = torch.autograd.grad(optimized(x).sum(), x, create_graph=True)
        (expected,) = torch.autograd.grad(plain(x).sum(), x, create_graph=True)
        assert torch.equal(first, expected)
        assert first.requires_grad
        with pytest.raises(CaptureError, match=r"is differentiated a second time .*the model that was given"):
            first.square().sum().backward()
    optimized(x).sum().backward()  # goes on afterwards
    plain(X).sum().backward()
    for one, other in zip(optimized.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


def network(width: int, outputs: int, *, through: bool) -> nn.Module:
    """One with one or several outputs, the last of which may be an input."""

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, width), nn.Linear(width, 1)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            hidden = torch.tanh(self.first(x))
            return (self.last(hidden), *(hidden * n for n in range(1, outputs)), *((x * 2,) if through else ()))

    torch.manual_seed(0)
    return Network()


@examples(8)
@given(
    width=strategies.integers(1, 8),
    outputs=strategies.integers(1, 3),
    through=strategies.booleans(),
    by=strategies.sampled_from(["leaf", "view", "result", "parameter"]),
    passes=strategies.sampled_from(["", "recompute{checkpoints=*}"]),
)
def test_second_derivatives_are_never_zero_instead(
    width: int, outputs: int, through: bool, by: str, passes: str
) -> None:
    """By whatever they are taken, and although the caller allows for none."""
    optimized = graphopt.optimize(network(width, outputs, through=through), passes)
    leaf = X.clone().requires_grad_()
    given_to = {"view": leaf.view_as(leaf), "result": leaf * 1}.get(by, leaf)
    target = optimized.get_parameter("first.weight") if by == "parameter" else leaf
    (first,) = torch.autograd.grad(optimized(given_to)[0].sum(), given_to, create_graph=True)
    with pytest.raises(CaptureError, match="is differentiated a second time"):
        torch.autograd.grad(first.sum(), target, allow_unused=True)


def test_a_hessian_is_refused(models: tuple[nn.Module, nn.Module]) -> None:
    with pytest.raises(CaptureError, match="is differentiated a second time"):
        torch.autograd.functional.hessian(lambda x: models[1](x).sum(), X)  # type: ignore[no-untyped-call]


def test_several_gradients_at_once_are_refused(models: tuple[nn.Module, nn.Module]) -> None:
    optimized = models[1]
    x = X.clone().requires_grad_()
    with pytest.raises(CaptureError, match=r"for several gradients at once .*the model that was given"):
        torch.autograd.grad(optimized(x), x, torch.ones(2, 3, 1), is_grads_batched=True)
    with pytest.raises(CaptureError, match="for several gradients at once"):
        torch.autograd.functional.jacobian(optimized, X, vectorize=True)  # type: ignore[no-untyped-call]
    optimized(x).sum().backward()  # goes on afterwards
