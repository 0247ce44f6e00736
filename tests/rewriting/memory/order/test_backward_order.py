"""The order of backward: what frees more than it makes runs first; no call has more bytes beside it than before."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import nn

import graphopt
from graphopt import Phase, Program
from graphopt.ir.memory.timeline import MemoryTimeline
from graphopt.ir.node import info
from graphopt.ir.ops import schema
from graphopt.ir.verify import verify
from graphopt.passes import FitMemory
from graphopt.rewriting.memory.fit.budget import BudgetError
from graphopt.rewriting.memory.fit.memory_planner import MemoryPlanner
from graphopt.rewriting.memory.order.backward_order import freeing_first
from graphopt.rewriting.memory.order.early_updates import EarlyUpdates, early_updates
from tests.runtime.test_random_networks import SHAPE, Network, Recipe, own_loss, recipes
from tests.support.budgets import TOKENS
from tests.support.covering import some_of
from tests.support.fitting import step_peaks
from tests.support.properties import examples
from tests.support.training import OPTIMIZERS, Blocks, assert_same_training, captured, mean_square, next_token, results


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)) for _ in range(3)))


def bytes_at(program: Program) -> dict[str, int]:
    """Bytes alive at each call of backward that computes something."""
    memory = program.memory()
    calls = zip(memory.nodes, memory.bytes, strict=True)
    return {n.name: count for n, count in calls if info(n).phase is Phase.BACKWARD and not schema.is_view(n)}


def test_the_gradient_of_a_weight_runs_before_the_next_gradient() -> None:
    program = captured(wide(), torch.randn(32, 8))
    found = freeing_first(program)
    assert found is not None
    ordered, line = found
    assert "ops of backward run sooner" in line
    names = [node.name for node in ordered.nodes]
    activation = next(node for node in ordered.nodes if node.name == "gelu_2")
    (weights,) = [user for view in activation.users for user in (view, *view.users) if user.name.startswith("mm")]
    gradient = next(node for node in ordered.nodes if str(node.target) == "aten.gelu_backward.default")
    assert names.index(weights.name) < names.index(gradient.all_input_nodes[0].name)


@pytest.mark.parametrize(
    ("model", "inputs", "loss"),
    [(wide(), torch.randn(32, 8), mean_square), (Blocks(3, p=0.1), TOKENS, next_token)],
    ids=["wide", "blocks"],
)
def test_no_call_of_backward_has_more_bytes_beside_it(
    model: nn.Module, inputs: torch.Tensor, loss: graphopt.Loss
) -> None:
    program = captured(model, inputs, loss=loss)
    found = freeing_first(program)
    assert found is not None
    before, after = bytes_at(program), bytes_at(found[0])
    assert before.keys() == after.keys()
    assert all(after[name] <= count for name, count in before.items())
    assert any(after[name] < count for name, count in before.items())


@given(recipes())
@examples(25)
def test_random_networks_keep_their_bits_and_never_hold_more(recipe: Recipe) -> None:
    model, x = Network(recipe), torch.randn(SHAPE)
    program = captured(model, x, loss=own_loss)
    ordered, _ = freeing_first(program) or (program, "")
    verify(ordered, before=program)
    before, after = bytes_at(program), bytes_at(ordered)
    assert before.keys() == after.keys()
    assert all(after[name] <= count for name, count in before.items())
    expected, mine = (results(each, copy.deepcopy(model), x)[0] for each in (program, ordered))
    assert all(torch.equal(mine[spec], value) for spec, value in expected.items())


@pytest.mark.parametrize("share", some_of(["90%", "75%"], "75%"))
def test_fitted_steps_train_as_eager_mode_does(share: str) -> None:
    passes = [FitMemory(share, cost="roofline")]
    x = torch.randn(32, 8)
    assert_same_training(wide(), "adamw", mean_square, [(x,)], passes, steps=3)
    step, measured = step_peaks(wide(), OPTIMIZERS["adamw"], mean_square, (x,), passes)
    assert step.program.memory().allocated_peak_bytes == measured


def test_updates_run_as_early_as_before_and_hold_less() -> None:
    model = Blocks(3, p=0.1)
    program = graphopt.capture(model, (TOKENS,), loss=next_token, optimizer=OPTIMIZERS["adamw"](model.parameters()))
    found = freeing_first(program)
    assert found is not None
    before, after = (early_updates(each, each.memory(), "a test") for each in (program, found[0]))
    assert isinstance(before, EarlyUpdates)
    assert isinstance(after, EarlyUpdates)
    assert set(after.early) == set(before.early) != set()
    held, now_held = bytes_at(before.program), bytes_at(after.program)
    assert sum(now_held.values()) < sum(held.values())


def test_a_budget_that_is_met_in_the_given_order_alone_is_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where calls are recomputed, an order that is better without them can need more."""
    torch.manual_seed(0)
    model = Blocks(4, p=0.1)
    program = captured(model, TOKENS, loss=next_token)
    assert freeing_first(program) is not None
    search, tries = MemoryPlanner._search, list[str]()

    def refuse_the_first(self: Any, given: Program, memory: MemoryTimeline, budget: int, *, shared: bool) -> Any:
        tries.append(" ".join(node.name for node in given.nodes))
        if len(tries) == 1:
            raise BudgetError("no plan fits", 2**40, budget)
        return search(self, given, memory, budget, shared=shared)

    monkeypatch.setattr(MemoryPlanner, "_search", refuse_the_first)
    budget = program.memory().peak_bytes * 7 // 10
    fitted = program.copy()
    (record,) = graphopt.Pipeline([FitMemory(budget, cost="roofline")]).run(fitted)
    assert fitted.memory().peak_bytes <= budget
    assert not any("ops of backward run sooner" in line for line in record.changed.lines)
    expected, mine = (results(each, copy.deepcopy(model), TOKENS)[0] for each in (program, fitted))
    assert all(torch.equal(mine[spec], value) for spec, value in expected.items())
    assert len(tries) == len(set(tries)) == 2
