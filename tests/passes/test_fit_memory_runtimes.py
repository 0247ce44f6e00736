"""FitMemory: in a drop-in model and in a whole step, whatever happens between the calls."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import graphopt
from graphopt import Phase, measure_peak
from tests.support.budgets import ROWS, fit
from tests.support.fitting import frontiers_searched_once, wide
from tests.support.training import OPTIMIZERS, Passes, identical, mean_square, ops


@pytest.fixture(autouse=True, scope="module")
def _searched_once() -> Iterator[None]:
    with frontiers_searched_once():
        yield


# --- runtimes --------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_another_shape_is_fitted_on_its_own() -> None:
    model = graphopt.optimize(wide(), [fit("75%")], dynamic_shapes=None)
    for rows in (ROWS, ROWS[:96]):
        model(rows).sum().backward()
        assert model.records[0].changed
        peak = model.records[0].peak_before
        assert peak is not None
        assert model.program.memory().peak_bytes <= 0.75 * peak


@pytest.mark.sweep
def test_in_eval_mode_the_plain_forward_runs() -> None:
    model, optimized = wide(), None
    optimized = graphopt.optimize(copy.deepcopy(model), [fit("75%")])
    optimized(ROWS).sum().backward()
    model(ROWS)
    model.load_state_dict(optimized.state_dict())
    assert torch.equal(optimized.eval()(ROWS), model.eval()(ROWS))


@pytest.mark.sweep
def test_sizes_that_vary() -> None:
    shapes = ({0: torch.export.Dim("rows", min=2, max=512)},)
    model = graphopt.optimize(wide(p=0.0), [fit("80%")], dynamic_shapes=shapes, example_inputs=(ROWS,))
    assert model.records[0].changed
    plain = wide(p=0.0)
    for rows in (ROWS, ROWS[:40]):
        assert torch.equal(model(rows), plain(rows))


def test_accumulated_gradients() -> None:
    def run(passes: Passes) -> list[torch.Tensor]:
        model = wide()
        step = graphopt.optimize_step(model, OPTIMIZERS["momentum"](model.parameters()), passes, loss=mean_square)
        step.accumulate(2)
        torch.manual_seed(1)
        losses = [step(batch) for batch in (ROWS, ROWS.sin(), ROWS.cos(), ROWS.tanh())]
        return [*losses, *model.parameters(), *model.buffers(), torch.get_rng_state()]

    plain, fitted = run(()), run([fit("80%")])
    assert all(torch.equal(one, other) for one, other in zip(plain, fitted, strict=True))


def test_after_an_exception_between_forward_and_backward_the_next_step_runs() -> None:
    def run(model: nn.Module) -> list[torch.Tensor | None]:
        torch.manual_seed(1)
        with pytest.raises(ZeroDivisionError):
            next(loss / (1 // 0) for loss in [mean_square(model, ROWS)])
        mean_square(model, ROWS).backward()
        return [parameter.grad for parameter in model.parameters()] + [torch.get_rng_state()]

    found = run(wide()), run(graphopt.optimize(wide(), [fit("70%")]))
    assert all(identical(one, other) for one, other in zip(*found, strict=True))


def test_two_forwards_before_one_backward_and_a_second_backward() -> None:
    def run(model: nn.Module) -> list[torch.Tensor | None]:
        torch.manual_seed(1)
        loss = mean_square(model, ROWS) * mean_square(model, ROWS.sin())
        loss.backward(retain_graph=True)
        loss.backward()
        return [parameter.grad for parameter in model.parameters()] + [torch.get_rng_state()]

    found = run(wide()), run(graphopt.optimize(wide(), [fit("70%")]))
    assert all(identical(one, other) for one, other in zip(*found, strict=True))


def test_numerics_can_be_verified() -> None:
    model = graphopt.optimize(wide(), [fit("70%")], verify="numerics")
    model(ROWS).sum().backward()
    assert model.records[0].changed


@pytest.mark.sweep
def test_nothing_stays_behind_between_steps() -> None:
    model = wide()
    step = graphopt.optimize_step(model, OPTIMIZERS["sgd"](model.parameters()), [fit("55%")], loss=mean_square)
    step(ROWS)
    assert measure_peak(lambda: step(ROWS)).retained_bytes == 4  # the loss
    assert ops(step.program, Phase.RECOMPUTE)
