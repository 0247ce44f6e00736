"""When copies start and end: they never raise the peak, and what the computation waits for them is counted."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphopt.planning.simulation.idle import Touches
from graphopt.planning.simulation.schedule import Scheduler
from graphopt.planning.transfers.copies import Copy, CopyOptions, Window, schedule_copies
from graphopt.planning.transfers.offloading import Lanes, moved_away
from tests.support.planning_graphs import seeded_problem
from tests.support.properties import examples


@dataclass(frozen=True)
class Case:
    """A computation in which values wait: the bytes alive are without these values while they wait."""

    seconds: tuple[float, ...]
    alive: tuple[int, ...]
    copies: tuple[Copy, ...]
    rate: float

    def windows(self, **options: Any) -> list[Window]:
        copying = CopyOptions(out=self.rate, back=self.rate, **options)
        return schedule_copies(self.seconds, self.alive, self.copies, copying)

    def level(self, windows: list[Window]) -> list[int]:
        """Bytes alive with the values in the device's memory outside of their windows."""
        level = list(self.alive)
        for copy, window in zip(self.copies, windows, strict=True):
            for step in (*range(copy.last + 1, window.freed), *range(window.fetched, copy.needed)):
                level[step] += copy.bytes
        return level

    def waited(self, windows: list[Window]) -> float:
        """How much longer everything takes, played step by step."""
        now, done, lanes = 0.0, dict[tuple[int, str], float](), {"out": 0.0, "back": 0.0}

        def start(index: int, lane: str) -> None:
            lanes[lane] = max(lanes[lane], now) + self.copies[index].bytes / self.rate
            done[index, lane] = lanes[lane]

        for step, duration in enumerate(self.seconds):
            for index in [i for i, window in enumerate(windows) if window.freed == step]:
                now = max(now, done[index, "out"])
            for index in [i for i, window in enumerate(windows) if window.fetched == step]:
                start(index, "back")
            for index in [i for i, copy in enumerate(self.copies) if copy.needed == step]:
                now = max(now, done[index, "back"])
            now += duration
            for index in [i for i, copy in enumerate(self.copies) if copy.made == step]:
                start(index, "out")
        return now - sum(self.seconds)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    count = draw(st.integers(4, 24))
    seconds = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=count, max_size=count))
    alive = draw(st.lists(st.integers(0, 200), min_size=count, max_size=count))
    copies = []
    for _ in range(draw(st.integers(0, 6))):
        made = draw(st.integers(0, count - 3))
        last = draw(st.integers(made, count - 3))
        needed = draw(st.integers(last + 2, count - 1))
        size = draw(st.integers(1, 60))
        copies.append(Copy(size, made, last, needed))
        for step in (*range(made, last + 1), *range(needed, count)):
            alive[step] += size
    return Case(tuple(seconds), tuple(alive), tuple(copies), draw(st.sampled_from([1.0, 20.0, 300.0, 1e12])))


@given(cases())
@examples(100)
def test_copies_never_raise_the_peak_and_waiting_is_counted(case: Case) -> None:
    windows = case.windows()
    for copy, window in zip(case.copies, windows, strict=True):
        assert copy.last < window.freed <= window.fetched <= copy.needed
    assert max(case.level(windows)) == max(case.alive)
    assert sum(window.late for window in windows) == pytest.approx(case.waited(windows))


@given(cases(), st.integers(0, 3))
@examples(40)
def test_a_number_of_copies_ahead(case: Case, ahead: int) -> None:
    """Copies away end in time for the peak that fetching so far ahead has in any case."""
    windows = case.windows(ahead=ahead)
    order = sorted(range(len(case.copies)), key=lambda index: case.copies[index].needed)
    at_once = list(windows)
    for place, index in enumerate(order):
        copy, window = case.copies[index], windows[index]
        wanted = case.copies[order[place - ahead]].needed if place >= ahead else 0
        assert copy.last < window.freed <= window.fetched == max(wanted, window.freed) <= copy.needed
        at_once[index] = Window(copy.last + 1, max(wanted, copy.last + 1), 0.0)
    assert max(case.level(windows)) <= max(case.level(at_once))
    assert sum(window.late for window in windows) == pytest.approx(case.waited(windows))


