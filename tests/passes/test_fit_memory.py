"""FitMemory: every budget is met, results equal eager's to the last bit, more bytes never cost more seconds."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import graphopt
from graphopt import Phase, Program
from graphopt.analysis.costs import cost
from graphopt.analysis.costs.cost import costs_of
from graphopt.ir.node import OutputSpec, info
from graphopt.ir.verify import verify
from graphopt.ir.words.written_units import format_bytes
from graphopt.passes import Recompute
from graphopt.planning import Simulated
from graphopt.report.text.frontier_table import frontier_report
from graphopt.rewriting.memory.fit.budget import infeasible
from graphopt.rewriting.memory.fit.fitting import Fitted, Fitting, FittingOptions
from graphopt.rewriting.memory.fit.summary import summary_lines
from graphopt.rewriting.memory.transfers.transfer_insertion import host_lanes
from tests.runtime.test_random_networks import SHAPE, Network, Recipe, eager, own_loss, recipes
from tests.support.budgets import IMAGES, ROWS, TOKENS, budgets_of, conv, fit, smallest_of
from tests.support.covering import some_of
from tests.support.fitting import applied, drop_in_peak, frontiers_searched_once, step_peaks, wide
from tests.support.properties import examples
from tests.support.training import (
    OPTIMIZERS,
    Blocks,
    assert_same_training,
    captured,
    identical,
    mean_square,
    next_token,
    peaks,
    results,
)
from tests.support.zoo import ZOO
from tests.support.zoo import own_loss as models_loss


@pytest.fixture(autouse=True, scope="module")
def _searched_once() -> Iterator[None]:
    with frontiers_searched_once():
        yield


# --- devices ---------------------------------------------------------------------------------------------------------


@pytest.mark.sweep(cases=("cpu",))
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_step_meets_its_budget_with_eagers_bits_on_every_device(device: str) -> None:
    torch.manual_seed(0)
    model, tokens = Blocks(2, p=0.1).to(device), TOKENS.to(device)
    losses = []
    for passes in ([], [fit("80%", allow=("recompute",))]):
        mine = copy.deepcopy(model)
        optimizer = OPTIMIZERS["sgd"](mine.parameters())
        step = graphopt.optimize_step(mine, optimizer, passes, loss=next_token)
        torch.manual_seed(1)
        losses.append([step(tokens) for _ in range(3)])
    assert all(map(identical, *losses))
    plain, predicted = graphopt.capture(model, (tokens,), loss=next_token).memory(), step.program.memory()
    measured = graphopt.measure_peak(lambda: step(tokens), device=device).allocated_peak_bytes
    near = max(0.01 * measured, 2**20) if device == "cuda" else 0.001 * measured
    assert abs(predicted.allocated_peak_bytes - measured) <= near
    assert predicted.peak_bytes < plain.peak_bytes


# --- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("optimizer", "budget"), [("momentum", "90%"), ("momentum", "52%"), ("adamw", "65%")])
def test_training_equals_eager(optimizer: str, budget: str) -> None:
    """Momentum has a program of its own for the first step, which makes its state."""
    batches = [(ROWS,), (ROWS.sin(),)]
    assert_same_training(wide(), optimizer, mean_square, batches, [fit(budget)], steps=3)


@pytest.mark.sweep
def test_training_convolutions_equals_eager() -> None:
    assert_same_training(conv(), "sgd", mean_square, [(IMAGES,), (IMAGES + 1,)], [fit("78%")], steps=2)


@pytest.mark.sweep
def test_training_a_language_model_equals_eager() -> None:
    passes = [fit("72%")]
    assert_same_training(Blocks(1, p=0.2), "adamw", next_token, [(TOKENS,)], passes, steps=2, whole_step=False)


@pytest.mark.sweep
def test_training_a_model_of_transformers_equals_eager() -> None:
    model, few = ZOO["ViT"].build(2)
    batches = [{name: torch.cat([tensor] * 12) for name, tensor in batch.items()} for batch in few]
    found = []
    for passes in ([], [fit("90%", time_limit=0.0)]):
        mine = copy.deepcopy(model)
        step = graphopt.optimize_step(mine, OPTIMIZERS["adamw"](mine.parameters()), passes, loss=models_loss)
        torch.manual_seed(1)
        losses = [step(batch) for batch in batches]
        found.append([*losses, *mine.parameters(), torch.get_rng_state()])
        assert [bool(record.changed) for record in step.records] == [True] * len(passes)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.a, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.a(F.dropout(torch.tanh(self.a(self.embed(tokens))), 0.3))))


@pytest.mark.sweep
def test_tied_weights_and_shared_modules() -> None:
    assert_same_training(Tied(), "adamw", next_token, [(TOKENS,)], [fit("80%")], steps=2)


@pytest.mark.sweep
def test_frozen_parameters_and_inputs_that_need_gradients() -> None:
    model = wide()
    model.net[3].requires_grad_(False)
    batch = (ROWS.clone().requires_grad_(),)
    assert_same_training(model, "momentum", mean_square, [batch], [fit("75%")], steps=2)


@pytest.mark.sweep
def test_recompute_and_a_budget_together() -> None:
    passes = [Recompute(["net.4"]), fit("92%")]
    assert_same_training(wide(), "sgd", mean_square, [(ROWS,)], passes, steps=2)
    program, _ = applied(captured(wide(), ROWS), *passes)
    origins = {info(node).origin.split(":")[0] for node in program.phase_nodes(Phase.RECOMPUTE)}
    assert origins == {"recompute", "fit-memory"}


@pytest.mark.sweep
@given(recipes(), st.sampled_from([0.0, 0.3, 0.7]))
@examples(4)
def test_random_networks_meet_their_budgets(recipe: Recipe, share: float) -> None:
    torch.manual_seed(0)
    model, x = Network(recipe), torch.randn(SHAPE).requires_grad_()
    plain = captured(model, x, loss=own_loss)
    high = plain.memory().peak_bytes
    low = smallest_of(plain, time_limit=0.0)
    budget = low + int(share * (high - low))
    program, record = applied(plain, fit(budget, time_limit=0.0))
    verify(program, before=plain)
    assert program.memory().peak_bytes <= budget
    assert bool(record.changed) == (budget < high)

    loss, gradients, buffers, generator = eager(model, x)
    held = copy.deepcopy(model)
    found, state = results(program, held, x)
    mine = {spec.target: value for spec, value in found.items() if spec.role == "gradient"}
    assert identical(found[OutputSpec("loss", "loss")], loss)
    assert [name for name, value in mine.items() if not identical(value, gradients[name])] == []
    assert [name for name, value in held.named_buffers() if not identical(value, buffers[name])] == []
    assert torch.equal(state, generator)


# --- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.sweep(but=("perceptron",))
@pytest.mark.parametrize("case", ["perceptron", "convolutions"])
def test_at_every_budget_the_peak_is_predicted_measured_and_within_it(case: str) -> None:
    model, x = (wide(), ROWS) if case == "perceptron" else (conv(), IMAGES)
    plain = captured(model, x)
    for budget in budgets_of(plain, 5):
        program, record = applied(plain, fit(budget))
        memory = program.memory()
        assert memory.peak_bytes <= budget
        assert memory.resident_bytes == plain.memory().resident_bytes
        predicted, measured = peaks(program, model, x)
        assert measured == predicted <= budget - memory.resident_bytes
        assert record.peak_after == memory.peak_bytes


@pytest.mark.sweep
@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
def test_whole_steps_peak_within_their_budgets(optimizer: str) -> None:
    make = OPTIMIZERS[optimizer]
    for budget in ("80%", "65%"):
        step, measured = step_peaks(wide(), make, mean_square, (ROWS,), [fit(budget)])
        (record,) = step.records
        memory = step.program.memory()
        assert record.peak_before is not None
        assert memory.peak_bytes <= int(record.peak_before * float(budget[:-1]) / 100)
        assert measured == memory.allocated_peak_bytes


def test_drop_in_training_peaks_within_its_budget() -> None:
    def total(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).sum()  # takes a number only, so that what the user adds to the program is next to nothing

    before = drop_in_peak(graphopt.optimize(wide()), (ROWS,), total)
    for budget in ("85%", "70%"):
        model = graphopt.optimize(wide(), [fit(budget)])
        measured = drop_in_peak(model, (ROWS,), total)
        memory = model.program.memory()
        assert measured <= memory.allocated_peak_bytes + 64
        assert measured < before


# --- seconds ---------------------------------------------------------------------------------------------------------


def fitting_of(program: Program, *, host: int | None = None, rate: float | None = None) -> Fitting:
    """A program's trade by the roofline, with ``host`` bytes for what is offloaded at ``rate`` bytes per second."""
    memory = program.memory()
    seconds = cost.cost_report(memory.nodes, method="roofline").seconds
    lanes = None if host is None else functools.partial(host_lanes, room=host, rate=rate, smallest=10_000)
    return Fitting(program, memory, seconds, FittingOptions(lanes=lanes))


