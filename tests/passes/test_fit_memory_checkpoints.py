"""FitMemory on models with activation checkpointing: as good as without, and never worse than their own segments."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

import graphopt
from graphopt import GraphoptError, Pass
from graphopt.passes import Microbatch, MixedPrecision, OffloadState, Recompute
from tests.support.budgets import fit, smallest_of
from tests.support.fitting import drop_in_peak, frontiers_searched_once, structure
from tests.support.ranks import run_ranks
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


def again(program: graphopt.Program) -> int:
    """How many calls are recomputed."""
    return len(list(program.phase_nodes(graphopt.Phase.RECOMPUTE)))


def notes(step: graphopt.TrainStep) -> list[str]:
    """What is said of the model's own segments."""
    return [line for record in step.records for line in record.changed.lines if "checkpoint()" in line]


# --- budgets ---------------------------------------------------------------------------------------------------------


@pytest.mark.sweep(but=("non-reentrant",))
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
    without = graphopt.optimize(Checkpointed(None), [fit(budget)], example_inputs=(ROWS,))
    assert memory.peak_bytes == without.program.memory().peak_bytes
    assert drop_in_peak(optimized, (ROWS,)) == drop_in_peak(without, (ROWS,))


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.sweep(but=("reentrant",))
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
    """They are a hint: where there is room, less or nothing is recomputed."""
    baseline, plain = program_of(False), program_of(None).memory().peak_bytes
    low = baseline.memory().peak_bytes
    assert low < plain
    roomy, between = (step_of([fit(budget)]).prepare(ROWS) for budget in (plain, (low + plain) // 2))
    assert not again(roomy.program)
    assert 0 < again(between.program) < again(baseline)
    assert low < between.program.memory().peak_bytes <= (low + plain) // 2
    assert notes(roomy)
    assert notes(between)
    assert_same_training(Checkpointed(False), "adamw", mean_square, [(ROWS,)], [fit(plain)], steps=2)


def test_segments_stay_where_no_plan_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a search there is no plan but the smallest; the model's own segments are within the budget."""
    monkeypatch.setattr("graphopt.planning.planner._Search.run", lambda *_, **__: None)
    program = program_of(False, "sgd")
    step = step_of([fit(program.memory().peak_bytes, time_limit=0.0)], make="sgd").prepare(ROWS)
    assert [str(node.target) for node in step.program.nodes] == [str(node.target) for node in program.nodes]
    note = notes(step)[0]
    assert note == f"{NOTE[:-2]} stay as they are: no plan that was found is faster"


# --- other programs, other passes ------------------------------------------------------------------------------------


def test_a_plan_is_carried_to_the_other_programs_of_a_step() -> None:
    """The first update, which makes the optimizer's state, and the programs of gradient accumulation."""
    budget = int(1.2 * program_of(False).memory().peak_bytes)
    results = []
    for passes in ([], [fit(budget)]):
        step = step_of(passes).accumulate(2)
        torch.manual_seed(1)
        losses = [step(ROWS).clone() for _ in range(4)]
        results.append([*losses, *(p.detach().clone() for p in step.model.parameters()), torch.get_rng_state()])
    programs = dict(step.snapshots)
    assert len([label for label in programs if "fit-memory" in label]) >= 1
    assert all(map(torch.equal, *results))
    assert notes(step)


@pytest.mark.parametrize(
    "passes",
    [[MixedPrecision()], [Microbatch(3)], [OffloadState()], [Recompute(["blocks.1"])]],
    ids=["mixed precision", "slices", "state elsewhere", "recompute"],
)
def test_together_with_other_passes(passes: list[Pass]) -> None:
    def run(*fitting: Pass) -> tuple[graphopt.TrainStep, list[torch.Tensor]]:
        step = step_of([*passes, *fitting], make="adamw" if isinstance(passes[0], OffloadState) else "sgd")
        torch.manual_seed(1)
        losses = [step(ROWS).clone() for _ in range(2)]
        return step, [*losses, *(p.detach().clone() for p in step.model.parameters()), torch.get_rng_state()]

    baseline, expected = run()
    budget = int(0.97 * baseline.program.memory().peak_bytes)
    fitted, found = run(fit(budget))
    assert fitted.program.memory().peak_bytes <= budget
    assert all(map(torch.equal, expected, found))
    assert notes(fitted)


RANKS = """
import graphopt
from graphopt.passes import DataParallel, ShardParameters
from tests.passes.test_fit_memory_checkpoints import ROWS, Checkpointed, fit, notes
from tests.support.ranks import run_ranks
from tests.support.training import OPTIMIZERS, mean_square

def train(*passes):
    model = Checkpointed(False)
    step = graphopt.optimize_step(model, OPTIMIZERS["adamw"](model.parameters()), list(passes), loss=mean_square)
    torch.manual_seed(rank)
    losses = [step(ROWS + rank).item() for _ in range(3)]
    return step, losses

for exchange in ([DataParallel()], [DataParallel(), ShardParameters(cost="roofline")]):
    baseline, expected = train(*exchange)
    for share in (0.9, 1.1):
        budget = int(share * baseline.program.memory().peak_bytes)
        fitted, found = train(*exchange, fit(budget, time_limit=0.0))
        say([expected == found, fitted.program.memory().peak_bytes <= budget, len(notes(fitted))])
"""


@pytest.mark.sweep
def test_ranks_train_alike(tmp_path: Path) -> None:
    for told in run_ranks(RANKS, 2, tmp_path / "store"):
        assert told == [[True, True, 1]] * 4


# --- other doors -----------------------------------------------------------------------------------------------------


class InParts(Checkpointed):
    """The same, cut in two: code between the blocks looks at a value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.run(self.embed(x), slice(0, 2))
        if x.sum().item() > 1e9:
            x = x * 2
        return self.run(x, slice(2, 3))

    def run(self, x: torch.Tensor, which: slice) -> torch.Tensor:
        for block in self.blocks[which]:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's
@pytest.mark.sweep(but=("non-reentrant",))
@pytest.mark.parametrize("reentrant", VARIANTS.values(), ids=VARIANTS)
def test_segments_are_a_hint_in_parts_of_a_model_too(reentrant: bool) -> None:
    def trained(budget: str | int | None, how: bool | None) -> tuple[int, list[torch.Tensor]]:
        model = InParts(how)
        optimized = graphopt.optimize(model, [] if budget is None else [fit(budget)])
        torch.manual_seed(1)
        optimized(ROWS).square().mean().backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        peak = graphopt.measure_peak(lambda: optimized(ROWS).square().mean().backward()).allocated_peak_bytes
        return peak, gradients

    def least_of(how: bool | None) -> int:
        with pytest.raises(GraphoptError, match="smallest peak is") as refused:
            trained("1%", how)
        return int(re.findall(r"smallest peak is (\d+) bytes", str(refused.value))[0])

    least = least_of(reentrant)
    assert least <= least_of(None)
    as_it_is, expected = trained(None, reentrant)
    tight, again = trained(least, reentrant)
    roomy, kept = trained("1GB", reentrant)
    assert tight < as_it_is < roomy <= trained(None, None)[0]
    assert trained("99%", reentrant)[0] <= as_it_is  # a share is one of the model as it is
    assert all(map(torch.equal, expected, again))
    assert all(map(torch.equal, expected, kept))


@pytest.mark.parametrize("reentrant", VARIANTS.values(), ids=VARIANTS)
def test_behind_torch_compile(reentrant: bool) -> None:
    torch._dynamo.reset()
    plain = graphopt.optimize(Checkpointed(None), example_inputs=(ROWS,)).program
    budget = smallest_of(plain)
    results = []
    for compiled in (False, True):
        model = Checkpointed(reentrant)
        passes = {"passes": str(fit(budget))}
        run = torch.compile(model, backend="graphopt", options=passes) if compiled else model
        torch.manual_seed(1)
        loss = mean_square(run, ROWS)
        loss.backward()
        results.append([loss, *(p.grad for p in model.parameters()), torch.get_rng_state()])
    assert all(map(torch.equal, *results))


def test_a_stored_capture_is_planned_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHOPT_CACHE", str(tmp_path))
    monkeypatch.setenv("GRAPHOPT_CACHE_PROGRAMS", "1")
    budgets = [int(0.9 * program_of(False).memory().peak_bytes)] * 2
    one, other = (step_of([fit(budget)]).prepare(ROWS) for budget in budgets)
    assert structure(one.program) == structure(other.program)
    assert notes(one) == notes(other) != []
