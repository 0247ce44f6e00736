"""Gradients of losses in the place of log-probabilities: bytes, bits, and what is left as it is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import graphopt
from graphopt import Phase, Program
from graphopt.ir.ops.layers.loss_gradient import loss_gradient, loss_gradient_, rows_at_a_time
from graphopt.ir.verify import verify
from graphopt.passes import FitMemory, ScaleLoss
from graphopt.rewriting.memory.order.loss_in_place import loss_gradients_in_place
from tests.support.fitting import step_peaks
from tests.support.properties import examples
from tests.support.training import OPTIMIZERS, assert_same_training, captured, results, train

aten = torch.ops.aten
CLASSES, ROWS = 40, 24
Loss = Callable[..., torch.Tensor]


def language() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(CLASSES, 8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, CLASSES))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(CLASSES, (ROWS,), generator=generator)
    return tokens, torch.where(tokens % 5 == 0, -100, tokens.flip(0))


def mean(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def weighted_sum(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y, torch.linspace(0.5, 2, CLASSES), reduction="sum") / 7


def of_log_probabilities(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.nll_loss(model(x).log_softmax(-1), y.clamp(min=0), ignore_index=3)


def two_losses(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return mean(model, x, y) + 0.5 * weighted_sum(model, y.clamp(min=0), x)


def with_log_probabilities(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    log_probs = model(x).log_softmax(-1)
    return F.nll_loss(log_probs, y.clamp(min=0)), log_probs


def with_a_view_of_them(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    loss, log_probs = with_log_probabilities(model, x, y)
    return loss, log_probs.flatten()


def each_row(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y, reduction="none").square().mean()


def smoothed(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y, label_smoothing=0.1)


def by_its_value(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return mean(model, x, y).square()


IN_PLACE: dict[Loss, int] = {mean: 1, weighted_sum: 1, of_log_probabilities: 1, two_losses: 2, by_its_value: 1}
AS_IT_IS: tuple[Loss, ...] = (each_row, smoothed)


def gradients(program: Program) -> list[torch.fx.Node]:
    return [node for node in program.nodes if node.target is loss_gradient]


def program_of(loss: Loss) -> Program:
    return captured(language(), *batch(), loss=loss)


@pytest.mark.parametrize("loss", IN_PLACE, ids=lambda loss: loss.__name__)
def test_a_gradient_of_a_loss_is_made_in_forward_with_the_same_bits(loss: Loss) -> None:
    program = program_of(loss)
    found = loss_gradients_in_place(program, "a test")
    assert found is not None
    rewritten, line = found
    made = gradients(rewritten)
    assert len(made) == IN_PLACE[loss]
    assert {node.meta["graphopt"].phase for node in made} == {Phase.FORWARD}
    assert aten.nll_loss_backward.default not in {node.target for node in rewritten.nodes}
    assert "replace log-probabilities" in line
    verify(rewritten, before=program)
    expected, mine = (results(given, language(), *batch())[0] for given in (program, rewritten))
    assert expected.keys() == mine.keys()
    assert all(torch.equal(mine[spec], value) for spec, value in expected.items())


@pytest.mark.parametrize("loss", AS_IT_IS, ids=lambda loss: loss.__name__)
def test_other_losses_stay_as_they_are(loss: Loss) -> None:
    assert loss_gradients_in_place(program_of(loss), "a test") is None


def test_a_loss_outside_of_the_program_stays_as_it_is() -> None:
    """Its gradient comes with the tangents."""
    program = graphopt.capture(nn.Sequential(language(), nn.LogSoftmax(-1)), (batch()[0],))
    assert loss_gradients_in_place(program, "a test") is None


def test_nothing_else_is_as_large_as_the_log_probabilities() -> None:
    program = program_of(mean)
    found = loss_gradients_in_place(program, "a test")
    assert found is not None
    logits = ROWS * CLASSES * 4
    before, after = (sum(s.bytes == logits for s in given.memory().storages) for given in (program, found[0]))
    assert (before, after) == (2, 1)


@pytest.mark.parametrize("loss", IN_PLACE, ids=lambda loss: loss.__name__)
def test_fitted_steps_train_as_eager_mode_does(loss: Loss) -> None:
    budget = FitMemory("92%", cost="roofline")
    assert_same_training(language(), "adamw", loss, [batch()], [budget], steps=3)
    step, measured = step_peaks(language(), OPTIMIZERS["sgd"], loss, batch(), [budget])
    assert gradients(step.program)
    assert step.program.memory().allocated_peak_bytes == measured


@pytest.mark.parametrize("loss", [with_log_probabilities, with_a_view_of_them], ids=lambda loss: loss.__name__)
def test_log_probabilities_that_the_loss_returns_are_not_written_over(loss: Any) -> None:
    model, twin = language(), language()
    optimizer, its_optimizer = (OPTIMIZERS["sgd"](each.parameters()) for each in (model, twin))
    step = graphopt.optimize_step(model, optimizer, [FitMemory("92%", cost="roofline")], loss=loss)
    for _ in range(2):
        found, expected = step(*batch()), loss(twin, *batch())
        expected[0].backward()
        its_optimizer.step()
        its_optimizer.zero_grad()
        assert all(torch.equal(mine, its) for mine, its in zip(found, expected, strict=True))
    assert step.records[0].peak_after < step.records[0].peak_before


def test_a_loss_that_is_scaled_is_made_in_place_too() -> None:
    passes = [ScaleLoss(init_scale=2.0**10), FitMemory("92%", cost="roofline")]
    expected = train(language(), OPTIMIZERS["sgd"], mean, [batch()] * 3)
    model = language()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    step = graphopt.optimize_step(model, optimizer, passes, loss=mean)
    torch.manual_seed(1)
    losses = [step(*batch()) for _ in range(3)]
    assert gradients(step.program)
    assert [float(value) for value in losses] == [float(expected.tensors[f"{n}.loss"]) for n in range(3)]


def test_the_record_says_so() -> None:
    model = language()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    step = graphopt.optimize_step(model, optimizer, [FitMemory("92%", cost="roofline")], loss=mean).prepare(*batch())
    assert any("gradients of losses replace log-probabilities" in line for line in step.records[0].changed.lines)


# --- the op ----------------------------------------------------------------------------------------------------------


@given(
    st.integers(1, 40), st.integers(2, 70), st.sampled_from([1, 2]), st.booleans(),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]), st.integers(0, 10**6),
)  # fmt: skip
@examples(60)
def test_the_op_gives_the_bits_of_the_two_that_it_stands_for(
    rows: int, classes: int, reduction: int, weighted: bool, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    log_probs = aten._log_softmax.default(torch.randn(rows, classes, generator=generator).to(dtype) * 4, 1, False)
    target = torch.randint(classes, (rows,), generator=generator)
    target[torch.rand(rows, generator=generator) < 0.2] = -100
    weight = torch.rand(classes, generator=generator).to(dtype) if weighted else None
    _, total = aten.nll_loss_forward.default(log_probs, target, weight, reduction, -100)
    seed_of_loss = torch.tensor(0.37, dtype=dtype)
    rest: tuple[Any, ...] = (target, weight, reduction, -100, total)
    sparse = aten.nll_loss_backward.default(seed_of_loss, log_probs, *rest)
    expected = aten._log_softmax_backward_data.default(sparse, log_probs, 1, dtype)
    found = loss_gradient(log_probs, seed_of_loss, *rest)
    written = copy.deepcopy(log_probs)
    assert loss_gradient_(written, seed_of_loss, *rest) is written
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    assert torch.equal(found.view(bits), expected.view(bits))
    assert torch.equal(written.view(bits), expected.view(bits))


def test_more_rows_than_are_made_at_a_time_give_the_same_bits() -> None:
    classes = 50_000
    rows = 3 * rows_at_a_time(classes, "cpu") + 1
    log_probs = torch.randn(rows, classes).log_softmax(1)
    target = torch.arange(rows)
    _, total = aten.nll_loss_forward.default(log_probs, target, None, 1, -100)
    one = torch.ones(())
    sparse = aten.nll_loss_backward.default(one, log_probs, target, None, 1, -100, total)
    expected = aten._log_softmax_backward_data.default(sparse, log_probs, 1, torch.float32)
    assert torch.equal(loss_gradient(log_probs, one, target, None, 1, -100, total), expected)
