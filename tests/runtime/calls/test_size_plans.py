"""A budget holds at every size, with a few plans of one capture."""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import graphopt
from graphopt import Changed, GraphoptError, Pass, Program
from graphopt.ir.node import value_of
from graphopt.passes import Chunk, ChunkLoss, FitMemory, Microbatch
from tests.support.changing_lengths import (
    LONGEST,
    Lengths,
    Way,
    assert_trains_alike,
    next_word,
    sentences,
)
from tests.support.training import OPTIMIZERS

LENGTHS = random.Random(1).sample(range(8, LONGEST + 1), 9)


def plain_peak(model: Lengths, length: int) -> int:
    """The bytes that a step without passes takes."""
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    (batch,) = sentences([length])
    return graphopt.capture(model, batch, loss=next_word, optimizer=optimizer).memory().peak_bytes


def fit(budget: int | str) -> FitMemory:
    return FitMemory(budget, cost="roofline")


@pytest.mark.sweep
@pytest.mark.parametrize("way", ["drop-in", "step"])
def test_bits_and_plans(way: Way) -> None:
    model = Lengths(layers=2)
    budget = int(0.75 * plain_peak(model, LONGEST))
    found = assert_trains_alike(way, model, next_word, sentences(LENGTHS), passes=[fit(budget)])
    assert found.captures == 2
    assert len(found.programs) <= 5
    assert all(program.memory().peak_bytes <= budget for program in found.programs)
    assert any("the plan holds up to dimension 1 of args[0]" in _said(program) for program in _records(found.serving))


def _records(serving: object) -> list[object]:
    return [record for capture in serving.everything() for record in capture.rewritten.records]  # type: ignore[attr-defined]


def _said(record: object) -> str:
    return " ".join((*record.changed.lines, record.changed.reason))  # type: ignore[attr-defined]


@pytest.mark.sweep
def test_the_measured_peak_is_within_the_budget_at_every_length() -> None:
    model = Lengths(layers=2)
    budget = int(0.75 * plain_peak(model, LONGEST))
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    step = graphopt.optimize_step(model, optimizer, [fit(budget)], loss=next_word)
    for batch in sentences(LENGTHS[:5]):
        step.prepare(*batch)
        used = dict.fromkeys(step.program.symbols, batch[0].shape[1])
        step(*batch)
        above = graphopt.measure_peak(lambda batch=batch: step(*batch)).allocated_peak_bytes
        memory = step.program.memory(sizes=used)
        assert memory.resident_bytes + above <= budget
        assert abs(memory.allocated_peak_bytes - above) <= above / 500
    assert len(step._runner.captures.all()) == 2


@pytest.mark.sweep
def test_a_share_is_of_the_peak_at_the_largest_sizes() -> None:
    model = Lengths(layers=1)
    found = assert_trains_alike("step", model, next_word, sentences([90, 60, 128, 8]), passes=[fit("75%")])
    budget = int(0.75 * plain_peak(model, LONGEST))
    assert all(program.memory().peak_bytes <= budget for program in found.programs)
    assert found.captures == 2


@pytest.mark.sweep
def test_declared_sizes_are_planned_for_as_they_come() -> None:
    model = Lengths(layers=1)
    budget = int(0.75 * plain_peak(model, LONGEST))
    length = torch.export.Dim("length", min=2, max=LONGEST)
    shapes = {"tokens": {1: length}, "targets": {1: length}}
    batches = sentences([20, LONGEST, 30])
    found = assert_trains_alike("step", model, next_word, batches, passes=[fit(budget)], dynamic_shapes=shapes)
    assert found.captures == 1
    assert all(program.memory().peak_bytes <= budget for program in found.programs)
    assert (
        max(program.context.sizes.planned[name] for program in found.programs for name in program.context.sizes.planned)
        == LONGEST
    )