HOSTS = [(None, None), (10**9, None), (200_000, None), (10**9, 1e7), (10**9, 3e9)]


@pytest.mark.sweep
@pytest.mark.parametrize("link", some_of(HOSTS, (None, None), (200_000, None), (10**9, 1e7)))
def test_more_bytes_never_cost_more_seconds(link: tuple[int | None, float | None]) -> None:
    host, rate = link
    plain = captured(wide(), ROWS)
    fitting = fitting_of(plain, host=host, rate=rate)
    low, high = fitting.smallest().peak_bytes, plain.memory().peak_bytes
    seconds = []
    for number in range(24):
        budget = low + (high - low) * number // 23
        plan = fitting.within(budget)
        assert plan is not None
        assert plan.peak_bytes <= budget
        seconds.append(plan.seconds)
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1] == 0.0


@pytest.mark.sweep(but=("None",))
@pytest.mark.parametrize("host", [None, 10**9])
def test_the_smallest_peak_is_the_same_wherever_it_is_said(host: int | None) -> None:
    fitting = fitting_of(captured(wide(), ROWS), host=host, rate=1e9)
    smallest = fitting.smallest()
    found = fitting.within(smallest.peak_bytes)
    assert found is not None
    assert found.peak_bytes == smallest.peak_bytes
    assert fitting.within(smallest.peak_bytes - 1) is None
    assert infeasible(fitting, 1).smallest_bytes == smallest.peak_bytes
    report = frontier_report(fitting, "roofline", costs_of(fitting.memory, "roofline"))
    assert report.smallest_bytes == smallest.peak_bytes
    summary = summary_lines(fitting, found, smallest.peak_bytes, costs_of(fitting.memory, "roofline"))
    assert summary[0].endswith(f"the smallest peak found is {format_bytes(smallest.peak_bytes)}")
    if host is None:
        assert smallest.peak_bytes == fitting.frontier.lowest.peak
    else:
        assert smallest.peak_bytes < fitting.frontier.lowest.peak


