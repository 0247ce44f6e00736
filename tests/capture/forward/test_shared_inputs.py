"""One tensor given in several places has eager mode's gradient, whose parts are added up in one order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import graphopt
from graphopt.passes import Recompute

Given = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Twofold(nn.Module):
    """Reads both of its arguments several times, in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.linear(x) * y
        h = h + x.sin() + y.cos() * self.linear(y)
        return h.tanh() * x


def gradients(model: nn.Module, call: Callable[..., torch.Tensor], given: Given, rows: int) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(rows)
    x = torch.randn(rows, 6, requires_grad=True)
    arguments = given(x)
    call(*arguments).square().sum().backward()
    leaves = {id(argument): argument for argument in arguments if argument.is_leaf}
    found = [x.grad, *(leaf.grad for leaf in leaves.values()), *(p.grad for p in model.parameters())]
    return [tensor.clone() for tensor in found if tensor is not None]


GIVEN: dict[str, Given] = {
    "one tensor": lambda x: (x, x),
    "another tensor in the same memory": lambda x: (x, x.detach().requires_grad_()),
    "a copy": lambda x: (x, x.detach().clone().requires_grad_()),
    "a view": lambda x: (x, x.flip(0)),
    "one product": lambda x: (x * 2,) * 2,
}


@pytest.mark.sweep
@pytest.mark.parametrize("passes", [[], [Recompute("linear")]], ids=["none", "recompute"])
def test_gradients_are_those_of_eager_mode_however_arguments_are_shared(passes: list[graphopt.Pass]) -> None:
    model = Twofold()
    optimized = graphopt.optimize(model, passes)
    for rows in (5, 5, 7, 9):  # the first sizes are fixed, others become symbols
        for name, given in GIVEN.items():
            found, wanted = gradients(model, optimized, given, rows), gradients(model, model, given, rows)
            assert len(found) == len(wanted), name
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), (name, rows)


def test_what_is_written_to_keeps_its_places() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            x.mul_(2)
            return (x + y) * self.weight

    model = Writes()
    results = []
    for call in (model, graphopt.optimize(model)):
        x = torch.arange(3.0)
        results.append((call(x, x.clone()).detach(), x))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    x, other = torch.arange(3.0), torch.arange(3.0)
    assert torch.equal(graphopt.optimize(model)(x, x), model(other, other))  # which runs in eager mode
    assert torch.equal(x, other)
