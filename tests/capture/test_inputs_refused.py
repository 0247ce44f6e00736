"""Inputs and modules that a whole step refuses in its own words, and a drop-in model trains as eager mode does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import rnn

import graphopt
from graphopt.errors import GraphBreakError

X = torch.linspace(-1, 1, 36).view(6, 6)
SEQUENCES = torch.linspace(-1, 1, 36).view(2, 3, 6)
LENGTHS = torch.tensor([3, 2])
WORDS = torch.tensor([[1, 2, 3], [4, 1, 2]])


class Net(nn.Module):
    def __init__(self, layer: nn.Module, inside: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.inside = layer, inside

    def forward(self, *args: Any) -> torch.Tensor:
        return self.inside(self.layer, *args)


def plain(layer: nn.Module, x: Any) -> torch.Tensor:
    result: torch.Tensor = layer(x)
    return result


def padded(layer: nn.Module, x: Any) -> torch.Tensor:
    packed, _ = layer(rnn.pack_padded_sequence(x, LENGTHS, batch_first=True))
    return rnn.pad_packed_sequence(packed, batch_first=True)[0]


def packed(layer: nn.Module, x: Any) -> torch.Tensor:
    result: torch.Tensor = layer(x)[1]
    return result


def packed_rows(layer: nn.Module, x: Any) -> torch.Tensor:
    y = layer(x)
    return rnn.pack_sequence([y[:3], y[:2]]).data


def written(layer: nn.Module, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    x.mul_(1.5)
    result: torch.Tensor = layer(x)
    return result + other.float().mean() * 1e-12


def number(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = layer(x)
    return y.narrow(0, 0, int(y.detach().abs().max().ceil()))


Case = tuple[Callable[[], nn.Module], Callable[..., torch.Tensor], Callable[[], tuple[Any, ...]], str]


def pair(view: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], tuple[Any, ...]]:
    def given() -> tuple[Any, ...]:
        x = X.clone()
        return x, view(x)

    return given


def sequences() -> tuple[Any, ...]:
    return (rnn.pack_padded_sequence(SEQUENCES, LENGTHS, batch_first=True),)


LINEAR = lambda: nn.Linear(6, 6)  # noqa: E731
SHARED = r"args\[0\] and args\[1\] in the same memory and writes to args\[0\] in place \(mul_\)"
SPARSE = r"the gradient of layer\.weight is sparse"
PACKED = "a packed sequence has as many rows at each step as the values of its lengths say"
CASES: dict[str, Case] = {
    "rows of one tensor": (LINEAR, written, pair(lambda x: x[1:]), SHARED),
    "every other row": (LINEAR, written, pair(lambda x: x[::2]), SHARED),
    "transposed": (LINEAR, written, pair(torch.t), SHARED),
    "the same tensor": (LINEAR, written, pair(lambda x: x), SHARED),
    "another dtype": (LINEAR, written, pair(lambda x: x.view(torch.int32)), SHARED),
    "sparse embedding": (lambda: nn.Embedding(10, 4, sparse=True), plain, lambda: (WORDS,), SPARSE),
    "sparse bags": (lambda: nn.EmbeddingBag(10, 4, sparse=True, mode="sum"), plain, lambda: (WORDS,), SPARSE),
    "packed inside": (lambda: nn.LSTM(6, 5, batch_first=True), padded, lambda: (SEQUENCES,), PACKED),
    "packed before": (lambda: nn.GRU(6, 5, batch_first=True), packed, sequences, PACKED),
    "packed behind": (LINEAR, packed_rows, lambda: (X.clone(),), PACKED),
    "cumulative averages": (
        lambda: nn.BatchNorm1d(6, momentum=None),
        plain,
        lambda: (X.clone(),),
        "layer is a BatchNorm1d with momentum=None",
    ),
    "a number of Python's": (LINEAR, number, lambda: (X.clone(),), r"\.item\(\)"),
}


def made(case: Case) -> Net:
    torch.manual_seed(0)
    return Net(case[0](), case[1])


@pytest.mark.parametrize("name", CASES)
def test_a_drop_in_model_trains_as_eager_mode_does(name: str) -> None:
    model, given = made(CASES[name]), CASES[name][2]
    eager, optimized = copy.deepcopy(model), graphopt.optimize(model)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, eager)]
    for _ in range(3):
        losses = []
        for each, optimizer in zip((optimized, eager), optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(each(*given()).square().sum())
            losses[-1].backward()
            optimizer.step()
        assert torch.equal(*losses)
    assert all(map(torch.equal, model.state_dict().values(), eager.state_dict().values()))


@pytest.mark.parametrize("name", CASES)
def test_a_whole_step_says_what_it_is_where_and_what_to_do(name: str) -> None:
    model, (_, _, given, words) = made(CASES[name]), CASES[name]
    step = graphopt.optimize_step(
        model, torch.optim.SGD(model.parameters(), 0.1), loss=lambda m, *batch: m(*batch).square().sum()
    )
    with pytest.raises(GraphBreakError, match=words) as caught:
        step(*given())
    text = str(caught.value)
    assert "what to do: " in text
    assert "graphopt.optimize captures such a model in parts" in text
    assert name == "cumulative averages" or "test_inputs_refused.py" in text


def test_arguments_beside_each_other_in_one_memory_are_captured() -> None:
    model = made((LINEAR, written, tuple, ""))
    eager = copy.deepcopy(model)
    step = graphopt.optimize_step(
        model, torch.optim.SGD(model.parameters(), 0.1), loss=lambda m, *batch: m(*batch).square().sum()
    )
    one, other = X.clone(), X.clone()
    assert torch.equal(step(one[:3], one[3:]), eager(other[:3], other[3:]).square().sum())
    assert torch.equal(one, other)
