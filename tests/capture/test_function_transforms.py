"""Transforms of ``torch.func`` inside of forward: captured, or refused by name, and nothing is left of a failed try."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import graphopt
from graphopt.errors import GraphBreakError
from tests.support.training import mean_square

X = torch.linspace(-1, 1, 24).view(4, 6)


class Transforms(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.out, self.kind = nn.Linear(6, 6), nn.Linear(6, 6), kind

    def energy(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)).sum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(KINDS[self.kind][0](self, x))


def _vjp(model: Transforms, x: torch.Tensor) -> torch.Tensor:
    y, back = torch.func.vjp(lambda z: torch.tanh(model.linear(z)), x)
    return back(torch.ones_like(y))[0]


KINDS = {
    "vmap": (lambda m, x: torch.vmap(lambda row: torch.tanh(m.linear(row)))(x), True),
    "jvp": (lambda m, x: torch.func.jvp(lambda z: torch.tanh(m.linear(z)), (x,), (torch.ones_like(x),))[1], True),
    "grad": (lambda m, x: torch.func.grad(m.energy)(x), False),
    "grad of each row": (lambda m, x: torch.vmap(torch.func.grad(m.energy))(x), False),
    "vjp": (_vjp, False),
    "jacrev": (lambda m, x: torch.func.jacrev(lambda z: torch.tanh(m.linear(z)).sum(0))(x).sum(1), False),
    "jvp of grad": (lambda m, x: torch.func.jvp(torch.func.grad(m.energy), (x,), (torch.ones_like(x),))[1], False),
}


@pytest.mark.sweep(but=("jvp", "grad of each row", "jvp of grad"))
@pytest.mark.parametrize("kind", KINDS)
def test_a_transform_in_forward_trains_as_in_eager_mode_or_is_refused_by_name(kind: str) -> None:
    model = Transforms(kind)
    plain, whole = copy.deepcopy(model), copy.deepcopy(model)
    step = graphopt.optimize_step(whole, torch.optim.SGD(whole.parameters(), 0.0), loss=mean_square)
    if KINDS[kind][1]:
        assert torch.equal(step(X), mean_square(plain, X))
    else:
        with pytest.raises(GraphBreakError):
            step(X)
    optimized = graphopt.optimize(model)
    for _ in range(2):
        for called in (plain, optimized):
            mean_square(called, X).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    assert torch._C._functorch.peek_interpreter_stack() is None
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: t, lambda t: t
    ):  # which a transform would have switched off
        mean_square(plain.linear, X).backward()


def test_the_message_names_the_transform_and_the_way_out() -> None:
    with pytest.raises(GraphBreakError, match=r"torch\.func that computes gradients(.|\n)*torch\.autograd\.grad\("):
        graphopt.capture(Transforms("grad"), (X,))