@pytest.mark.sweep
def test_sizes_for_which_there_is_no_plan_are_refused_and_smaller_ones_go_on() -> None:
    model = Lengths(layers=1)
    budget = int(1.05 * plain_peak(model, 40))
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    step = graphopt.optimize_step(model, optimizer, [fit(budget)], loss=next_word)
    short, other, long = sentences([30, 40, LONGEST])
    step(*short)
    step(*other)
    with pytest.raises(GraphoptError, match="no plan fits"):
        step(*long)
    step(*other)
    assert len(step._runner.captures.all()) == 2


# --- sizes stay open -------------------------------------------------------------------------------------------------


class Weighted(nn.Module):
    """A network that multiplies by a tensor which it makes as long as the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 4))
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = torch.ones(()).expand(x.shape[0], 4) * 1.5
        found: torch.Tensor = self.head(self.net(x) * (self.net(x).detach() * weights).softmax(-1))
        return found


def mean_of_squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(x).square().mean()
    return found


def rows(*counts: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(count, 4, generator=generator) for count in counts]


def losses(passes: list[Any] | None, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Weighted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    if passes is not None:
        step = graphopt.optimize_step(model, optimizer, passes, loss=mean_of_squares)
        return [step(batch) for batch in batches]
    found = []
    for batch in batches:
        loss = mean_of_squares(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return found


@pytest.mark.sweep
def test_what_is_advised_where_no_plan_fits_fixes_no_size() -> None:
    """The next step above a size has no plan, which asks what would lower the peak; the size itself has one."""
    batches = rows(8, 5, 7, 3, 12, 1, 5)
    assert all(map(torch.equal, losses([fit("99%")], batches), losses(None, batches)))


@dataclass(frozen=True)
class Asking(Pass):
    """A pass that takes a size that varies for a number, from 12 rows on."""

    name = "asking"
    stage = "joint"
    numerics = "bitwise"

    def apply(self, program: Program) -> Changed:
        if max(program.context.sizes.planned.values(), default=0) >= 12:
            int(value_of(program.inputs_of("input")[0][0]).shape[0])
        return Changed(counts={"asked": 1})


@pytest.mark.sweep
def test_a_pass_that_fixes_a_size_is_told_and_does_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    batches = rows(8, 5, 7, 3, 12, 13, 5)
    with caplog.at_level(logging.WARNING, "graphopt"):
        found = losses([Asking(), fit("99%")], batches)
    assert all(map(torch.equal, found, losses(None, batches)))
    assert "a pass has fixed a size that varies" in caplog.text
    assert "dimension 0 of args[0] = 12" in caplog.text


KEPT_OPEN = (
    "recompute{checkpoints=net}", "recompute{checkpoints=net},contiguous-checkpoints", "offload", "offload-state",
    "fit-memory{budget=95% cost=roofline}", "compress-activations", "mixed-precision", "mixed-precision{level=O2}",
    "scale-loss", "clip-gradients{max-norm=1.0}", "fuse-update", "checkpoint-boundaries", "chunk-loss",
)  # fmt: skip


@pytest.mark.sweep(but=("checkpoint-boundaries",))
@pytest.mark.parametrize("passes", KEPT_OPEN)
def test_no_pass_fixes_a_size(passes: str) -> None:
    shapes = ({0: torch.export.Dim("count", min=2, max=64)},)
    model = Weighted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    step = graphopt.optimize_step(model, optimizer, passes, loss=mean_of_squares, dynamic_shapes=shapes)
    step.prepare(*rows(8))
    assert list(step.program.symbols.values()) == [8]


@pytest.mark.sweep
@pytest.mark.parametrize("current", [ChunkLoss(2), Chunk("net", chunks=2), Microbatch(2)], ids=lambda one: one.name)
def test_passes_that_divide_rows_refuse_declared_sizes_by_name(current: Pass) -> None:
    model = Weighted()
    shapes = ({0: torch.export.Dim("count", min=2, max=64)},)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = graphopt.optimize_step(model, optimizer, [current], loss=mean_of_squares, dynamic_shapes=shapes)
    with pytest.raises(GraphoptError, match=r"its sizes vary .*, and rows are divided once.*dynamic_shapes"):
        step(*rows(8))
