"""A plan that is found once for a capture and carried over to its other programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import graphopt
from graphopt import Pass, Program
from graphopt.passes import FuseUpdate
from graphopt.planning.frontier import Frontier
from graphopt.rewriting.memory.fit.fitting import Fitted, Fitting
from graphopt.rewriting.memory.fit.named_plan import NamedPlan, shared_calls
from tests.support.budgets import ROWS, fit
from tests.support.command import Command
from tests.support.fitting import (
    frontiers_searched_once,
    planned,
    random_plan,
    searches_counted,
    structure,
    unplanned,
    wide,
)
from tests.support.training import OPTIMIZERS, captured, mean_square

SHARE = "70%"
ENOUGH = 10**12


@pytest.fixture
def searched() -> Iterator[list[Frontier]]:
    """The frontiers that are searched; for equal programs one is enough anyway."""
    with frontiers_searched_once() as found:
        yield found


def tiny() -> tuple[nn.Module, torch.Tensor]:
    """A target of the command line."""
    return wide(), ROWS


@pytest.mark.sweep(but=("fused update-adamw",))
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
@pytest.mark.parametrize("before", [(), (FuseUpdate(),)], ids=["alone", "fused update"])
def test_a_step_is_searched_once_and_its_first_run_is_within_the_same_bytes(
    optimizer: str, before: tuple[Pass, ...], searched: list[Frontier]
) -> None:
    model = wide()
    made = OPTIMIZERS[optimizer](model.parameters())
    step = graphopt.optimize_step(model, made, [*before, fit(SHARE)], loss=mean_square)
    for _ in range(2):
        step(ROWS)
    assert len(searched) == 1
    record = step.records[-1]
    assert record.peak_before is not None
    captured_step = step._latest()
    programs = {key.kind: found.program for key, found in captured_step.variants.items()}
    assert programs.keys() == ({"update"} if optimizer == "sgd" else {"first update", "update"})
    assert len({id(program) for program in programs.values()}) == len(programs)
    assert all(program.memory().peak_bytes <= 0.7 * record.peak_before for program in programs.values())


@pytest.mark.sweep
def test_a_drop_in_model_is_searched_once(searched: list[Frontier]) -> None:
    model = graphopt.optimize(wide(), [fit(SHARE)])
    for _ in range(2):
        model(ROWS).square().mean().backward()
    assert len(searched) == 1


def test_the_command_plan_searches_once(searched: list[Frontier], capsys: pytest.CaptureFixture[str]) -> None:
    run = Command(capsys)
    run("plan", f"{__file__}:tiny", "--cost", "a100-80gb", "-b", "90%", "-b", "80%")
    assert len(searched) == 1


@pytest.mark.sweep
def test_a_trace_of_changed_settings_takes_the_plan_over(searched: list[Frontier]) -> None:
    model = wide()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = graphopt.optimize_step(model, optimizer, [fit(SHARE)], loss=mean_square)
    step(ROWS)
    optimizer.param_groups[0]["weight_decay"] = 0.5
    step(ROWS)
    assert len(searched) == 1
    assert any("'" in name for name in step.program.names())  # something is recomputed


@pytest.mark.sweep
def test_programs_outside_of_a_capture_are_searched_one_by_one(searched: list[Frontier]) -> None:
    program = captured(wide(), ROWS, loss=mean_square)
    first, other = program.copy(), captured(wide(inner=48), ROWS, loss=mean_square)
    for each in (first, other):
        graphopt.Pipeline([fit(SHARE)]).run(each)
    assert len(searched) == 2


# --- what a plan can be carried over to ------------------------------------------------------------------------------


def step_program(model: nn.Module, **changed: Any) -> Program:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **changed)
    return graphopt.capture(model, (ROWS,), loss=mean_square, optimizer=optimizer)


def named(program: Program) -> tuple[NamedPlan, Program]:
    """A random plan by names, and the program that comes of it."""
    fitting = unplanned(program)
    simulated = random_plan(fitting, 0.02, 1)
    assert simulated is not None
    assert simulated.plan.repeats()
    return fitting.named(Fitted(simulated, simulated.peak)), planned(fitting, simulated)


@pytest.mark.sweep
def test_a_plan_does_to_an_equal_program_what_it_does_to_its_own() -> None:
    one, other = step_program(wide()), step_program(wide())
    plan, rewritten = named(one)
    assert shared_calls(one) == shared_calls(other)
    assert plan.fits(other, ENOUGH)
    plan.apply(other, origin="a test")
    other.erase_dead()
    assert structure(other) == structure(rewritten)


def test_a_plan_fits_as_far_as_its_peak() -> None:
    program = step_program(wide())
    plan, rewritten = named(program)
    peak = rewritten.memory().peak_bytes
    before = structure(program)
    assert plan.fits(program, peak)
    assert not plan.fits(program, peak - 1)
    assert structure(program) == before


def _other_update(program: Program) -> Program:
    return step_program(wide(), amsgrad=True)


def _other_model(program: Program) -> Program:
    return step_program(wide(inner=48))


def _joint(program: Program) -> Program:
    return captured(wide(), ROWS, loss=mean_square)


@pytest.mark.sweep
@pytest.mark.parametrize(("make", "same"), [(_other_update, True), (_other_model, False), (_joint, True)])
def test_programs_share_a_plan_where_only_the_update_differs(make: Callable[[Program], Program], same: bool) -> None:
    program = step_program(wide())
    assert (shared_calls(program) == shared_calls(make(program))) == same


@pytest.mark.sweep
def test_a_plan_is_not_carried_to_a_program_that_lacks_what_runs_again() -> None:
    plan, _ = named(step_program(wide()))
    small = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 4))
    assert not plan.fits(step_program(small), ENOUGH)


@pytest.mark.sweep
def test_what_an_update_overwrites_meanwhile_is_not_run_again() -> None:
    program = step_program(wide())
    plan, _ = named(program)
    assert plan.fits(program, ENOUGH)
    parameters = [node for node, _ in program.inputs_of("parameter")]
    weight = next(node for node in parameters if any(user.name in plan.again for user in node.users))
    start = next(program.phase_nodes(graphopt.Phase.BACKWARD))
    program.insert(
        torch.ops.aten.mul_.Tensor, (weight, 2.0), before=start, phase=graphopt.Phase.UPDATE, origin="a test"
    )
    assert not plan.fits(program, ENOUGH)


@pytest.mark.sweep
@pytest.mark.parametrize("share", [0.76, 0.85])
def test_the_accumulating_programs_of_a_step_stay_within_the_budget_after_one_search(share: float) -> None:
    model, optimizer = wide(), OPTIMIZERS["adamw"]
    budget = int(share * step_program(model).memory().peak_bytes)
    step = graphopt.optimize_step(model, optimizer(model.parameters()), [fit(budget)], loss=mean_square).accumulate(3)
    with searches_counted() as searches:
        for _ in range(6):
            step(ROWS)
    programs = {key.kind: found.program for key, found in step._latest().variants.items()}
    assert programs.keys() == {"begin", "middle", "first update", "update"}
    assert all(program.memory().peak_bytes <= budget for program in programs.values())
    assert len(searches) == 1


@pytest.mark.sweep
def test_a_search_carried_to_an_equal_program_gives_it_the_same_plans() -> None:
    one, other = step_program(wide()), step_program(wide())
    memory = one.memory()
    own = Fitting(one, memory, [1.0] * len(memory.nodes))
    carried = own.carried_to(other, other.memory())
    smallest = own.smallest().peak_bytes
    for budget in (smallest - 1, smallest, (smallest + memory.peak_bytes) // 2, memory.peak_bytes):
        mine, theirs = own.within(budget), carried.within(budget)
        assert (mine is None) == (theirs is None) == (budget < smallest)
        assert mine is None or theirs is None or own.named(mine) == carried.named(theirs)
