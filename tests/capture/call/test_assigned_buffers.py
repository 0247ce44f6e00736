"""What forward assigns to a buffer: written into it where it fits, and told by name where it does not."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.ao.nn.qat as qat
from torch import nn
from torch.ao.quantization import get_default_qat_qconfig

import graphopt
from graphopt.errors import CaptureError, GraphBreakError
from tests.support.training import mean_square

X = torch.linspace(-1, 1, 32).reshape(4, 8)


class Positions(nn.Module):
    """Makes its table of positions anew where the number of rows is another one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)
        self.table: torch.Tensor
        self.register_buffer("table", torch.zeros(1, 1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table.shape[0] != x.shape[0]:
            self.table = torch.arange(float(x.shape[0])).unsqueeze(1)
        return self.layer(x + self.table)


class Assigns(nn.Module):
    """Keeps what a function makes of its buffer."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(8, 8), function
        self.seen: torch.Tensor | None
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.seen is not None
        self.seen = self.function(self.seen)
        return self.layer(x)


def test_a_table_of_another_size_is_told_by_name_and_after_one_eager_call_training_is_eagers() -> None:
    model, eager = nn.Sequential(Positions()), nn.Sequential(Positions())
    step = graphopt.optimize_step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=mean_square)
    with pytest.raises(GraphBreakError, match=r"buffer 0\.table \(f32\[1, 1\]\) by f32\[4, 1\].* call the model once"):
        step(X)
    assert model[0].table.tolist() == [[0.0]]
    with torch.no_grad():
        model(X)
    loss = step(X)
    expected = mean_square(eager, X)
    expected.backward()
    torch.optim.SGD(eager.parameters(), lr=0.1).step()
    assert torch.equal(loss, expected)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), eager.parameters(), strict=True))


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("function", "told"),
    [
        (torch.Tensor.double, r"f64\[3\]"),
        pytest.param(lambda seen: torch.cat([seen, seen]), r"f32\[6\]", marks=pytest.mark.sweep),
    ],
)
def test_another_dtype_or_shape_is_refused_and_trained_in_parts_as_in_eager_mode(
    function: Callable[[torch.Tensor], torch.Tensor], told: str
) -> None:
    model = Assigns(function)
    with pytest.raises(GraphBreakError, match=rf"replaces the buffer seen \(f32\[3\]\) by {told}"):
        graphopt.capture(model, (X,))
    eager, optimized = copy.deepcopy(model), graphopt.optimize(model)
    for _ in range(2):
        assert torch.equal(optimized(X), eager(X))
    assert (model.seen.dtype, model.seen.shape) == (eager.seen.dtype, eager.seen.shape)


def test_what_fits_is_written_into_the_buffer() -> None:
    model = Assigns(lambda seen: seen + 1)
    optimized, buffer = graphopt.optimize(model), model.seen
    for _ in range(3):
        optimized(X)
    assert buffer is not None
    assert model.seen is buffer
    assert buffer.tolist() == [3.0] * 3


@pytest.mark.sweep
def test_an_observer_that_has_seen_nothing_is_refused_and_trained_as_in_eager_mode_behind_one_call() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), qat.Linear(8, 4, qconfig=get_default_qat_qconfig("fbgemm")))
    with pytest.raises(CaptureError, match=r"the buffer 1\.weight_fake_quant\.\S+, which has no elements(.|\n)*once"):
        graphopt.optimize(model)(X)
    with torch.no_grad():
        model(X)
    eager, optimized = copy.deepcopy(model), graphopt.optimize(model)
    for _ in range(2):
        assert torch.equal(optimized(X), eager(X))
    assert all(map(torch.equal, model.buffers(), eager.buffers()))