def test_plans_are_tried_until_one_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rewritten programs take more than the planner expected, slower plans are tried, down to the last."""
    fitting = fitting_of(captured(wide(), ROWS))
    points = list(fitting.frontier)
    assert len(points) > 8
    slowest, budget = points[0].again, points[-1].peak - 1
    original = Fitting._checked

    def larger(self: Fitting, simulated: Simulated, *more: Any) -> Fitted:
        found = original(self, simulated, *more)
        return found if simulated.again == slowest else replace(found, peak_bytes=found.peak_bytes + budget)

    monkeypatch.setattr(Fitting, "_checked", larger)
    found = fitting.within(budget)
    assert found is not None
    assert found.seconds == slowest
    assert fitting.within(points[0].peak - 1) is None


def test_the_record_says_what_was_done() -> None:
    plain = captured(wide(), ROWS)
    program, record = applied(plain, fit("70%"))
    text = "\n".join(record.changed.lines)
    clones = [node for node in program.phase_nodes(Phase.RECOMPUTE) if info(node).origin == "fit-memory"]
    assert record.changed.counts["recomputed"] > 0
    assert clones
    assert record.changed.bytes_saved == plain.memory().peak_bytes - program.memory().peak_bytes > 0
    assert re.search(r"^peak \S+ kB of \S+ kB allowed; with nothing recomputed it takes \S+ kB", text)
    assert re.search(r"^recomputed .* \S+s +cheaper .*training\.py:\d+", text, re.MULTILINE)
    assert re.search(r"^saved ", text, re.MULTILINE)
    assert set(record.changed.tensors) <= set(program.names())
