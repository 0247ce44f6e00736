"""FitMemory on models with activation checkpointing: as good as without, and never worse than their own segments."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

import graphopt
from graphopt import GraphoptError, Pass
from graphopt.passes import DataParallel, Microbatch, MixedPrecision, OffloadState
from tests.support.budgets import fit, smallest_of
from tests.support.fitting import drop_in_peak, frontiers_searched_once
from tests.support.training import OPTIMIZERS, assert_same_training, mean_square

ROWS = torch.linspace(-1, 1, 96 * 16).reshape(96, 16).cos()
VARIANTS = {"reentrant": True, "non-reentrant": False}
NOTE = "the model's checkpoint() segments: "


@pytest.fixture(autouse=True, scope="module")
def _searched_once() -> Iterator[None]:
    with frontiers_searched_once():
        yield


class Checkpointed(nn.Module):
    """Three blocks with dropout; ``reentrant`` says how each is checkpointed, None not at all."""

    def __init__(self, reentrant: bool | None, p: float = 0.3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(p), nn.Linear(64, 16), nn.Tanh()) for _ in range(3)
        )
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def program_of(reentrant: bool | None, make: str = "adamw") -> graphopt.Program:
    model = Checkpointed(reentrant)
    optimizer = OPTIMIZERS[make](model.parameters())
    return graphopt.capture(model, (ROWS,), loss=mean_square, optimizer=optimizer)


def step_of(passes: list[Pass], reentrant: bool | None = False, make: str = "adamw") -> graphopt.TrainStep:
    model = Checkpointed(reentrant)
    return graphopt.optimize_step(model, OPTIMIZERS[make](model.parameters()), passes, loss=mean_square)


def notes(step: graphopt.TrainStep) -> list[str]:
    """What is said of the model's own segments."""
    return [line for record in step.records for line in record.changed.lines if "checkpoint()" in line]


# --- budgets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", VARIANTS.values(), ids=VARIANTS)
def test_budgets_down_to_that_of_the_model_without_checkpoints_are_met(reentrant: bool) -> None:
    baseline, least = program_of(reentrant).memory().peak_bytes, smallest_of(program_of(None))
    assert least < baseline
    for budget in (least, (least + baseline) // 2, baseline - 1):
        assert_same_training(Checkpointed(reentrant), "adamw", mean_square, [(ROWS,)], [fit(budget)], steps=2)
        step = step_of([fit(budget)], reentrant)
        step(ROWS), step(ROWS)
        memory = step.program.memory()
        assert memory.peak_bytes <= budget
        assert memory.allocated_peak_bytes == graphopt.measure_peak(lambda s=step: s(ROWS)).allocated_peak_bytes
    with pytest.raises(GraphoptError, match=f"smallest peak found is {least} bytes"):
        step_of([fit(least - 1)], reentrant)(ROWS)


@pytest.mark.parametrize("reentrant", VARIANTS.values(), ids=VARIANTS)
def test_a_drop_in_model_meets_its_budget(reentrant: bool) -> None:
    model = Checkpointed(reentrant)
    baseline = graphopt.optimize(copy.deepcopy(model), example_inputs=(ROWS,)).program.memory()
    plain = graphopt.optimize(Checkpointed(None), example_inputs=(ROWS,)).program
    budget = smallest_of(plain)
    assert budget < baseline.peak_bytes
    optimized = graphopt.optimize(model, [fit(budget)], example_inputs=(ROWS,))
    memory = optimized.program.memory()
    assert memory.peak_bytes <= budget
    assert drop_in_peak(optimized, (ROWS,)) == pytest.approx(memory.allocated_peak_bytes, rel=0.01)


@pytest.mark.parametrize("reentrant", VARIANTS.values(), ids=VARIANTS)
def test_a_model_of_transformers_is_fitted_as_without_checkpoints(reentrant: bool) -> None:
    tokens = torch.arange(2 * 24).reshape(2, 24) % 61 + 2

    def peaks(budget: int | None, enabled: bool) -> tuple[int, list[torch.Tensor]]:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=16, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=32, use_cache=False,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config).train()
        if enabled:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        passes = [] if budget is None else [fit(budget, allow=("recompute",))]
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        step = graphopt.optimize_step(model, optimizer, passes, loss=lambda m, b: m(input_ids=b, labels=b).loss)
        losses = [step(tokens).clone() for _ in range(2)]
        return step.program.memory().peak_bytes, [*losses, *(p.detach().clone() for p in model.parameters())]

    baseline, expected = peaks(None, enabled=True)
    budget = int(0.8 * baseline)
    without, _ = peaks(budget, enabled=False)
    found, tensors = peaks(budget, enabled=True)
    assert found == without <= budget
    assert all(map(torch.equal, expected, tensors))