@given(cases(), st.integers(3, 20))
@examples(40)
def test_no_copy_ends_or_starts_across_a_boundary(case: Case, boundary: int) -> None:
    copies = tuple(copy for copy in case.copies if copy.last < boundary < copy.needed)
    kept = [copy for copy in case.copies if copy not in copies]
    assert len(kept) + len(copies) == len(case.copies)
    parted = Case(case.seconds, case.alive, copies, case.rate)
    windows = parted.windows(boundary=boundary)
    for window in windows:
        assert window.freed <= boundary < window.fetched
    assert max(parted.level(windows)) == max(parted.alive)


def test_over_a_fast_link_nothing_waits() -> None:
    case = Case((1.0,) * 8, (10,) * 8, (Copy(4, 0, 1, 6), Copy(4, 1, 2, 5)), 1e12)
    assert [window.freed for window in case.windows()] == [2, 3]
    assert sum(window.late for window in case.windows()) < 1e-10


def test_the_computation_waits_where_a_late_copy_would_raise_the_peak() -> None:
    """The copy takes 10 seconds; at step 3 there is no room for its value, before that there is."""
    alive = (8, 8, 2, 10, 2, 2, 2, 2)
    (window,) = Case((1.0,) * 8, alive, (Copy(8, 0, 1, 7),), 0.8).windows()
    assert window.freed == 3
    assert (
        window.late == 8.0 + 7.0
    )  # until 11; and the copy back, for which there is room from step 4 on, from 15 to 22
    (roomy,) = Case((1.0,) * 8, (18, *alive[1:]), (Copy(8, 0, 1, 7),), 0.8).windows()
    assert roomy.freed == 7


# --- plans with values offloaded ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [1.0, 30.0, 1e12])
@pytest.mark.parametrize("seed", range(0, 40, 4))
def test_plans_with_values_moved_away_peak_lower_than_without(seed: int, rate: float) -> None:
    problem = seeded_problem(seed)
    scheduler = Scheduler(problem)
    plain = scheduler.evaluate(frozenset())
    lanes = Lanes(rate, rate, 10**9, 1, [True] * len(problem.sizes))
    found = moved_away(scheduler, plain, lanes)
    peaks = [plain.peak, *(moved.peak for moved in found)]
    assert peaks == sorted(set(peaks), reverse=True)
    for moved in found:
        case = Case(
            tuple(problem.operations[step].seconds for step in plain.plan.steps),
            tuple(_without(plain.bytes, [item.copy for item in moved.away])),
            tuple(item.copy for item in moved.away),
            rate,
        )
        windows = [item.window for item in moved.away]
        assert case.level(windows) == moved.bytes
        assert moved.peak == max(moved.bytes) == max(case.alive)
        assert moved.late == pytest.approx(case.waited(windows))


def _without(alive: list[int], copies: list[Copy]) -> list[int]:
    change = [0] * (len(alive) + 1)
    for copy in copies:
        change[copy.last + 1] -= copy.bytes
        change[copy.needed] += copy.bytes
    return [count + gone for count, gone in zip(alive, accumulate(change), strict=False)]


def test_no_more_is_moved_than_there_is_room_for() -> None:
    problem = seeded_problem(8)
    scheduler = Scheduler(problem)
    plain = scheduler.evaluate(frozenset())
    assert Touches(scheduler, plain.plan.steps).values
    for room in (0, 10, 10**9):
        lanes = Lanes(1e12, 1e12, room, 1, [True] * len(problem.sizes))
        for moved in moved_away(scheduler, plain, lanes):
            assert sum(item.copy.bytes for item in moved.away) <= room
