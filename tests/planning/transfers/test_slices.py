"""A batch in slices: one of them is planned, and each does what it has to."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from graphopt.planning import Operation, Problem, find_frontier, simulate
from graphopt.planning.frontier import Frontier
from graphopt.planning.simulation.schedule import Decision, Scheduler
from graphopt.planning.transfers.slices import OfSlice, SlicedPlans
from tests.support.planning_graphs import problems, seeded_problem
from tests.support.properties import examples


def sliced(problem: Problem, count: int, sums: int = 0) -> tuple[Problem, list[OfSlice | None]]:
    """A problem several times in a row; each time, what it leaves behind is added to what was left before.

    Args:
        problem: of one slice.
        count: how many times.
        sums: bytes that each slice leaves behind.
    """
    operations: list[Operation] = []
    sizes: list[int] = []
    held: dict[int, int] = {}
    slices: list[OfSlice | None] = []
    end = count * (len(problem.operations) + 1)
    total: tuple[int, ...] = ()
    for number in range(count):
        first, at = len(sizes), len(operations)

        def moved(values: tuple[int, ...], first: int = first) -> tuple[int, ...]:
            return tuple(value + first for value in values)

        for index, operation in enumerate(problem.operations):
            again = None if operation.remakes is None else moved(operation.remakes)
            operations.append(
                replace(
                    operation,
                    reads=moved(operation.reads),
                    makes=moved(operation.makes),
                    remakes=again,
                    overwrites=moved(operation.overwrites),
                )
            )
            slices.append(OfSlice(number, (operation.name, index), index < problem.boundary))
        sizes += problem.sizes
        held |= {value + first: min(until + at, at + len(problem.operations)) for value, until in problem.held.items()}
        operations.append(Operation(total, (len(sizes),), 0.0, repeatable=False, name="sum"))
        slices.append(None)
        total = (len(sizes),)
        sizes.append(sums)
    held[total[0]] = end
    whole = Problem(tuple(operations), tuple(sizes), resident=problem.resident, held=held, boundary=problem.boundary)
    return whole, slices


def test_the_part_is_the_slice_that_takes_most() -> None:
    problem = seeded_problem(3, fewest=8, most=12)
    whole, slices = sliced(problem, 3, sums=50)
    plans = SlicedPlans(Scheduler(whole), slices)
    assert plans.count == 3
    assert plans.number > 0  # with what slices before it have left
    size = len(problem.operations) + 1
    assert plans.span == (plans.number * size, plans.number * size + problem.boundary, (plans.number + 1) * size - 1)
    assert len(plans.part.operations) == len(problem.operations) + 1
    plain = Scheduler(whole).evaluate(frozenset()).bytes[plans.span.start : plans.span.stop]
    assert Scheduler(plans.part).evaluate(frozenset()).bytes[1:] == plain


@given(problem=problems(fewest=3, most=8), count=st.integers(2, 4), sums=st.integers(0, 40))
@examples(30)
def test_plans_of_a_slice_are_plans_of_all(problem: Problem, count: int, sums: int) -> None:
    whole, slices = sliced(problem, count, sums)
    scheduler = Scheduler(whole)
    plans = SlicedPlans(scheduler, slices)
    found = find_frontier(plans.part)
    frontier = plans.frontier(found)
    plain = scheduler.evaluate(frozenset())
    points = list(frontier)
    assert points[-1].again == 0.0
    assert points[-1].peak == plain.peak
    for point in points:
        simulated = simulate(whole, scheduler.evaluate(point.drops).plan)
        assert (simulated.peak, simulated.again) == (point.peak, point.again)
        best = found.within(point.peak)
        if best is not None:  # no slice runs more again than the one that takes most has to
            assert point.again <= count * best.again * (1 + 1e-12)
    if sums == 0:  # all slices are alike
        assert frontier.lowest.peak <= found.lowest.peak


def test_a_slice_with_more_room_runs_less_again() -> None:
    """The first slice has nothing of others beside it."""
    chain = [Operation((i - 1,) if i else (), (i,), 1.0, name=f"f{i}") for i in range(6)]
    back = [Operation((5 - i, *((5 + i,) if i else ())), (6 + i,), 2.0, repeatable=False) for i in range(6)]
    problem = Problem((*chain, *back), (100,) * 6 + (10,) * 6, boundary=6)
    whole, slices = sliced(problem, 3, sums=200)
    scheduler = Scheduler(whole)
    plans = SlicedPlans(scheduler, slices)
    frontier = plans.frontier(find_frontier(plans.part))
    point = frontier.within(scheduler.evaluate(frozenset()).peak - 1)
    assert point is not None
    repeats = scheduler.evaluate(point.drops).plan.repeats()
    size = len(problem.operations) + 1
    runs = [sum(step // size == number for step in repeats) for number in range(3)]
    assert runs[0] == 0
    assert runs[1] == runs[2] > 0


def test_plans_between_neighbours_are_found_for_all_slices() -> None:
    whole, slices = sliced(seeded_problem(11, fewest=40, most=40), 2, sums=10)
    scheduler = Scheduler(whole)
    plans = SlicedPlans(scheduler, slices)
    frontier = plans.frontier(find_frontier(plans.part))
    budgets = range(frontier.lowest.peak, scheduler.evaluate(frozenset()).peak)
    found = [point for budget in budgets for point in plans.around(budget)]
    assert {(point.peak, point.again) for point in found} == {
        (simulated.peak, simulated.again) for point in found for simulated in [scheduler.evaluate(point.drops)]
    }
    seconds = [min(p.again for p in (*frontier, *plans.around(budget)) if p.peak <= budget) for budget in budgets]
    assert seconds == sorted(seconds, reverse=True)


def with_losses(count: int, layers: int) -> tuple[Problem, list[OfSlice | None]]:
    """Slices of layers with a loss: the loss of the first one is the sum that later slices add theirs to."""
    operations: list[Operation] = []
    sizes: list[int] = []
    slices: list[OfSlice | None] = []

    def run(number: int, of: str, reads: tuple[int, ...], size: int, forward: bool = False) -> int:
        operations.append(Operation(reads, (len(sizes),), 1.0, repeatable=forward, name=f"{of} of {number}"))
        slices.append(OfSlice(number, (of, 0), forward))
        sizes.append(size)
        return len(sizes) - 1

    total = -1
    for number in range(count):
        made: list[int] = []
        for layer in range(layers):
            made.append(run(number, f"layer {layer}", tuple(made[-1:]), 100, forward=True))
        loss = run(number, "loss", (made[-1],), 1, forward=True)
        total = loss if total < 0 else run(number, "sum", (total, loss), 1, forward=True)
        gradient = run(number, "gradient", (made[-1],), 100)
        for layer in reversed(range(layers)):
            gradient = run(number, f"gradient {layer}", (gradient, made[layer]), 100)
    held = {total: len(operations)}
    return Problem(tuple(operations), tuple(sizes), held=held, boundary=layers), slices


@given(count=st.integers(2, 4), layers=st.integers(2, 8))
@examples(10)
def test_what_another_slice_reads_is_not_made_again_there(count: int, layers: int) -> None:
    whole, slices = with_losses(count, layers)
    scheduler = Scheduler(whole)
    plans = SlicedPlans(scheduler, slices)
    part = Scheduler(plans.part)
    of = {operation.name: index for index, operation in enumerate(plans.part.operations)}
    dropped = {  # behind its sum, nothing in the slice that is planned reads its loss any more
        Decision(of[f"gradient of {plans.number}"], plans.part.operations[of[f"{name} of {plans.number}"]].makes[0])
        for name in ("layer 0", "loss")
    }
    found = Frontier()
    found.offer(frozenset(dropped), part.evaluate(dropped))
    (point, _) = plans.frontier(found)
    repeats = scheduler.evaluate(point.drops).plan.repeats()
    assert {whole.operations[step].name for step in repeats} == {f"layer 0 of {number}" for number in range(count)}
