"""The shortest of several runs, and how other work on the machine is noticed: with clocks that are made up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace

import pytest
import torch

from graphopt.analysis.costs import timing
from graphopt.analysis.costs.figures import Figure
from graphopt.analysis.costs.timing import FEWEST, RUNS, Lap, lap, shortest_seconds

CPU = torch.device("cpu")


def nothing() -> None:
    """What takes no time."""


@pytest.fixture
def laps(monkeypatch: pytest.MonkeyPatch) -> Callable[[Iterable[Lap]], list[Lap]]:
    """Let runs take given times from now on; gives those that were asked for."""

    def use(given: Iterable[Lap]) -> list[Lap]:
        waiting: Iterator[Lap] = iter(given)
        used: list[Lap] = []

        def take(run: Callable[[], object]) -> Lap:
            used.append(next(waiting))
            return used[-1]

        monkeypatch.setattr(timing, "lap", take)
        return used

    return use


def quiet(*seconds: float) -> list[Lap]:
    return [Lap(taken, False) for taken in seconds]


def test_slow_runs_among_others_do_not_count(laps: Callable[[Iterable[Lap]], list[Lap]]) -> None:
    used = laps(quiet(0.005, 0.004, 0.001, 0.0011, 0.004, 0.0012, 0.004))
    assert shortest_seconds(nothing, CPU) == Figure(0.001)
    assert len(used) == RUNS


def test_disturbed_runs_are_repeated(laps: Callable[[Iterable[Lap]], list[Lap]]) -> None:
    used = laps([Lap(0.004, True), *quiet(0.001), Lap(0.004, True), *quiet(*[0.002] * RUNS)])
    assert shortest_seconds(nothing, CPU) == Figure(0.001)
    assert len(used) == RUNS + 2


def test_a_figure_without_an_undisturbed_run_is_doubtful_and_has_an_end(
    laps: Callable[[Iterable[Lap]], list[Lap]],
) -> None:
    used = laps(Lap(1e-4 + max(index, 1) * 1e-6, True) for index in range(1000))
    assert shortest_seconds(nothing, CPU) == Figure(1e-4 + 1e-6, doubtful=True)
    assert RUNS < len(used) < 100


def test_one_undisturbed_run_is_enough(laps: Callable[[Iterable[Lap]], list[Lap]]) -> None:
    laps([*(Lap(0.03, True) for _ in range(3)), *quiet(0.02), *(Lap(0.03, True) for _ in range(1000))])
    assert shortest_seconds(nothing, CPU) == Figure(0.02)


@pytest.mark.parametrize(("seconds", "runs"), [(1.0, 1), (0.1, 2), (0.04, FEWEST), (0.008, RUNS), (0.001, 1 + RUNS)])
def test_long_runs_are_few(seconds: float, runs: int, laps: Callable[[Iterable[Lap]], list[Lap]]) -> None:
    """The first run of what takes long counts as well."""
    used = laps(quiet(*[seconds] * 20))
    assert shortest_seconds(nothing, CPU) == Figure(seconds)
    assert len(used) == runs


def test_no_run_begins_after_the_time_that_is_given(laps: Callable[[Iterable[Lap]], list[Lap]]) -> None:
    used = laps(quiet(*[0.01] * 20))
    assert shortest_seconds(nothing, CPU, longest=0.015) == Figure(0.01)
    assert len(used) == 2


def test_one_thread_is_timed_by_its_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """What others have the processor for is no part of it."""
    machine = Machine(0.001, 0.004, 1)
    machine.install(monkeypatch, 1)
    assert lap(machine.run) == Lap(pytest.approx(0.001), False)  # type: ignore[arg-type]


class Machine:
    """Clocks of a machine on which a run takes some time, waits some, and is made to leave the processor."""

    def __init__(self, worked: float, waited: float, switches: int) -> None:
        self.worked, self.waited, self.switches = worked, waited, switches
        self.wall = self.cpu = 0.0
        self.left = 0

    def run(self) -> None:
        self.wall += self.worked + self.waited
        self.cpu += self.worked
        self.left += self.switches

    def install(self, monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
        clocks = SimpleNamespace(perf_counter=lambda: self.wall, thread_time=lambda: self.cpu)
        usage = SimpleNamespace(RUSAGE_SELF=0, getrusage=lambda who: SimpleNamespace(ru_nivcsw=self.left))
        monkeypatch.setattr(timing, "time", clocks)
        monkeypatch.setattr(timing, "resource", usage)
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)


@pytest.mark.parametrize(
    ("machine", "threads", "disturbed"),
    [
        (Machine(0.001, 0.0, 0), 2, False),
        (Machine(0.2, 0.004, 1), 2, False),  # two per cent
        (Machine(0.001, 0.004, 0), 2, False),  # the main thread waits for the other ones
        (Machine(0.001, 0.004, 1), 2, True),
        (Machine(0.2, 0.0, 1), 2, False),
        (Machine(0.2, 0.0, 5), 2, True),
    ],
)
def test_a_run_that_lost_the_processor_is_disturbed(
    machine: Machine, threads: int, disturbed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.install(monkeypatch, threads)
    assert lap(machine.run) == Lap(pytest.approx(machine.worked + machine.waited), disturbed)  # type: ignore[arg-type]


def test_a_busy_machine_gives_the_time_of_the_run_that_it_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(0.001, 0.004, 1)
    machine.install(monkeypatch, 2)
    runs = 0

    def run() -> None:
        nonlocal runs
        runs += 1
        machine.waited, machine.switches = (0.0, 0) if runs == 5 else (0.004, 1)
        machine.run()

    found = shortest_seconds(run, CPU)
    assert (found.value, found.doubtful) == (pytest.approx(0.001), False)
