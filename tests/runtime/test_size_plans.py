"""A budget holds at every size, with a few plans of one capture."""

from __future__ import annotations

import random

import pytest
import torch

import graphopt
from graphopt import GraphoptError
from graphopt.passes import FitMemory
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


def test_a_share_is_of_the_peak_at_the_largest_sizes() -> None:
    model = Lengths(layers=1)
    found = assert_trains_alike("step", model, next_word, sentences([90, 60, 128, 8]), passes=[fit("75%")])
    budget = int(0.75 * plain_peak(model, LONGEST))
    assert all(program.memory().peak_bytes <= budget for program in found.programs)
    assert found.captures == 2


def test_declared_sizes_are_planned_for_as_they_come() -> None:
    model = Lengths(layers=1)
    budget = int(0.75 * plain_peak(model, LONGEST))
    length = torch.export.Dim("length", min=2, max=LONGEST)
    shapes = {"tokens": {1: length}, "targets": {1: length}}
    batches = sentences([20, LONGEST, 30])
    found = assert_trains_alike("step", model, next_word, batches, passes=[fit(budget)], dynamic_shapes=shapes)
    assert found.captures == 1
    assert all(program.memory().peak_bytes <= budget for program in found.programs)
    assert max(program.context.sizes[name] for program in found.programs for name in program.context.sizes) == LONGEST


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
