"""Plans that are derived from one that is known: the same as those that are found from the start."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphopt.planning import Plan, simulate
from graphopt.planning.problem import Problem
from graphopt.planning.simulation import candidates
from graphopt.planning.simulation import schedule as schedule_module
from graphopt.planning.simulation.candidates import repeated_in_front
from graphopt.planning.simulation.edited_bytes import EditedBytes, RunTables
from graphopt.planning.simulation.schedule import Decision, Drops, Scheduler
from graphopt.planning.simulation.step_bytes import ArrayBytes, ListBytes
from graphopt.planning.simulation.step_trace import StepTrace
from graphopt.planning.simulation.stops import Stops
from tests.support.planning_graphs import drops_of, overwriting, problems, seeded_problem
from tests.support.properties import examples


def decisions(problem: Problem) -> st.SearchStrategy[Drops]:
    """Some decisions about a problem: up to a few dozens of them."""
    one = st.builds(
        Decision,
        st.integers(0, len(problem.operations)),
        st.integers(0, len(problem.sizes) - 1),
        st.booleans(),
    )
    return st.frozensets(one, max_size=40)


def derived_steps(trace: StepTrace, drops: Drops) -> list[int] | None:
    derived = trace.derive(drops)
    return None if derived is None else derived.steps()


@given(st.data())
@examples(75)
def test_derived_runs_are_those_from_the_start(data: st.DataObject) -> None:
    problem = data.draw(problems())
    stops = Stops(problem)
    known = data.draw(decisions(problem))
    trace = StepTrace(stops, known)
    assert derived_steps(trace, known) == stops.steps(known)
    for _ in range(3):
        changed = data.draw(st.frozensets(st.sampled_from(sorted(known)), max_size=3)) if known else frozenset()
        drops = known.difference(changed) | data.draw(drops_of(problem))
        found = derived_steps(trace, drops)
        if found is not None:
            assert found == stops.steps(drops)


@given(st.data())
@examples(75)
def test_bytes_of_edited_plans_are_those_of_the_simulator(data: st.DataObject) -> None:
    problem = data.draw(problems())
    if data.draw(st.booleans()):
        problem = overwriting(problem)
    known = data.draw(decisions(problem))
    trace = StepTrace(Stops(problem), known)
    edited = EditedBytes(RunTables(problem), ArrayBytes(problem).lives(trace.steps))
    for _ in range(3):
        changed = data.draw(st.frozensets(st.sampled_from(sorted(known)), max_size=3)) if known else frozenset()
        derived = trace.derive(known.difference(changed) | data.draw(drops_of(problem)))
        if derived is not None:
            expected = simulate(problem, Plan(tuple(derived.steps()))).bytes
            assert edited.of(derived.edits).tolist() == expected
            assert edited.of([edit.trimmed(trace.steps) for edit in derived.edits]).tolist() == expected
    assert edited.of([]).tolist() == simulate(problem, Plan(tuple(trace.steps))).bytes


def random_drops(problem: Problem, draw: Random, count: int) -> Drops:
    moments, values = len(problem.operations), len(problem.sizes)
    return frozenset(
        Decision(draw.randrange(moments), draw.randrange(values), draw.random() < 0.2) for _ in range(count)
    )


def again_in_front(stops: Sequence[tuple[int, Sequence[int]]]) -> list[tuple[int, list[int]]]:
    """Without the stops at which nothing is recomputed."""
    return [(index, list(steps)) for index, steps in stops if steps]


@pytest.mark.sweep(cases=("6",))
@pytest.mark.parametrize("seed", range(12))
def test_a_walk_through_decisions_of_a_large_problem(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As searches do it: a few decisions come or go, and now and then the plan that others are derived from changes."""
    monkeypatch.setattr(schedule_module, "_FEW", 0)
    monkeypatch.setattr(candidates, "_MANY", 1000 if seed % 3 else 3)
    problem = seeded_problem(seed, fewest=40, most=60)
    problem = overwriting(problem) if seed % 2 else problem
    near, stops, draw = Scheduler(problem), Stops(problem), Random(seed)
    current = random_drops(problem, draw, 80)
    derived = 0
    for number in range(60):
        if number % 6 == 0:
            near.stay_near(current)
        gone = draw.sample(sorted(current), draw.randint(0, 3))
        drops = current.difference(gone) | random_drops(problem, draw, draw.randint(0, 4))
        assert near._near is not None
        derived += near._near.candidate(drops) is not None
        found, expected = near.candidate(drops), near.evaluate(drops)
        assert expected == simulate(problem, expected.plan)
        assert list(found.steps) == list(expected.plan.steps) == stops.steps(drops)
        assert (list(found.bytes), found.peak, found.again) == (expected.bytes, expected.peak, expected.again)
        assert found.peak_place == expected.bytes.index(expected.peak)
        assert found.above(found.peak // 2) == sum(max(0, count - found.peak // 2) for count in expected.bytes)
        assert again_in_front(found.stops()) == again_in_front(list(repeated_in_front(expected.plan.steps)))
        current = drops
    assert derived > 50


def test_decisions_that_differ_in_much_are_not_derived() -> None:
    problem = seeded_problem(1, fewest=40, most=60)
    one, other = (random_drops(problem, Random(seed), 40) for seed in (1, 2))
    assert StepTrace(Stops(problem), one).derive(other) is None


@pytest.mark.sweep
@given(st.data())
@examples(30)
def test_lists_and_arrays_give_the_bytes_of_the_simulator(data: st.DataObject) -> None:
    problem = data.draw(problems())
    if data.draw(st.booleans()):
        problem = overwriting(problem)
    plan = Scheduler(problem).evaluate(data.draw(drops_of(problem))).plan
    expected = simulate(problem, plan).bytes
    assert ListBytes(problem)(plan.steps) == expected
    assert ArrayBytes(problem)(plan.steps) == expected
