"""When copies of tensors that reside elsewhere start and end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphopt.planning.transfers.swapping import Visit, VisitWindow, schedule_visits, seconds_waited
from tests.support.properties import examples

STEPS = 12


@st.composite
def computations(draw: st.DrawFn) -> tuple[list[float], list[int], list[Visit]]:
    """Seconds and bytes of each step, with some visits, whose bytes are in those of their steps."""
    seconds = draw(st.lists(st.floats(0, 2), min_size=STEPS, max_size=STEPS))
    alive = draw(st.lists(st.integers(0, 20), min_size=STEPS, max_size=STEPS))
    visits = []
    for _ in range(draw(st.integers(0, 6))):
        first = draw(st.integers(0, STEPS - 1))
        last = draw(st.integers(first, min(first + 2, STEPS - 1)))
        visit = Visit(draw(st.integers(1, 9)), first, last, draw(st.booleans()), draw(st.integers(0, first)))
        visits.append(visit)
        for step in range(first, last + 1):
            alive[step] += visit.bytes
    return seconds, alive, visits


def levels(alive: list[int], visits: list[Visit], windows: list[VisitWindow]) -> list[int]:
    found = list(alive)
    for visit, window in zip(visits, windows, strict=True):
        for step in [*range(window.fetched, visit.first), *range(visit.last + 1, window.freed)]:
            found[step] += visit.bytes
    return found


@given(given_=computations(), rate=st.floats(0.1, 100), limit=st.integers(0, 200))
@examples(200)
def test_copies_raise_no_peak_above_the_limit(
    given_: tuple[list[float], list[int], list[Visit]], rate: float, limit: int
) -> None:
    seconds, alive, visits = given_
    windows = schedule_visits(seconds, alive, visits, rate, limit=limit)
    assert max(levels(alive, visits, windows)) <= max(limit, *alive)
    for visit, window in zip(visits, windows, strict=True):
        assert visit.earliest <= window.fetched <= visit.first
        assert visit.last < window.freed <= STEPS
        assert visit.writes or window.freed == visit.last + 1


@given(given_=computations(), rate=st.floats(0.1, 100))
@examples(100)
def test_the_computation_waits_no_longer_than_for_one_copy_after_the_other(
    given_: tuple[list[float], list[int], list[Visit]], rate: float
) -> None:
    seconds, alive, visits = given_
    windows = schedule_visits(seconds, alive, visits, rate)
    waited = seconds_waited(seconds, visits, windows, rate)
    copies = sum(visit.bytes * (1 + visit.writes) for visit in visits) / rate
    assert -1e-9 <= waited <= copies + 1e-6
    at_once = [VisitWindow(visit.first, visit.last + 1) for visit in visits]
    assert seconds_waited(seconds, visits, at_once, rate) == pytest.approx(copies)


def test_with_room_and_time_nothing_waits() -> None:
    seconds, alive = [1.0] * STEPS, [100, *[0] * (STEPS - 1)]
    visits = [Visit(2, 5, 5, writes=True), Visit(2, 8, 8, writes=True)]
    windows = schedule_visits(seconds, alive, visits, 6.0)
    assert seconds_waited(seconds, visits, windows, 6.0) == 0
    assert [window.fetched < 5 for window in windows] == [True, False]


def test_without_room_each_copy_comes_at_its_call() -> None:
    visits = [Visit(2, 5, 5, writes=True), Visit(2, 8, 8, writes=True)]
    windows = schedule_visits([1.0] * STEPS, [7] * STEPS, visits, 2.0)
    assert windows == [VisitWindow(5, 6), VisitWindow(8, 9)]
    assert seconds_waited([1.0] * STEPS, visits, windows, 2.0) == pytest.approx(4.0)


def test_a_limit_above_the_peak_is_room() -> None:
    visits = [Visit(2, 5, 5, writes=False), Visit(2, 8, 8, writes=False)]
    without, with_room = (schedule_visits([1.0] * STEPS, [7] * STEPS, visits, 2.0, limit=limit) for limit in (0, 11))
    assert [window.fetched for window in without] == [5, 8]
    assert seconds_waited([1.0] * STEPS, visits, with_room, 2.0) == 0


def test_a_number_of_copies_ahead() -> None:
    visits = [Visit(1, step, step, writes=True) for step in (2, 4, 6, 8)]
    windows = schedule_visits([1.0] * STEPS, [3] * STEPS, visits, 1.0, ahead=1)
    assert windows == [VisitWindow(0, 4), VisitWindow(2, 6), VisitWindow(4, 8), VisitWindow(6, STEPS)]
    assert [w.fetched for w in schedule_visits([1.0] * STEPS, [3] * STEPS, visits, 1.0, ahead=0)] == [2, 4, 6, 8]
