"""What a drop-in model returns, in any layout: gradients arrive in any strides, and keep eager's bits and signs."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import graphopt
from graphopt import CaptureError
from tests.support.properties import examples

X = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))

Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Weighted(nn.Module):
    """A function of a matrix that is trained, and of an input."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.weight, x)


LAYOUTS: dict[str, Function] = {
    "transposed product": lambda w, x: (w @ x).t(),
    "transposed": lambda w, x: (w * x).t(),
    "permuted": lambda w, x: torch.stack([w @ x, w @ x + 1]).permute(2, 0, 1),
    "size one": lambda w, x: (w @ x).unsqueeze(0).permute(2, 0, 1),
    "narrow": lambda w, x: (w @ x)[:, 1:3],
    "flipped": lambda w, x: (w @ x).flip(0).t()[1:],
    "reshaped": lambda w, x: (w @ x).t().reshape(4, 9),
    "expanded": lambda w, x: (w @ x).sum(0).expand(6, 6),
    "channels last": lambda w, x: (w @ x).view(1, 2, 3, 6).contiguous(memory_format=torch.channels_last),
    "viewed": lambda w, x: ((w @ x).view(3, 12) * 2).view(2, 18),
}


def arriving(output: torch.Tensor, how: str) -> torch.Tensor:
    """A gradient for an output, in some strides."""
    made = torch.linspace(-1, 2, output.numel()).view(output.shape)
    if how == "as the output":
        return torch.empty_like(output).copy_(made)
    if how == "reversed":
        axes = list(range(output.dim()))[::-1]
        return made.permute(axes).contiguous().permute(axes)
    if how == "expanded":
        return torch.tensor(-0.5).expand(output.shape)
    return made


@examples(8)
@given(
    name=st.sampled_from(sorted(LAYOUTS)),
    how=st.sampled_from(["contiguous", "as the output", "reversed", "expanded"]),
)
def test_gradients_may_arrive_in_any_strides(name: str, how: str) -> None:
    model = Weighted(LAYOUTS[name])
    optimized = graphopt.optimize(copy.deepcopy(model))
    for _ in range(2):
        for current in (model, optimized):
            current.zero_grad()
            output = current(X)
            output.backward(arriving(output, how))
        assert torch.equal(model.weight.grad, optimized.weight.grad)  # type: ignore[arg-type]


ONE_ELEMENT: dict[str, Function] = {
    "max": lambda w, x: (w * x).max(),
    "min": lambda w, x: (w * x).min(),
    "median": lambda w, x: (w * x).median(),
    "nanmedian": lambda w, x: (w * x).nanmedian(),
    "max of ties": lambda w, x: (w * x).round().max(),
}


@pytest.mark.sweep(but=("1.0-nanmedian", "-1.0-max of ties"))
@pytest.mark.parametrize("function", ONE_ELEMENT.values(), ids=ONE_ELEMENT)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_zeros_keep_their_sign(function: Function, sign: float) -> None:
    model = Weighted(function)
    optimized = graphopt.optimize(copy.deepcopy(model))
    for current in (model, optimized):
        (sign * current(X)).backward()
    one, other = model.weight.grad, optimized.weight.grad
    assert one is not None
    assert other is not None
    assert torch.equal(one, other)
    assert torch.equal(one.signbit(), other.signbit())


def test_outputs_that_overlap_are_refused() -> None:
    model = graphopt.optimize(Weighted(lambda w, x: (w * x).as_strided((6, 3), (1, 1))))
    with pytest.raises(CaptureError, match=r"elements overlap in memory .*strides \[1, 1\]\).*\.contiguous\(\)"):
        model(X)


def windows(rows: int, step: int) -> Function:
    """Writes to windows on a product, each ``step`` elements behind the one before."""

    def function(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        h = w * x
        with torch.no_grad():
            first = h.detach().clone().as_strided((rows, 3), (step, 1)).mul_(0.5).sum()
        return h.as_strided((rows, 3), (step, 1)).mul_(0.5).sin() * first

    return function


def test_writes_to_elements_that_overlap_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"writes in place \(mul_, .*elements overlap in memory .*\.contiguous\(\)"):
        graphopt.optimize(Weighted(windows(6, 2)))(X)
    apart = Weighted(windows(6, 3))
    assert torch.equal(graphopt.optimize(apart)(X), apart(X))


def test_a_model_that_returns_views_of_what_it_is_given_is_told_so() -> None:
    with pytest.raises(CaptureError, match="is a view of its inputs or parameters"):
        graphopt.optimize(Weighted(lambda w, x: w.t()))(X)


SHARED: dict[str, tuple[Function, bool]] = {
    "a view beside what is read too": (lambda w, x: ((h := w * x), h[1:], h.exp()), True),  # type: ignore[return-value]
    "two views": (lambda w, x: ((h := w * x)[1:], h.t(), h.exp()), True),  # type: ignore[return-value]
    "read no further": (lambda w, x: ((h := w * x), h[1:]), False),  # type: ignore[return-value]
    "a copy": (lambda w, x: ((h := w * x), h[1:].clone(), h.exp()), False),  # type: ignore[return-value]
    "one of them": (lambda w, x: ((h := w * x)[1:], h.exp()), False),  # type: ignore[return-value]
}


@pytest.mark.sweep(cases=("a copy", "one of them"))
@pytest.mark.parametrize(("function", "told"), SHARED.values(), ids=SHARED)
def test_views_of_one_tensor_are_told_where_it_is_read_too(
    function: Function, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = Weighted(function)
    optimized = graphopt.optimize(copy.deepcopy(model))
    for current in (model, optimized):
        sum(output.sin().sum() for output in current(X)).backward()
    assert ("as views of one tensor" in caplog.text) == told
    if told:
        assert ".clone()" in caplog.text
        torch.testing.assert_close(model.weight.grad, optimized.weight.grad)
    else:
        assert torch.equal(model.weight.grad, optimized.weight.grad)  # type: ignore[arg-type]


COMPLEX: dict[str, Function] = {
    "hfft": lambda w, x: torch.fft.hfft(w * x),
    "irfft": lambda w, x: torch.fft.irfft(torch.fft.rfft(w * x)),
}


@pytest.mark.sweep(cases=("hfft",))
@pytest.mark.parametrize("function", COMPLEX.values(), ids=COMPLEX)
def test_what_torch_adds_behind_backward_is_backward(function: Function) -> None:
    model = Weighted(function)
    optimized = graphopt.optimize(copy.deepcopy(model))
    for current in (model, optimized):
        current(X).square().sum().backward()
    assert torch.equal(model.weight.grad, optimized.weight.grad)  # type: ignore[arg-type]
    phases = [str(graphopt.ir.node.info(node).phase) for node in optimized.program.nodes if node.op == "call_function"]  # type: ignore[union-attr,operator]
    assert phases == sorted(phases, reverse=True)  # forward, then backward


def test_a_sparse_gradient_is_refused_with_the_way_out(capfd: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
    with pytest.raises(CaptureError, match=r"the gradient of 0.weight is sparse(?s:.*)without sparse=True"):
        graphopt.capture(model, (torch.tensor([1, 2]),), loss=lambda model, x: model(x).sum())
    assert "Traceback" not in capfd.readouterr().err
