"""What every plan recomputes at least: never above what an exact search finds, and near what the planner finds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphopt.planning.planner import find_frontier
from graphopt.planning.problem import Operation, Problem, simulate
from graphopt.planning.search import lower_bound
from graphopt.planning.search.lower_bound import fewest_seconds_again
from graphopt.planning.simulation.schedule import Scheduler
from tests.support.planning_graphs import (
    PUBLISHED_PLANS,
    Exhaustive,
    chain,
    overwriting,
    problems,
    published_problem,
    seeded_problem,
)
from tests.support.properties import examples

pytestmark = pytest.mark.usefixtures("whole_search")


def bound(problem: Problem, budget: int) -> float:
    return fewest_seconds_again(problem, Scheduler(problem).evaluate(frozenset()), budget)


@given(problem=problems(fewest=2, most=5), share=st.floats(0, 1))
@examples(15)
def test_it_is_never_above_the_best_of_all_plans(problem: Problem, share: float) -> None:
    plain = Scheduler(problem).evaluate(frozenset())
    budget = problem.resident + int((plain.peak - problem.resident) * (0.4 + 0.6 * share))
    best = Exhaustive(problem, budget).search()
    least = bound(problem, budget)
    assert least >= 0.0
    assert best is None or least <= simulate(problem, best).again + 1e-9


@pytest.mark.sweep
@given(seed=st.integers(0, 10**6))
@examples(6)
def test_it_is_never_above_a_plan_that_overwrites(seed: int) -> None:
    problem = overwriting(seeded_problem(seed, fewest=6, most=14))
    frontier = find_frontier(problem)
    for point in [*frontier][:: max(1, len(frontier) // 6)]:
        assert bound(problem, point.peak) <= point.again + 1e-9


def test_the_program_as_it_is_asks_for_nothing_and_no_bytes_are_impossible() -> None:
    problem = seeded_problem(7, fewest=12, most=12)
    plain = Scheduler(problem).evaluate(frozenset()).peak
    assert bound(problem, plain) == 0.0
    assert bound(problem, problem.resident) == math.inf


def test_what_does_not_fit_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a whole, or by linear programming alone, for large programs, in part."""
    first, second = Operation((), (0,), 1.0), Operation((0,), (1,), 5.0)
    backward = Operation((1,), (2,), 1.0, repeatable=False), Operation((2, 0), (3,), 1.0, repeatable=False)
    problem = Problem((first, second, *backward), sizes=(80, 100, 10, 10), boundary=2)
    assert bound(problem, 190) == 0.0
    assert bound(problem, 189) == bound(problem, 180) == pytest.approx(1.0, rel=1e-4)
    assert bound(problem, 179) == math.inf
    monkeypatch.setattr(lower_bound, "_SOLVABLE", 3)
    assert bound(problem, 190) == 0.0
    assert bound(problem, 189) == pytest.approx(1 / 80, rel=1e-4)
    assert bound(problem, 180) == pytest.approx(10 / 80, rel=1e-4)


def test_what_no_plan_can_do_is_known() -> None:
    assert bound(chain(6, sizes=[10] * 6), 9) == math.inf


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "most"), [("unet", 1e-6), ("googlenet", 0.002), ("resnet50", 0.1)])
def test_plans_of_published_graphs_are_near(name: str, most: float) -> None:
    problem = published_problem(name)
    theirs = PUBLISHED_PLANS[name][0]
    point = find_frontier(problem).within(theirs.peak)
    assert point is not None
    least = bound(problem, theirs.peak)
    assert 0 < least <= point.again
    assert (problem.seconds + point.again) / (problem.seconds + least) - 1 <= most
