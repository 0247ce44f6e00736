"""What torch cannot trace: whole steps refuse it by name and line, drop-in models run it as eager mode does."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import graphopt
from tests.support.training import mean_square


class Product(nn.Module):
    """Takes sparse batches; what it does depends on values where that is wanted."""

    def __init__(self, looks: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.looks = nn.Linear(4, 6), looks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.sparse.mm(x, self.linear.weight)
        return y.sin() if self.looks and y.sum() > 0 else y.cos()


class Loop(nn.Module):
    """Has a loop whose number of rounds is open."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch._higher_order_ops.while_loop import while_loop

        start = torch.tensor(0), self.linear(x).detach()
        _, y = while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y.sin()), start)
        return self.linear(y)


class InsideOfContext(nn.Module):
    """Breaks off inside of a function of Python's own library."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda z: z.tanh().sum())(x)


DENSE = torch.eye(6) + torch.ones(6, 6).triu()
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Tensor], torch.Tensor], str]] = {
    "compressed rows": (Product, torch.Tensor.to_sparse_csr, r"layout torch.sparse_csr.*\n.*to_sparse_coo"),
    "compressed columns": (Product, torch.Tensor.to_sparse_csc, r"layout torch.sparse_csc.*\n.*to_sparse_coo"),
    "coordinates in parts": (lambda: Product(True), torch.Tensor.to_sparse, "depends on a tensor's values"),
    "a loop": (Loop, torch.clone, r"Loop runs a while_loop.*\n  where: .*test_untraceable.py"),
}


@pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC) tensor support is in beta state")
@pytest.mark.parametrize(("make", "given", "words"), CASES.values(), ids=CASES)
def test_steps_refuse_it_and_drop_in_models_train(
    make: Callable[[], nn.Module], given: Callable[[torch.Tensor], torch.Tensor], words: str
) -> None:
    model, x = make(), given(DENSE)
    step = graphopt.optimize_step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=mean_square)
    with pytest.raises(graphopt.CaptureError, match=words):
        step(x)
    optimized = graphopt.optimize(copy.deepcopy(model))
    for _ in range(2):
        results = [current(x) for current in (model, optimized)]
        for result in results:
            result.square().sum().backward()
        assert torch.equal(*results)
    for mine, eager in zip(optimized.parameters(), model.parameters(), strict=True):
        assert (mine.grad is None) == (eager.grad is None)
        assert eager.grad is None or torch.equal(mine.grad, eager.grad)  # type: ignore[arg-type]


def test_the_line_that_is_named_is_the_users(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(6, 6), InsideOfContext())
    with pytest.raises(graphopt.CaptureError, match=r"where: .*test_untraceable.py:\d+ in (forward|<lambda>)"):
        graphopt.capture(model, (DENSE,))
    graphopt.optimize(model)(DENSE)
    assert "a part of Sequential runs in eager mode" in caplog.text
    assert "GraphPart" not in caplog.text
