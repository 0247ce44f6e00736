"""What the tests of FitMemory, Offload and recompute share: random plans, peaks of training steps, a small model."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import fx, nn

import graphopt
from graphopt import Changed, Phase, Pipeline, Program, measure_peak
from graphopt.analysis.costs.cost import cost_report
from graphopt.ir.ops import schema
from graphopt.planning import Problem, Simulated
from graphopt.planning.frontier import Frontier
from graphopt.planning.simulation.schedule import Decision
from graphopt.rewriting.memory.fit import fitting as fitting_module
from graphopt.rewriting.memory.fit.fitting import Fitted, Fitting, FittingOptions
from graphopt.rewriting.memory.recompute.recompute_plan import Again, recompute
from graphopt.rewriting.pass_ import Pass, PassRecord, PassStage
from tests.support.training import Loss, MakeOptimizer, Net, Plain, copied, mean_square

MOST_STEPS = 1500
"""Random plans of more steps are left out: dropping everything all the time runs some things thousands of times."""


def wide(p: float = 0.3, d: int = 8, inner: int = 64) -> Net:
    """A perceptron with dropout and batch norm; with many rows its activations are nearly all of its memory."""
    torch.manual_seed(0)
    return Net(
        nn.Linear(d, inner), nn.GELU(), nn.Dropout(p), nn.Linear(inner, d), nn.BatchNorm1d(d), nn.Linear(d, inner),
        nn.Tanh(), nn.GELU(), nn.Linear(inner, d), nn.Linear(d, inner), nn.GELU(), nn.Sigmoid(), nn.Linear(inner, d),
    )  # fmt: skip


# --- plans -----------------------------------------------------------------------------------------------------------


def unplanned(program: Program) -> Fitting:
    """A program with the planner's view of it, and nothing searched."""
    memory = program.memory()
    seconds = cost_report(memory.nodes, method="roofline").seconds
    return Fitting(program, memory, seconds, FittingOptions(recompute=False))


def random_plan(fitting: Fitting, density: float, seed: int) -> Simulated | None:
    """The plan that drops every value before every operation with a probability of ``density``; None if it is long."""
    draw = random.Random(seed)
    problem = fitting.planning.problem
    moments, values = range(1, len(problem.operations)), range(len(problem.sizes))
    pairs = [(moment, value) for moment in moments for value in values if draw.random() < density]
    drops = frozenset(Decision(moment, value) for moment, value in pairs)
    simulated = fitting.scheduler.evaluate(drops)
    return simulated if len(simulated.plan.steps) <= MOST_STEPS else None


def planned(fitting: Fitting, simulated: Simulated) -> Program:
    """A copy of the program, rewritten as a plan says."""
    program = fitting.program.copy()
    fitting.apply(program, Fitted(simulated, simulated.peak), origin="a test")
    program.erase_dead()
    return program


@dataclass(frozen=True)
class RandomPlan(Plain):
    """Acts on a random plan, as a pass of the program that runs."""

    name: ClassVar[str] = "random-plan"
    stage: ClassVar[PassStage] = "last"

    density: float = 0.2
    seed: int = 0

    def apply(self, program: Program) -> Changed:
        fitting = unplanned(program)
        simulated = random_plan(fitting, self.density, self.seed)
        assert simulated is not None
        fitting.apply(program, Fitted(simulated, simulated.peak), origin="a test")
        return Changed(counts={"recomputed": len(simulated.plan.repeats())})


@dataclass(frozen=True)
class RunAgain(Plain):
    """Runs the calls of ``tensors`` again in front of each call of ``before``, both by name."""

    name: ClassVar[str] = "run-again"
    stage: ClassVar[PassStage] = "last"

    tensors: tuple[str, ...] = ()
    before: tuple[str, ...] = ()

    def apply(self, program: Program) -> Changed:
        named = program.names()
        places = [named[name] for name in self.before]
        runs = [Again(schema.maker(named[name]), place, "a test") for place in places for name in self.tensors]
        return Changed(counts={"recomputed": len(recompute(program, runs).clones)})


@contextmanager
def searches_counted() -> Iterator[list[Problem]]:
    """While inside, the problems for which frontiers are searched, those that are equal as often as they come."""
    original = fitting_module.find_frontier
    searched: list[Problem] = []

    def find(problem: Problem, **settings: Any) -> Frontier:
        searched.append(problem)
        return original(problem, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting_module, "find_frontier", find)
        yield searched


@contextmanager
def frontiers_searched_once() -> Iterator[list[Frontier]]:
    """While inside, problems that are equal share one search; gives the frontiers that were searched.

    What is found depends on the problem, and on the budget that is aimed at.
    """
    original = fitting_module.find_frontier
    known: list[tuple[Problem, tuple[Any, ...], Frontier]] = []
    searched: list[Frontier] = []

    def find(problem: Problem, *, time_limit: float | None = None, **settings: Any) -> Frontier:
        effort = settings.get("budget"), settings.get("thorough")
        found = next((frontier for other, how, frontier in known if how == effort and other == problem), None)
        if found is None or time_limit is not None:
            found = original(problem, time_limit=time_limit, **settings)
            searched.append(found)
            if time_limit is None:
                known.append((problem, effort, found))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting_module, "find_frontier", find)
        yield searched


# --- looking ---------------------------------------------------------------------------------------------------------


def applied(program: Program, *passes: Pass) -> tuple[Program, PassRecord]:
    """A copy of a program after passes, and the last one's record."""
    changed = program.copy()
    records = Pipeline(passes).run(changed)
    return changed, records[-1]


def structure(program: Program) -> list[str]:
    """Every node with its arguments."""
    return [f"{node.name} = {node.target}{node.args}{node.kwargs}" for node in program.nodes]


def calls(program: Program, op: str, *phases: Phase) -> list[fx.Node]:
    """The calls of an op, by its short name, in order."""
    return [node for node in program.phase_nodes(*(phases or tuple(Phase))) if schema.op_name(node) == op]


def step_peaks(
    model: nn.Module, make: MakeOptimizer, loss: Loss, batch: Sequence[Any], passes: Sequence[Pass]
) -> tuple[graphopt.TrainStep, int]:
    """A whole step after its first calls, and the measured bytes that another one adds at its peak."""
    step = graphopt.optimize_step(model, make(model.parameters()), passes, loss=loss)
    inputs = copied(batch)
    step(*inputs), step(*inputs)
    return step, measure_peak(lambda: step(*inputs)).allocated_peak_bytes


def drop_in_peak(model: nn.Module, batch: Sequence[Any], loss: Loss = mean_square) -> int:
    """The measured bytes that forward, loss and backward add at their peak, with gradients that are made anew."""
    for _ in range(2):
        model.zero_grad()
        peak = measure_peak(lambda: loss(model, *batch).backward()).allocated_peak_bytes
    return peak
