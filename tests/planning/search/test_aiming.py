"""Plans for one budget: how near they are to those of a search for all budgets, and to what is proved."""

from __future__ import annotations

import functools
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphopt.errors import ArgumentError
from graphopt.planning import Frontier, Plan, Problem, find_frontier, plan, simulate
from graphopt.planning.search.aiming import Aim
from graphopt.planning.search.ladder import SMALL, Ladder
from graphopt.planning.search.lower_bound import fewest_seconds_again, quick_bound
from graphopt.planning.search.refinement import Refinement
from graphopt.planning.simulation.schedule import Scheduler
from tests.planning.search.test_refinement import layered
from tests.support.planning_graphs import PUBLISHED_PLANS, published_problem, seeded_problem
from tests.support.properties import examples

pytestmark = pytest.mark.usefixtures("whole_search")

NEAR, SLOWER = 0.005, 0.01
"""Of the problem's seconds: how far from a search for all budgets, and from the plan for fewer bytes, a plan may be."""


def again_within(problem: Problem, budget: int, frontier: Frontier | None = None) -> float:
    """Seconds that the plan for a budget recomputes; by a search for it, or out of a frontier."""
    found = frontier or find_frontier(problem, budget=budget)
    points = (*found, *Refinement(Scheduler(problem), found).around(budget))
    return min((point.again for point in points if point.peak <= budget), default=float("inf"))


def budgets_of(problem: Problem, frontier: Frontier, count: int) -> list[int]:
    low, high = frontier.lowest.peak, plain_peak(problem)
    return [low + (high - low) * number // count for number in range(1, count)]


@functools.cache
def layers(count: int) -> tuple[Problem, Frontier]:
    """A problem, and what a search for all budgets finds."""
    problem = layered(count)
    return problem, find_frontier(problem)


def plain_peak(problem: Problem) -> int:
    return simulate(problem, Plan(tuple(range(len(problem.operations))))).peak


@pytest.mark.parametrize(
    ("problem", "near"),
    [(None, NEAR), (seeded_problem(3, fewest=64, most=64), SLOWER)],
    ids=["layers", "random"],
)
def test_a_plan_for_one_budget_is_as_good_as_one_out_of_all(problem: Problem | None, near: float) -> None:
    """And a larger budget gets no slower plan, but for what is not worth a search."""
    problem, whole = layers(24) if problem is None else (problem, find_frontier(problem))
    assert len(problem.operations) > SMALL
    budgets = budgets_of(problem, whole, 6)
    found = [again_within(problem, budget) for budget in budgets]
    for budget, again in zip(budgets, found, strict=True):
        assert again <= again_within(problem, budget, whole) + near * problem.seconds
    assert all(more <= less + SLOWER * problem.seconds for less, more in pairwise(found))


@given(seed=st.integers(0, 10**6), share=st.floats(0.02, 1.0))
@examples(3)
def test_a_plan_keeps_its_budget_and_the_bounds_are_below_it(seed: int, share: float) -> None:
    problem = seeded_problem(seed, fewest=SMALL + 1, most=SMALL + 20)
    plain = plain_peak(problem)
    budget = problem.resident + int((plain - problem.resident) * share)
    point = find_frontier(problem, budget=budget).within(budget)
    scheduler = Scheduler(problem)
    as_it_is = scheduler.evaluate(frozenset())
    quick = quick_bound(problem, as_it_is, budget)
    assert quick <= fewest_seconds_again(problem, as_it_is, budget) + 1e-9
    if point is not None:
        simulated = scheduler.evaluate(point.drops)
        assert (simulated.peak, simulated.again) == (point.peak, point.again)
        assert point.peak <= budget
        assert quick <= point.again + 1e-9
    if budget >= plain:
        assert point is not None
        assert point.again == 0.0


def test_a_thorough_search_is_never_worse_than_every_method_alone() -> None:
    problem, thorough = layers(21)
    alone = Ladder(Scheduler(problem), lambda: False, lambda share, frontier: None)
    alone.climb()
    for point in alone.frontier:
        better = thorough.within(point.peak)
        assert better is not None
        assert better.again <= point.again


def test_what_is_not_found_by_aiming_is_found_by_every_method(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, whole = layers(24)
    budget = budgets_of(problem, whole, 4)[0]
    monkeypatch.setattr(Aim, "at", lambda *_: float("inf"))
    assert again_within(problem, budget) < float("inf")


def test_a_search_that_is_not_thorough_covers_all_budgets() -> None:
    problem, whole = layers(21)
    quick = find_frontier(problem, thorough=False)
    assert quick.lowest.peak == whole.lowest.peak
    for budget in budgets_of(problem, whole, 6)[1:]:
        assert again_within(problem, budget, quick) <= again_within(problem, budget, whole) + 0.02 * problem.seconds


def test_a_budget_that_only_a_search_for_all_meets_is_met(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, whole = layers(21)
    budget = budgets_of(problem, whole, 4)[0]
    monkeypatch.setattr("graphopt.planning.planner._Search._aim_at", lambda *_: None)
    assert find_frontier(problem, budget=budget).within(budget) is None
    assert plan(problem, budget).peak <= budget


def test_the_same_budget_gets_the_same_plan() -> None:
    problem = layered(24)
    budget = Random(0).randrange(problem.resident, plain_peak(problem))
    one, other = (find_frontier(problem, budget=budget).within(budget) for _ in range(2))
    assert (one and one.drops) == (other and other.drops)


def test_several_budgets_are_looked_for_within_one_limit_of_time() -> None:
    problem = layered(24)
    budgets = budgets_of(problem, layers(24)[1], 4)
    together = find_frontier(problem, budget=budgets)
    for budget in budgets:
        alone = again_within(problem, budget)
        assert again_within(problem, budget, together) <= alone + NEAR * problem.seconds
    late, first = (find_frontier(problem, budget=given, time_limit=0) for given in (budgets, budgets[0]))
    assert late.cut_short == "time limit"
    assert [point.drops for point in late] == [point.drops for point in first]


def test_a_budget_is_a_number_of_bytes() -> None:
    with pytest.raises(ArgumentError, match="find_frontier's budget"):
        find_frontier(layered(2), budget=[100, "8GB"])  # type: ignore[list-item]
    with pytest.raises(ArgumentError, match="find_frontier's budget"):
        find_frontier(layered(2), budget="8GB")  # type: ignore[arg-type]


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["unet", "googlenet", "resnet50", "densenet"])
def test_plans_of_published_graphs_are_as_good(name: str) -> None:
    problem = published_problem(name)
    whole = find_frontier(problem)
    for theirs in PUBLISHED_PLANS[name]:
        mine = again_within(problem, theirs.peak)
        assert mine <= again_within(problem, theirs.peak, whole) + NEAR * problem.seconds
