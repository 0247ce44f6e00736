"""Segments of ``torch.utils.checkpoint`` that a capture cannot run as eager mode does are refused or told by name."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import graphopt
from graphopt.errors import GraphBreakError
from tests.support.training import OPTIMIZERS, assert_same_training, mean_square

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of reentrant ones, nested

ROWS = torch.linspace(-1, 1, 32 * 8).reshape(32, 8).cos()
both = pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])


class Segments(nn.Module):
    """A segment with dropout inside of another one; ``preserve`` is for the inner one."""

    def __init__(self, reentrant: bool, *, p: float, preserve: bool, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8) if norm else nn.Tanh(), nn.Dropout(p))
        self.reentrant, self.preserve = reentrant, preserve

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def run(y: torch.Tensor) -> torch.Tensor:
            options = {"use_reentrant": self.reentrant, "preserve_rng_state": self.preserve}
            return checkpoint(self.inner, y.sin(), **options) * y

        return self.last(checkpoint(run, self.first(x), use_reentrant=self.reentrant))


@both
@pytest.mark.parametrize(("p", "preserve"), [(0.3, True), (0.0, False)])
def test_random_numbers_are_eagers(reentrant: bool, p: float, preserve: bool) -> None:
    model = Segments(reentrant, p=p, preserve=preserve)
    assert_same_training(model, "sgd", mean_square, [(ROWS,)], steps=2)


@both
def test_other_random_numbers_in_backward_are_not_captured(reentrant: bool) -> None:
    """Eager mode draws another mask for backward; a drop-in model leaves that part to it, a whole step refuses it."""
    model = Segments(reentrant, p=0.3, preserve=False)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    with pytest.raises(GraphBreakError, match=r"checkpoint\(preserve_rng_state=False\) .* dropout, which draws other"):
        graphopt.optimize_step(model, optimizer, loss=mean_square)(ROWS)
    assert_same_training(model, "sgd", mean_square, [(ROWS,)], steps=2, whole_step=False)


@both
def test_buffers_that_eager_mode_updates_twice_are_told(reentrant: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = Segments(reentrant, p=0.0, preserve=True, norm=True)
    optimized = graphopt.optimize(copy.deepcopy(model))
    with caplog.at_level(logging.WARNING, "graphopt"):
        for each in (model, optimized):
            mean_square(each, ROWS).backward()
    counted = [each.inner[1].num_batches_tracked.item() for each in (model, optimized)]
    assert counted[0] > counted[1] == 1
    (told,) = [record.message for record in caplog.records if "once more" in record.message]
    assert "inner.1.running_mean" in told
    assert all(
        torch.equal(one.grad, other.grad) for one, other in zip(model.parameters(), optimized.parameters(), strict=True)
    )


def test_a_model_that_updates_nothing_twice_is_told_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model = Segments(False, p=0.0, preserve=True, norm=True).eval()
    mean_square(graphopt.optimize(model), ROWS).backward()
    assert not [record for record in caplog.records if "once more" in record.message]