# --- what is said ----------------------------------------------------------------------------------------------------


def test_the_record_says_what_became_of_the_segments() -> None:
    step = step_of([fit(program_of(False).memory().peak_bytes - 1)]).prepare(ROWS)
    changed = step.records[0].changed
    (note,) = notes(step)
    kept, dropped = changed.counts["kept of checkpoint()"], changed.counts["dropped beside checkpoint()"]
    assert kept > 0
    assert note == f"{NOTE}{kept} values kept that they drop, {dropped} dropped that they keep"


def test_a_budget_above_the_peak_keeps_what_the_segments_drop() -> None:
    """They are a hint: where there is room, nothing runs again; without checkpoints such a budget changes nothing."""
    baseline, plain = program_of(False).memory().peak_bytes, program_of(None).memory().peak_bytes
    assert baseline < plain
    step = step_of([fit(plain)]).prepare(ROWS)
    assert not list(step.program.phase_nodes(graphopt.Phase.RECOMPUTE))
    assert notes(step)
    assert_same_training(Checkpointed(False), "adamw", mean_square, [(ROWS,)], [fit(plain)], steps=2)
    between = step_of([fit((baseline + plain) // 2)]).prepare(ROWS)
    calls = len(list(between.program.phase_nodes(graphopt.Phase.RECOMPUTE)))
    assert 0 < calls < len(list(program_of(False).phase_nodes(graphopt.Phase.RECOMPUTE)))
    assert between.program.memory().peak_bytes <= (baseline + plain) // 2


def test_segments_stay_where_no_plan_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a search there is no plan but the smallest; the model's own segments are within the budget."""
    monkeypatch.setattr("graphopt.planning.planner._Search._cuts", lambda *_: None)
    monkeypatch.setattr("graphopt.planning.planner._Search._descents", lambda *_: None)
    monkeypatch.setattr("graphopt.planning.planner._Search._structured", lambda *_: None)
    monkeypatch.setattr("graphopt.planning.planner._Search._explore", lambda *_: None)
    program = program_of(False, "sgd")
    step = step_of([fit(program.memory().peak_bytes, time_limit=0.0)], make="sgd").prepare(ROWS)
    assert [str(node.target) for node in step.program.nodes] == [str(node.target) for node in program.nodes]
    (note,) = notes(step)
    assert note == f"{NOTE[:-2]} stay as they are: no plan that was found is faster"


# --- other programs, other passes ------------------------------------------------------------------------------------


def test_a_plan_is_carried_to_the_other_programs_of_a_step() -> None:
    """The first update, which makes the optimizer's state, and the programs of gradient accumulation."""
    budget = int(1.1 * program_of(False).memory().peak_bytes)
    results = []
    for reentrant, passes in ((None, []), (False, [fit(budget)])):
        step = step_of(passes, reentrant)
        torch.manual_seed(1)
        losses = [step(ROWS).clone() for _ in range(2)]
        with step.accumulate(2):
            losses += [step(ROWS).clone() for _ in range(2)]
        results.append([*losses, *(p.detach().clone() for p in step.model.parameters())])
        if passes:
            assert notes(step)
            assert all("checkpoint()" in " ".join(r.changed.lines) for r in step.records if r.name == "fit-memory")
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(
    "passes",
    [[MixedPrecision()], [Microbatch(3)], [OffloadState()], [DataParallel()]],
    ids=["mixed precision", "slices", "state elsewhere", "ranks"],
)
def test_together_with_other_passes(passes: list[Pass]) -> None:
    def run(reentrant: bool | None, *fitting: Pass) -> tuple[graphopt.TrainStep, list[torch.Tensor]]:
        step = step_of([*passes, *fitting], reentrant, "sgd" if isinstance(passes[0], MixedPrecision) else "adamw")
        torch.manual_seed(1)
        losses = [step(ROWS).clone() for _ in range(2)]
        return step, [*losses, *(p.detach().clone() for p in step.model.parameters())]

    baseline, expected = run(False)
    budget = int(0.97 * baseline.program.memory().peak_bytes)
    fitted, found = run(False, fit(budget))
    without, _ = run(None, fit(budget))
    assert fitted.program.memory().peak_bytes == without.program.memory().peak_bytes <= budget
    assert all(map(torch.equal, expected, found))
    assert notes(fitted)
