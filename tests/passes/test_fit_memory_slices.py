"""``FitMemory`` behind ``Microbatch``: what is recomputed, slice by slice."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import graphopt
from graphopt import Pass, PassError, Phase, Program
from graphopt.analysis.costs.cost import costs_of
from graphopt.ir.node import info
from graphopt.ir.ops.layers.loss_gradient import loss_gradient
from graphopt.passes import FitMemory, Microbatch, MixedPrecision
from graphopt.rewriting.memory.fit.fitting import Fitting
from graphopt.rewriting.memory.fit.preparation import prepared
from graphopt.rewriting.memory.recompute.planning_problem import planning_problem
from tests.support.budgets import fit, smallest_of
from tests.support.fitting import step_peaks
from tests.support.properties import examples
from tests.support.training import OPTIMIZERS, Blocks, next_token

TOKENS = torch.arange(5 * 12).reshape(5, 12) * 5 % 11


def blocks() -> nn.Module:
    torch.manual_seed(0)
    return Blocks(2, p=0.1)


def trained(
    passes: Sequence[Pass], steps: int = 3, optimizer: str = "adamw"
) -> tuple[graphopt.TrainStep, list[torch.Tensor]]:
    """A step after some batches, and all that it leaves: losses, parameters, the optimizer's state, the stream."""
    model = blocks()
    step = graphopt.optimize_step(model, OPTIMIZERS[optimizer](model.parameters()), passes, loss=next_token)
    torch.manual_seed(1)
    left = [step(TOKENS.roll(number, 1)).detach().clone() for number in range(steps)]
    state = [value for values in step.optimizer.state.values() for value in values.values()]
    return step, [*left, *map(torch.clone, (*model.parameters(), *state)), torch.get_rng_state()]


@functools.cache
def by_slices(slices: int) -> tuple[Program, list[torch.Tensor]]:
    """A step whose batch is in slices and that runs nothing again, and what two of its steps leave."""
    step, left = trained([Microbatch(slices)], steps=2, optimizer="sgd")
    return step.program, left


@functools.cache
def bounds(slices: int) -> tuple[int, int]:
    """The smallest peak that is found for a step in slices, and its peak where nothing is recomputed."""
    program, _ = by_slices(slices)
    return smallest_of(program), program.memory().peak_bytes


@pytest.mark.sweep(but=("3",))
@pytest.mark.parametrize("slices", [2, 3])
def test_slices_run_again_what_a_budget_asks_for(slices: int) -> None:
    plain, expected = trained([Microbatch(slices)])
    budget = int(0.85 * plain.program.memory().peak_bytes)
    step, left = trained([Microbatch(slices), fit(budget)])
    assert step.program.memory().peak_bytes <= budget
    assert all(map(torch.equal, left, expected))
    changed = step.records[-1].changed
    assert changed.counts["recomputed"] > 0
    assert any(f"each of {slices} slices of the batch recomputes" in line for line in changed.lines)


def test_the_predicted_peak_is_measured() -> None:
    low, high = bounds(3)
    passes = [Microbatch(3), fit((2 * low + high) // 3)]
    step, measured = step_peaks(blocks(), OPTIMIZERS["sgd"], next_token, (TOKENS,), passes)
    assert step.program.memory().allocated_peak_bytes == measured


def test_the_first_slice_has_more_room() -> None:
    low, high = bounds(3)
    step, _ = trained([Microbatch(3), fit((low + 2 * high) // 3)], steps=1, optimizer="sgd")
    problem = planning_problem(step.program, [1.0] * len(step.program.memory().nodes))
    assert {found.number for found in problem.slices if found is not None} == {0, 1, 2}
    runs = Counter(
        next(found.number for found in problem.slices[place:] if found is not None)
        for place, node in enumerate(problem.nodes)
        if node is not None and info(node).phase is Phase.RECOMPUTE
    )
    assert runs[1] > 0
    assert runs[0] <= runs[1]


def test_each_slice_is_prepared_as_a_whole_batch_is() -> None:
    """Gradients of its loss in the place of its log-probabilities, and products that free an activation first."""
    plain, _ = trained([Microbatch(3)], steps=1)
    high = plain.program.memory().peak_bytes
    step, _ = trained([Microbatch(3), fit(int(0.98 * high))], steps=1)
    gradients = [info(node).batch_slice for node in step.program.nodes if node.target is loss_gradient]
    assert [part.number for part in gradients if part is not None] == [0, 1, 2]
    (line,) = [line for line in step.records[-1].changed.lines if "ops of backward run sooner" in line]
    whole, _ = trained([fit("95%")], steps=1)
    (once,) = [line for line in whole.records[-1].changed.lines if "ops of backward run sooner" in line]
    assert int(line.split()[0]) > 2 * int(once.split()[0])


def test_what_backward_takes_the_place_of_is_a_value_of_its_own_to_plans() -> None:
    """Plans may drop and make again what forward of a slice made, but not what backward has made of it."""
    program = prepared(by_slices(3)[0], "a test").program
    planning = planning_problem(program, [1.0] * len(program.memory().nodes))
    problem = planning.problem
    found = [place for place, node in enumerate(planning.nodes) if node is not None and node.target is loss_gradient]
    assert len(found) == 3
    for place in found:
        operation = problem.operations[place]
        (over,) = operation.overwrites
        assert operation.makes
        assert problem.operations[problem.makers[over]].repeatable
        assert not operation.repeatable


@pytest.mark.sweep
@given(slices=st.integers(2, 5), share=st.floats(0, 1))
@examples(2)
def test_any_budget_that_can_be_met_is(slices: int, share: float) -> None:
    low, high = bounds(slices)
    budget = int(low + share * (high - low))
    step, left = trained([Microbatch(slices), fit(budget)], steps=2, optimizer="sgd")
    assert step.program.memory().peak_bytes <= budget
    assert all(map(torch.equal, left, by_slices(slices)[1]))


def test_more_budget_never_costs_more() -> None:
    low, high = bounds(3)
    program, _ = by_slices(3)
    memory = program.memory()
    fitting = Fitting(program, memory, costs_of(memory, "roofline").seconds)
    found = [fitting.within(low + part * (high - low) // 12) for part in range(13)]
    seconds = [fitted.seconds for fitted in found if fitted is not None]
    assert len(seconds) == 13
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1] == 0.0


@pytest.mark.sweep
def test_it_goes_with_mixed_precision() -> None:
    passes = [MixedPrecision("bf16"), Microbatch(3)]
    plain, expected = trained(passes)
    budget = int(0.9 * plain.program.memory().peak_bytes)
    step, left = trained([*passes, fit(budget)])
    assert step.program.memory().peak_bytes <= budget
    assert step.records[-1].changed.counts["recomputed"] > 0
    assert all(map(torch.equal, left, expected))


def test_slices_are_known_after_a_program_was_written() -> None:
    program, _ = by_slices(3)
    read, seconds = Program.from_json(program.to_json()), [1.0] * len(program.memory().nodes)
    expected = planning_problem(program, seconds).slices
    assert expected
    for other in (read, program.copy()):
        assert planning_problem(other, seconds).slices == expected


def test_what_may_not_run_again_stays() -> None:
    """Only moves are allowed, and there is nowhere to move to."""
    with pytest.raises(PassError, match="no plan fits"):
        trained([Microbatch(3), FitMemory("60%", cost="roofline", allow=("offload",))], steps=1)
