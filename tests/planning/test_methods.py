"""The planner's methods on plain data: schedules and their bytes, segments, lower sets, chains, and optimal plans."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import combinations
from math import comb
from typing import Literal, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphopt.errors import GraphoptError
from graphopt.planning import InvalidPlanError, Operation, Plan, Problem, Simulated, simulate
from graphopt.planning.planner import InfeasibleError, find_frontier, plan
from graphopt.planning.search.chain import chain_plans
from graphopt.planning.search.lowersets import MOST_EXACT, LowerSets, lower_set_plans
from graphopt.planning.search.milp import optimum, smallest_peak
from graphopt.planning.search.segments import Forward, narrow_places, square_root_segments
from graphopt.planning.simulation.schedule import Decision, Drops, Scheduler
from tests.support.covering import some_of
from tests.support.planning_graphs import (
    PUBLISHED,
    PUBLISHED_PLANS,
    Exhaustive,
    chain,
    drops_of,
    overwriting,
    problems,
    published_problem,
    seeded_problem,
)
from tests.support.properties import examples

pytestmark = pytest.mark.usefixtures("whole_search")

Method = Callable[[Scheduler, int], Iterator[Drops]]

METHODS: dict[str, Method] = {
    "segments": lambda scheduler, budget: square_root_segments(scheduler),
    "lower sets, time": lambda scheduler, budget: lower_set_plans(scheduler, budget),
    "lower sets, memory": lambda scheduler, budget: lower_set_plans(scheduler, budget, objective="memory"),
    "all lower sets, time": lambda scheduler, budget: lower_set_plans(scheduler, budget, exact=True),
    "all lower sets, memory": lambda scheduler, budget: lower_set_plans(
        scheduler, budget, exact=True, objective="memory"
    ),
    "chain": chain_plans,
}
each_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())


def plain(problem: Problem) -> Simulated:
    return simulate(problem, Plan(tuple(range(len(problem.operations)))))


def everything(problem: Problem, budget: int) -> list[Simulated]:
    """The plans of all methods."""
    scheduler = Scheduler(problem)
    found = [scheduler.evaluate(drops) for method in METHODS.values() for drops in method(scheduler, budget)]
    return [scheduler.evaluate(()), *found]


def fastest(plans: Iterable[Simulated], budget: int) -> float | None:
    return min((found.again for found in plans if found.peak <= budget), default=None)


# --- schedules -------------------------------------------------------------------------------------------------------


@given(st.data())
@examples(60)
def test_decisions_become_a_valid_plan_that_is_measured_as_it_is_simulated(data: st.DataObject) -> None:
    problem = data.draw(problems())
    if data.draw(st.booleans()):
        problem = overwriting(problem)
    measured = Scheduler(problem).evaluate(data.draw(drops_of(problem)))
    assert measured == simulate(problem, measured.plan)
    assert measured.seconds == problem.seconds + measured.again


def test_a_result_takes_the_place_of_what_dies_there() -> None:
    sizes, forward = (10, 10, 1), [Operation((), (0,), 1.0), Operation((0,), (1,), 1.0, overwrites=(0,))]
    dies = Problem((*forward, Operation((1,), (2,), 1.0)), sizes, boundary=2)
    lives = Problem((*forward, Operation((0, 1), (2,), 1.0)), sizes, boundary=2)
    assert Scheduler(dies).evaluate(()).bytes == [10, 10, 11]
    assert Scheduler(lives).evaluate(()).bytes == [10, 20, 21]
    dropped = Scheduler(dies).evaluate(
        [Decision(2, 0), Decision(2, 1)]
    )  # both recomputed: the second over what the first made again
    assert dropped.plan.steps == (0, 1, 0, 1, 2)
    assert dropped.bytes == [10, 10, 10, 10, 11]
    kept = Scheduler(lives).evaluate(
        [Decision(2, 1)]
    )  # what is made by a first run is not overwritten by one that is recomputed
    assert kept.plan.steps == (0, 1, 1, 2)
    assert kept.bytes == [10, 20, 20, 21]


def reading(*reads: tuple[int, ...]) -> Problem:
    """Operations that read these values and make one value each."""
    made = [Operation(values, (index,), 1.0, name=f"op{index}") for index, values in enumerate(reads)]
    return Problem(tuple(made), (1,) * len(reads))


LINE = reading((), (0,), (1,))


@pytest.mark.parametrize(
    ("problem", "steps", "message"),
    [
        (LINE, (1, 0, 2), r"step 0 runs operation 1 \(op1\) before value 0 is made"),
        (LINE, (0, 1), r"operation 2 \(op2\) never runs"),
        (LINE, (0, 0, 1), r"operation 2 \(op2\) never runs"),
        (reading((), ()), (1, 0), r"runs operation 1 \(op1\) where operation 0 \(op0\) is due"),
        (
            Problem((Operation((), (0,), 1.0, repeatable=False), Operation((0,), (1,), 1.0)), (1, 1)),
            (0, 0, 1),
            r"step 1 runs operation 0 \(unnamed\) again, and it may run once only",
        ),
        (
            Problem((Operation((), (0,), 1.0), Operation((0,), (1,), 1.0)), (1, 1), held={0: 2}),
            (0, 1, 0),
            "again, and it may run once only",
        ),
    ],
    ids=["too early", "missing", "only again", "order", "not repeatable", "held"],
)
def test_a_plan_that_cannot_run_is_refused(problem: Problem, steps: tuple[int, ...], message: str) -> None:
    with pytest.raises(InvalidPlanError, match=message):
        simulate(problem, Plan(steps))


@pytest.mark.sweep(but=("segments", "all lower sets, memory", "chain"))
@each_method
@given(problem=problems(most=7), share=st.floats(0.3, 1.0))
@examples(10)
def test_every_method_gives_valid_plans_and_the_same_ones_again(method: Method, problem: Problem, share: float) -> None:
    scheduler = Scheduler(problem)
    budget = int(share * plain(problem).peak)
    first = list(method(scheduler, budget))
    assert first == list(method(Scheduler(problem), budget))
    assert len(first) == len(set(first)) < 100
    for drops in first:
        assert all(scheduler.droppable[decision.value] for decision in drops)
        simulate(problem, scheduler.evaluate(drops).plan)


@each_method
@pytest.mark.parametrize(
    "problem",
    [
        Problem((), ()),
        Problem((Operation((), (0,), 0.0),), (0,)),
        Problem((Operation((), (0,), 1.0, repeatable=False), Operation((0,), (1,), 1.0)), (3, 2), boundary=1),
    ],
    ids=["empty", "one", "nothing may be recomputed"],
)
def test_problems_without_a_choice_have_nothing_to_run_again(method: Method, problem: Problem) -> None:
    scheduler = Scheduler(problem)
    assert all(scheduler.evaluate(drops).again == 0 for drops in method(scheduler, 100))


# --- segments --------------------------------------------------------------------------------------------------------


def test_segments_of_a_chain_take_about_the_square_root_of_its_bytes() -> None:
    problem = chain(100)
    scheduler = Scheduler(problem)
    best = min((scheduler.evaluate(drops) for drops in square_root_segments(scheduler)), key=lambda found: found.peak)
    assert plain(problem).peak == 101
    assert best.peak <= 2 * 10 + 4
    assert best.again <= 100


def test_segments_end_where_few_bytes_cross() -> None:
    # 0 -> (1, 2, 3 all read later by 4) -> 4 -> (5, 6, 7 read by 8) -> 8
    reads = [(), (0,), (0, 1), (0, 2), (1, 2, 3), (4,), (4, 5), (4, 6), (5, 6, 7)]
    forward = [Operation(r, (index,), 1.0) for index, r in enumerate(reads)]
    loss = Operation((*range(9),), (9,), 1.0)
    problem = Problem((*forward, loss), (1,) * 10, boundary=9)
    crossing = Forward(Scheduler(problem)).crossing_bytes()
    assert crossing == [0, 1, 2, 3, 3, 1, 2, 3, 3, 0]
    assert narrow_places(crossing) == [5]


def test_without_a_boundary_the_place_with_the_most_bytes_is_taken() -> None:
    bounded = chain(12)
    problem = Problem(bounded.operations, bounded.sizes)
    forward = Forward(Scheduler(problem))
    assert forward.boundary == plain(problem).bytes.index(plain(problem).peak)
    assert min(found.peak for found in everything(problem, 8)) <= 8


# --- lower sets ------------------------------------------------------------------------------------------------------


def estimates(problem: Problem, budget: float) -> list[float]:
    """Seconds again of every sequence of lower sets within a budget, by the definitions of the paper, one by one."""
    count, makers = problem.boundary, problem.makers
    scheduler = Scheduler(problem)
    sources = [{makers[v] for v in operation.reads} for operation in problem.operations[:count]]
    subsets = (frozenset(some) for size in range(count + 1) for some in combinations(range(count), size))
    family = [some for some in subsets if all(sources[index] <= some for index in some)]
    later = {v for operation in problem.operations[count:] for v in operation.reads}
    used = {v for operation in problem.operations for v in operation.reads}

    def total(of: Iterable[int]) -> int:
        return sum(problem.sizes[v] for index in of for v in problem.operations[index].makes)

    def border(inside: frozenset[int]) -> set[int]:
        made = {v for index in inside for v in problem.operations[index].makes}
        crossing = {v for index in range(count) if index not in inside for v in problem.operations[index].reads}
        return made & (crossing | {v for v in later if not scheduler.droppable[v]})

    found: list[float] = []

    def grow(inside: frozenset[int], carried: int, again: float) -> None:
        if len(inside) == count:
            found.append(again)
            return
        for larger in family:
            segment = larger - inside
            if not inside < larger:
                continue
            after = {index for index in range(count) if index not in larger and sources[index] & larger}
            beside = {source for index in after for source in sources[index]} - larger
            if carried + 2 * total(segment) + total(after) + total(beside) > budget:
                continue
            kept = {v for v in border(larger) if makers[v] in segment}
            rerun = {makers[v] for v in used - border(larger) if makers[v] in segment and scheduler.droppable[v]}
            seconds = sum(problem.operations[index].seconds for index in rerun) if len(larger) < count else 0.0
            grow(larger, carried + sum(problem.sizes[v] for v in kept), again + seconds)

    grow(frozenset(), 0, 0.0)
    return found


@pytest.mark.parametrize("seed", range(12))
def test_sequences_of_all_lower_sets_are_the_best_of_all_sequences(seed: int) -> None:
    problem = seeded_problem(seed, fewest=3, most=5)
    sets = LowerSets(Forward(Scheduler(problem)), exact=True)
    lowest, highest = sets.smallest_budget(), sets.largest_budget()
    assert estimates(problem, lowest)
    assert not estimates(problem, lowest * 0.99 - 1)
    for budget in (lowest, (lowest + highest) / 2, highest):
        known = estimates(problem, budget)
        rounding = problem.boundary * sum(operation.seconds for operation in problem.operations) / 96
        shortest, longest = sets.best(budget, "time"), sets.best(budget, "memory")
        assert shortest is not None
        assert longest is not None
        assert shortest.again == pytest.approx(min(known), abs=rounding)
        assert longest.again == pytest.approx(max(known), abs=rounding)


@pytest.mark.parametrize("seed", range(20))
def test_all_lower_sets_are_at_least_as_good_as_the_approximate_family(seed: int) -> None:
    forward = Forward(Scheduler(seeded_problem(seed, fewest=6, most=10, plain=True)))
    exact, family = LowerSets(forward, exact=True), LowerSets(forward)
    assert exact.smallest_budget() <= family.smallest_budget() * 1.01
    tick = sum(forward.scheduler.seconds[: forward.boundary]) / 96
    for budget in (family.smallest_budget(), family.largest_budget()):
        approximate, best = family.best(budget), exact.best(budget)
        assert approximate is not None
        assert best is not None
        assert best.again <= approximate.again + forward.boundary * tick


def test_more_lower_sets_than_can_be_compared_are_refused() -> None:
    branches = [Operation((), (index,), 1.0) for index in range(12)]
    join = Operation(tuple(range(12)), (12,), 1.0)
    problem = Problem((*branches, join), (1,) * 13, boundary=12)
    assert MOST_EXACT < 2**12
    with pytest.raises(GraphoptError, match=rf"12 operations of forward have more than {MOST_EXACT} lower sets"):
        list(lower_set_plans(Scheduler(problem), 10, exact=True))
    assert list(lower_set_plans(Scheduler(problem), 10))


# --- chains ----------------------------------------------------------------------------------------------------------


def fewest_again(length: int, budget: int) -> int:
    """Runs again in a uniform chain: the binomial law of Griewank and Walther's revolve (2000).

    ``budget - 1`` operations need none; of the others, ``comb(r + budget - 2, budget - 3)`` cost r runs each.
    """
    again, left, runs = 0, length - (budget - 1), 1
    while left > 0:
        some = min(left, comb(runs + budget - 2, budget - 3))
        again, left, runs = again + some * runs, left - some, runs + 1
    return again


@pytest.mark.sweep(but=("8-budgets0",))
@pytest.mark.parametrize(("length", "budgets"), [(8, range(3, 10)), (20, range(3, 22, 3)), (60, (3, 5, 23, 55))])
def test_uniform_chains_run_as_little_again_as_is_known_to_be_possible(length: int, budgets: Iterable[int]) -> None:
    problem = chain(length)
    scheduler = Scheduler(problem)
    for budget in budgets:
        plans = [scheduler.evaluate(drops) for drops in chain_plans(scheduler, budget)]
        assert fastest([*plans, scheduler.evaluate(())], budget) == fewest_again(length, budget)


@pytest.mark.sweep
def test_the_binomial_law_is_the_optimum_of_the_integer_program() -> None:
    for length in range(3, 9):
        assert smallest_peak(chain(length)) == 3
        for budget in range(3, length + 2):
            best = optimum(chain(length), budget)
            assert best is not None
            assert simulate(chain(length), best).again == fewest_again(length, budget)


def test_a_deep_chain_runs_stages_many_times_where_memory_is_tight() -> None:
    problem = chain(40)
    scheduler = Scheduler(problem)
    lowest = min((scheduler.evaluate(drops) for drops in chain_plans(scheduler, 4)), key=lambda found: found.peak)
    repeats = lowest.plan.repeats()
    assert lowest.peak <= 4
    assert max(repeats.count(step) for step in set(repeats)) > 5


def test_a_chain_that_cannot_fit_gives_no_plans() -> None:
    scheduler = Scheduler(chain(10))
    assert not list(chain_plans(scheduler, 0))
    assert not list(chain_plans(scheduler, 1))


@pytest.mark.sweep
def test_stages_of_different_bytes_and_seconds_come_close_to_the_optimum() -> None:
    problem = chain(8, sizes=[3, 1, 6, 2, 5, 2, 4, 1], seconds=[2.0, 9.0, 1.0, 4.0, 3.0, 8.0, 1.0, 5.0])
    scheduler = Scheduler(problem)
    for budget in range(smallest_peak(problem) + 1, plain(problem).peak + 1):
        best = optimum(problem, budget)
        assert best is not None
        plans = [scheduler.evaluate(drops) for drops in chain_plans(scheduler, budget)]
        found = fastest([*plans, scheduler.evaluate(())], budget)
        assert found is not None
        assert simulate(problem, best).again <= found <= 1.5 * simulate(problem, best).again


# --- optimal plans ---------------------------------------------------------------------------------------------------


@pytest.mark.sweep(but=("9", "10", "240", "273"))
@pytest.mark.parametrize("seed", [5, 6, 8, 9, 10, 11, 12, 13, 19, 240, 273])
def test_the_integer_program_is_as_good_as_every_possible_plan(seed: int) -> None:
    problem = seeded_problem(seed, fewest=3, most=5)
    least = smallest_peak(problem, sweeps=3)
    assert Exhaustive(problem, least - 1).search() is None
    assert optimum(problem, least - 1, sweeps=3) is None
    for budget in sorted({least, (2 * least + plain(problem).peak) // 3}):
        best, known = optimum(problem, budget, sweeps=3), Exhaustive(problem, budget).search()
        assert best is not None
        assert known is not None
        assert simulate(problem, best).peak <= budget
        assert simulate(problem, best).again == simulate(problem, known).again


def test_a_second_sweep_allows_another_order_between_two_first_runs() -> None:
    problem = seeded_problem(273, fewest=3, most=5)
    assert (smallest_peak(problem), smallest_peak(problem, sweeps=2)) == (78, 72)


@pytest.mark.sweep(but=("0", "3"))
@pytest.mark.parametrize("seed", range(8))
def test_no_method_is_better_than_the_optimum(seed: int) -> None:
    problem = seeded_problem(seed, fewest=4, most=8)
    least, most = smallest_peak(problem, sweeps=2), plain(problem).peak
    for budget in sorted({least, (least + most) // 2}):
        found = everything(problem, budget)
        assert min(one.peak for one in found) >= least
        best = optimum(problem, budget, sweeps=2)
        assert best is not None
        fast = fastest(found, budget)
        assert fast is None or fast >= simulate(problem, best).again


def test_bytes_of_real_sizes_stay_exact() -> None:
    problem = chain(7, sizes=[2**30 + 4, 3 * 2**28, 2**30 - 12, 2**29, 2**30, 2**28 + 4, 2**29])
    least = smallest_peak(problem)
    assert optimum(problem, least - 2**12) is None
    best = optimum(problem, least)
    assert best is not None
    assert simulate(problem, best).peak == least


def test_a_problem_without_choice_has_its_own_order_as_optimum() -> None:
    problem = Problem((Operation((), (0,), 1.0, repeatable=False), Operation((0,), (1,), 1.0)), (3, 2), resident=1)
    assert smallest_peak(problem) == 6
    assert optimum(problem, 6) == Plan((0, 1))
    assert optimum(problem, 5) is None


def test_a_search_for_the_optimum_that_is_stopped_says_so() -> None:
    with pytest.raises(TimeoutError, match=r"no proof within 0.001 s for 24 operations .* give more time"):
        optimum(seeded_problem(2), 112, time_limit=0.001)


# --- published plans -------------------------------------------------------------------------------------------------


@pytest.mark.sweep(but=("unet",))
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_plans_are_met_in_bytes_with_fewer_seconds_again(name: str) -> None:
    problem = published_problem(name)
    scheduler = Scheduler(problem)
    forward = sum(operation.seconds for operation in problem.operations[: problem.boundary])
    for theirs in PUBLISHED_PLANS[name]:
        found = fastest((scheduler.evaluate(drops) for drops in chain_plans(scheduler, theirs.peak)), theirs.peak)
        assert found is not None
        assert found / forward < theirs.again


@pytest.mark.sweep(but=("time",))
@pytest.mark.parametrize("objective", ["time", "memory"])
def test_lower_sets_of_a_published_graph_reach_what_the_authors_reach(objective: Literal["time", "memory"]) -> None:
    problem = published_problem("resnet50")
    scheduler = Scheduler(problem)
    theirs = PUBLISHED_PLANS["resnet50"][objective == "time"]
    forward = sum(operation.seconds for operation in problem.operations[: problem.boundary])
    plans = lower_set_plans(scheduler, theirs.peak, objective=objective)
    found = fastest(map(scheduler.evaluate, plans), theirs.peak)
    assert found is not None
    assert found / forward <= theirs.again


class Reached(NamedTuple):
    """What the planner reaches on a published graph: forward's share that is recomputed at the authors' lowest peak at
    most, and the lowest peak at most."""

    again: float
    lowest_peak: int


REACHED = {
    "resnet50": Reached(0.31, 616_000_000),
    "unet": Reached(0.21, 2_838_000_000),
    "googlenet": Reached(0.055, 362_000_000),
    "densenet": Reached(0.22, 729_000_000),
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", some_of(PUBLISHED, "resnet50"))
def test_the_planner_runs_less_again_than_the_published_plans_within_their_bytes(name: str) -> None:
    problem = published_problem(name)
    forward = sum(operation.seconds for operation in problem.operations[: problem.boundary])
    frontier = find_frontier(problem)
    for theirs in PUBLISHED_PLANS[name]:
        point = frontier.within(theirs.peak)
        assert point is not None
        assert point.again / forward < theirs.again
        assert simulate(problem, Scheduler(problem).evaluate(point.drops).plan).peak <= theirs.peak
    point = frontier.within(PUBLISHED_PLANS[name][0].peak)
    assert point is not None
    assert point.again / forward <= REACHED[name].again
    assert frontier.lowest.peak <= REACHED[name].lowest_peak


@pytest.mark.sweep(but=("5",))
@pytest.mark.parametrize("seed", [2, 5])
def test_plans_of_small_graphs_keep_their_budget_and_are_optimal(seed: int) -> None:
    problem = seeded_problem(seed)
    least = smallest_peak(problem)
    budget = (least + plain(problem).peak) // 2
    best = optimum(problem, budget)
    assert best is not None
    found = plan(problem, budget)
    assert simulate(problem, found.plan) == found
    assert found.peak <= budget
    assert found.again == simulate(problem, best).again


def test_a_budget_below_the_smallest_peak_is_refused_with_the_smallest_plan() -> None:
    problem = seeded_problem(8, fewest=3, most=5)
    least = smallest_peak(problem)
    with pytest.raises(
        InfeasibleError, match=rf"no plan fits into {least - 1} bytes; .* takes {least} bytes"
    ) as caught:
        plan(problem, least - 1)
    assert caught.value.smallest.peak == least
