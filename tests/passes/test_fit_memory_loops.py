"""FitMemory: what is promised holds in every loop around the model, whatever it keeps and however gradients arrive."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import graphopt
from graphopt import measure_peak
from tests.support.budgets import fit
from tests.support.fitting import frontiers_searched_once
from tests.support.properties import examples

ROWS, WIDTH, WORDS = 192, 32, 96
X = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
TO_LOGITS = torch.randn(ROWS, WORDS, generator=torch.Generator().manual_seed(1))
TO_FEATURES = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(2))
SMALL = 4096
"""Bytes: what a loop itself may take, for scalars and the like."""


@pytest.fixture(autouse=True, scope="module")
def _searched_once() -> Iterator[None]:
    with frontiers_searched_once():
        yield


class Head(nn.Module):
    """Layers and a large result, with parameters whose gradients arrive permuted, and as one tensor for two."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(WIDTH, 2, ROWS // 2))
        self.first, self.second = nn.Parameter(torch.randn(ROWS, WIDTH)), nn.Parameter(torch.randn(ROWS, WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(10))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = x + self.position.permute(1, 2, 0).reshape(ROWS, WIDTH) + (self.first + self.second)
        for layer in self.layers:
            h = h + F.gelu(torch.tanh(layer(h)))
        return {"features": h, "logits": self.head(h)}


def head() -> nn.Module:
    torch.manual_seed(0)
    return Head()


def keeps_all(model: nn.Module) -> object:
    out = model(X)
    torch.autograd.backward([out["logits"], out["features"]], [TO_LOGITS, TO_FEATURES])
    return out


def keeps_logits_and_uses_them(model: nn.Module) -> object:
    logits = model(X)["logits"]
    logits.backward(TO_LOGITS)
    return logits


def uses_features_only(model: nn.Module) -> object:
    out = model(X)
    out["features"].backward(TO_FEATURES)
    return out


def keeps_nothing(model: nn.Module) -> object:
    model(X)["logits"].backward(TO_LOGITS)
    return None


def sums(model: nn.Module) -> object:
    out = model(X)
    (out["logits"].sum() + out["features"].sum()).backward()
    return out


def weighs(model: nn.Module) -> object:
    out = model(X)
    ((out["logits"] * TO_LOGITS).sum() + (out["features"] * TO_FEATURES).sum()).backward()
    return out


LOOPS: dict[str, Callable[[nn.Module], object]] = {
    f.__name__: f for f in (keeps_all, keeps_logits_and_uses_them, uses_features_only, keeps_nothing, sums, weighs)
}


def peak(model: nn.Module, loop: Callable[[nn.Module], object], *, add_up: bool = False) -> int:
    """The bytes that the second run of a loop adds, with gradients made anew or added to those that are there."""
    loop(model)
    if not add_up:
        model.zero_grad()
    return measure_peak(lambda: loop(model)).allocated_peak_bytes


@examples(2)
@given(loop=st.sampled_from(sorted(LOOPS)), percent=st.integers(62, 100), add_up=st.booleans())
def test_the_budget_holds(loop: str, percent: int, add_up: bool) -> None:
    model = graphopt.optimize(head(), [fit(f"{percent}%")], example_inputs=(X,))
    memory = model.program.memory()
    allowed = memory.resident_bytes + memory.allocated_peak_bytes
    before = graphopt.capture(head(), (X,)).memory().peak_bytes
    assert allowed <= before * percent / 100
    assert peak(model, LOOPS[loop], add_up=add_up) <= memory.allocated_peak_bytes + SMALL


@pytest.mark.sweep
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_gradients_lie_in_memory_as_eagers_do(loop: Callable[[nn.Module], object]) -> None:
    plain, model = head(), graphopt.optimize(head(), [fit("70%")])
    loop(plain)
    loop(model)
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None and other.grad is not None:
            assert torch.equal(one.grad, other.grad)
            assert one.grad.stride() == other.grad.stride()
    assert model.first.grad.data_ptr() != model.second.grad.data_ptr()  # type: ignore[union-attr]


@pytest.mark.sweep(but=("100",))
@pytest.mark.parametrize("percent", [62, 80, 100])
def test_outputs_that_are_kept_are_predicted_to_the_byte(percent: int) -> None:
    model = graphopt.optimize(head(), [fit(f"{percent}%")])
    scalars = 8  # the two sums, and their sum while backward has not begun
    assert peak(model, weighs) == model.program.memory().allocated_peak_bytes + scalars


def test_the_record_says_what_is_counted() -> None:
    model = graphopt.optimize(head(), [fit("70%")], example_inputs=(X,))
    (line,) = [line for line in model.records[0].changed.lines if line.startswith("counted")]
    assert "not counted: what the loss outside allocates" in line
