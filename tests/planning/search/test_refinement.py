"""Plans between two of a frontier, that a budget between them asks for."""

from __future__ import annotations

from random import Random

import pytest

from graphopt.planning import Frontier, Operation, Plan, Point, Problem, plan, simulate
from graphopt.planning.planner import find_frontier
from graphopt.planning.search.refinement import Refinement
from graphopt.planning.simulation.schedule import Decision, Scheduler
from tests.support.planning_graphs import seeded_problem


def layered(layers: int) -> Problem:
    """Layers whose inner value is cheap to make again and waits for backward, of random sizes."""
    draw = Random(layers)
    forward, backward, sizes = [], [], []
    for layer in range(layers):
        forward.append(Operation((2 * layer - 1,) if layer else (), (2 * layer,), 1.0 + layer % 3))
        forward.append(Operation((2 * layer,), (2 * layer + 1,), 5.0))
        sizes += [100 + draw.randrange(50), 10]
    gradient = 2 * layers - 1
    for layer in reversed(range(layers)):
        backward.append(Operation((2 * layer, gradient), (len(sizes),), 2.0))
        gradient = len(sizes)
        sizes.append(10)
    return Problem((*forward, *backward), tuple(sizes), boundary=2 * layers)


PROBLEM = layered(24)


def ends(problem: Problem) -> Frontier:
    """A frontier of two plans only: nothing is dropped, and every inner value is."""
    scheduler, frontier = Scheduler(problem), Frontier()
    inner = [2 * layer for layer in range(problem.boundary // 2)]
    for drops in (frozenset(), frozenset(Decision(value + 2, value) for value in inner)):
        frontier.offer(drops, scheduler.evaluate(drops))
    assert len(frontier) == 2
    return frontier


def fastest(frontier: Frontier, found: list[Point], budget: int) -> Point:
    return min((point for point in (*frontier, *found) if point.peak <= budget), key=lambda point: point.again)


def test_a_budget_between_two_plans_is_used() -> None:
    frontier, scheduler = ends(PROBLEM), Scheduler(PROBLEM)
    lower, upper = frontier
    refinement = Refinement(scheduler, frontier)
    for budget in range(lower.peak, upper.peak, 97):
        point = fastest(frontier, refinement.around(budget), budget)
        simulated = scheduler.evaluate(point.drops)
        assert (point.peak, point.again) == (simulated.peak, simulated.again)
        assert budget - point.peak <= 160  # the largest inner value, and the gradients beside it
        assert upper.again <= point.again <= lower.again
    assert len(frontier) == 2


def test_it_does_not_matter_what_was_asked_for_before() -> None:
    frontier = ends(PROBLEM)
    budgets = list(range(frontier.lowest.peak, max(point.peak for point in frontier), 201))
    known = Refinement(Scheduler(PROBLEM), frontier)
    ascending = [fastest(frontier, known.around(budget), budget).again for budget in budgets]
    assert ascending == sorted(ascending, reverse=True)
    for budget, again in zip(budgets, ascending, strict=True):
        assert fastest(frontier, Refinement(Scheduler(PROBLEM), frontier).around(budget), budget).again == again


def test_outside_of_the_frontier_there_is_nothing_between() -> None:
    frontier = ends(PROBLEM)
    lower, upper = frontier
    refinement = Refinement(Scheduler(PROBLEM), frontier)
    assert refinement.around(lower.peak - 1) == refinement.around(upper.peak) == []
    assert refinement.around(upper.peak - 1)
    frontier.cut_short = "time limit"
    assert refinement.around(upper.peak - 1) == []


@pytest.mark.sweep(but=("0",))
@pytest.mark.parametrize("seed", range(3))
def test_more_bytes_never_get_a_slower_plan(seed: int) -> None:
    problem = seeded_problem(seed, fewest=18, most=20)
    frontier = find_frontier(problem)
    budgets = sorted(Random(seed).randint(frontier.lowest.peak, max(p.peak for p in frontier)) for _ in range(8))
    found = [plan(problem, budget) for budget in budgets]
    assert all(each.peak <= budget for each, budget in zip(found, budgets, strict=True))
    assert all(simulate(problem, Plan(each.plan.steps)) == each for each in found)
    seconds = [each.seconds for each in found]
    assert seconds == sorted(seconds, reverse=True)
