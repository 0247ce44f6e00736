"""Checks of values, by ``assert`` or inside of ops: they are ops of the program, and raise as in eager mode."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graphopt
from graphopt.passes import FitMemory, Recompute

EYE = torch.eye(4)


class Function(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.randn(4, 4)), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, self.weight)


OPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "inv": lambda x, w: x @ torch.linalg.inv(w + 8 * EYE),
    "solve": lambda x, w: torch.linalg.solve(w + 8 * EYE, x),
    "cholesky": lambda x, w: x @ torch.linalg.cholesky(w @ w.t() + EYE),
    "lu_factor": lambda x, w: x @ torch.linalg.lu_factor(w + 8 * EYE)[0],
    "matrix_power": lambda x, w: x @ torch.linalg.matrix_power(w + 8 * EYE, -2),
    "slogdet": lambda x, w: x * torch.linalg.slogdet(w + 8 * EYE)[1],
    "eigh": lambda x, w: x * torch.linalg.eigvalsh(w + w.t()),
    "one_hot": lambda x, w: F.one_hot((x > 0).long().sum(0), 5).float()[:, :4] @ w,
}


@pytest.mark.sweep(but=("inv-plain", "solve-plain", "slogdet-plain", "eigh-plain"))
@pytest.mark.parametrize("passes", [(), (Recompute("auto"),)], ids=["plain", "recomputed"])
@pytest.mark.parametrize("op", OPS)
def test_training_equals_eager_training(op: str, passes: tuple[Recompute, ...]) -> None:
    model, x = Function(OPS[op]), torch.randn(4, 4)
    optimized = graphopt.optimize(copy.deepcopy(model), passes)
    results = []
    for current in (model, optimized):
        loss = (current(x).tanh() * x).sum()
        loss.backward()
        results.append((loss.detach(), next(current.parameters()).grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.sweep(cases=("True",))
@pytest.mark.parametrize("whole_step", [False, True])
def test_a_check_that_fails_raises_as_in_eager_mode(whole_step: bool) -> None:
    model, x = Function(lambda x, w: x @ torch.linalg.inv(w)), torch.randn(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    run: Callable[[torch.Tensor], torch.Tensor] = (
        graphopt.optimize_step(model, optimizer, loss=lambda model, x: model(x).sum())
        if whole_step
        else graphopt.optimize(model)
    )
    run(x)
    with torch.no_grad():
        model.weight.zero_()
    with pytest.raises(RuntimeError, match=r"linalg\.inv: The diagonal element 1 is zero"):
        run(x)
    assert torch.equal(model.weight, torch.zeros(4, 4))


def test_a_class_out_of_range_raises_as_in_eager_mode() -> None:
    model = Function(lambda x, w: F.one_hot(x.long(), 4).float() @ w)
    optimized = graphopt.optimize(model, [FitMemory("1GB")])
    optimized(torch.tensor([0, 3])).sum().backward()
    with pytest.raises(RuntimeError, match=r"[Cc]lass values must be smaller than num_classes"):
        model(torch.tensor([0, 7]))
    with pytest.raises(RuntimeError, match=r"[Cc]lass values must be smaller than num_classes"):
        optimized(torch.tensor([0, 7]))
