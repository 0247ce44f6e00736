"""Writes of forward into buffers, by themselves or through views, reach the buffers whatever passes make of forward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import graphopt
from graphopt.passes import MixedPrecision, Recompute
from tests.support.training import Passes

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def add_to_rows(queue: torch.Tensor, _: torch.Tensor) -> None:
    queue[0:4].add_(1)


def add_without_gradients(queue: torch.Tensor, _: torch.Tensor) -> None:
    with torch.no_grad():
        queue[0:4].add_(1)


def add_to_transposed(queue: torch.Tensor, _: torch.Tensor) -> None:
    with torch.no_grad():
        queue.t()[2].add_(1)


def add_to_one_of_many(queue: torch.Tensor, _: torch.Tensor) -> None:
    rows = queue.unbind(0)
    with torch.no_grad():
        rows[1].add_(1)


def view_without_gradients(queue: torch.Tensor, _: torch.Tensor) -> None:
    with torch.no_grad():
        rows = queue[0:4]
    rows.add_(1)


def view_before(queue: torch.Tensor, _: torch.Tensor) -> None:
    rows = queue[2:6]
    with torch.no_grad():
        rows.copy_(rows + 1)


def under_autocast(queue: torch.Tensor, _: torch.Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        queue[0:4].add_(1)


def set_signs(queue: torch.Tensor, y: torch.Tensor) -> None:
    with torch.no_grad():
        queue[0:4] = y.sign()


def put_at(queue: torch.Tensor, y: torch.Tensor) -> None:
    with torch.no_grad():
        queue[torch.arange(4)] = y.sign()


def add_at(queue: torch.Tensor, y: torch.Tensor) -> None:
    queue.index_add_(0, torch.tensor([5, 1, 2, 5]), y.detach().sign())


def whole(queue: torch.Tensor, _: torch.Tensor) -> None:
    with torch.no_grad():
        queue.add_(1)


class Writes(nn.Module):
    """Writes to a buffer and reads it, after looking at a value where that is wanted."""

    def __init__(self, write: Callable[[torch.Tensor, torch.Tensor], None], *, looks: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.write, self.looks = nn.Linear(6, 6), write, looks
        self.register_buffer("queue", torch.zeros(8, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        if self.looks and y.sum() > 1e9:
            return y
        self.write(self.queue, y)  # type: ignore[arg-type]
        return y @ self.queue.t()  # type: ignore[operator]


WRITES = [
    add_to_rows, add_without_gradients, add_to_transposed, add_to_one_of_many, view_without_gradients, view_before,
    under_autocast, set_signs, put_at, add_at, whole,
]  # fmt: skip

WAYS: dict[str, tuple[Passes, bool]] = {
    "plain": ([], False),
    "recompute": ([Recompute("**")], False),
    "O1": ([MixedPrecision("bfloat16")], False),
    "O2": ([MixedPrecision("bfloat16", level="O2")], False),
    "half": ([MixedPrecision("float16", level="O2")], False),
    "all low": ([MixedPrecision("bfloat16", allow=("**",))], False),
    "parts": ([], True),
    "recompute in parts": ([Recompute("**")], True),
}
"""Passes, and whether the model is in parts."""


@pytest.mark.sweep(
    but=(
        "add_to_rows-O2",
        "add_without_gradients-plain",
        "add_without_gradients-recompute",
        "add_without_gradients-O1",
        "add_without_gradients-O2",
        "add_without_gradients-half",
        "add_without_gradients-all low",
        "add_without_gradients-parts",
        "add_without_gradients-recompute in parts",
        "add_to_transposed-O2",
        "add_to_one_of_many-O2",
        "view_without_gradients-O2",
        "view_before-O2",
        "under_autocast-O2",
        "set_signs-O2",
        "set_signs-parts",
        "put_at-O1",
        "put_at-O2",
        "add_at-O1",
        "add_at-O2",
        "whole-O2",
    )
)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_is_in_the_buffer(write: Callable[[torch.Tensor, torch.Tensor], None], way: str) -> None:
    passes, looks = WAYS[way]
    eager = Writes(write, looks=looks)
    model = graphopt.optimize(copy.deepcopy(eager), passes)
    for _ in range(3):
        expected, found = eager(X), model(X)
        found.float().sum().backward()
        assert torch.equal(model.queue, eager.queue)
        if way in ("plain", "recompute", "parts", "recompute in parts"):
            assert torch.equal(found, expected)
        else:
            assert torch.allclose(found.float(), expected, atol=0.5, rtol=0.05)
    assert eager.queue.count_nonzero() > 0


class Clipped(nn.Module):
    """Its weights are changed by each call before they are read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.linear = nn.Embedding(10, 6, max_norm=0.5), nn.Linear(6, 6)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-0.1, 0.1)
        y: torch.Tensor = self.linear(self.embedding(tokens))
        return y


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_parameters_that_forward_changes_are_read_as_they_are_then(level: Any) -> None:
    eager, tokens = Clipped(), torch.arange(4)
    model = graphopt.optimize(copy.deepcopy(eager), [MixedPrecision("bfloat16", level=level)])
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            expected = eager(tokens)
        found = model(tokens)
        found.sum().backward()
        assert torch.allclose(found.float(), expected.float(), atol=0.02)
        assert all(map(torch.equal, model.parameters(), eager.parameters()))
