"""Which measured times are believed, and how long measuring may take; times that cannot be are measured again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import fx

from graphopt import Program
from graphopt.analysis.costs import calibration, figures, measurements
from graphopt.analysis.costs.cost import cost_report
from graphopt.analysis.costs.figures import Figure
from graphopt.analysis.costs.isolated_call import call_key
from graphopt.analysis.costs.plausibility import outliers, shortest_possible
from graphopt.analysis.costs.roofline import roofline_seconds
from tests.support.costs import TOY, call, kept, small_program, use_changed, use_folder

aten = torch.ops.aten

Answer = Callable[[fx.Node, int], Figure]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(calibration, "profile_of", lambda device, cache, dtypes: TOY)
    monkeypatch.setattr(figures, "_fresh", False)
    monkeypatch.setattr(measurements, "LEAST", 1000.0)
    return use_folder(tmp_path, monkeypatch)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer], list[fx.Node]]:
    """Let measurements give what a function of the call and of how often it was measured gives; lists the calls."""

    def use(answer: Answer) -> list[fx.Node]:
        asked: list[fx.Node] = []

        def measure(node: fx.Node, device: torch.device, longest: float) -> Figure:
            asked.append(node)
            return answer(node, asked.count(node))

        monkeypatch.setattr(measurements, "measured_seconds", measure)
        return asked

    return use


def products(*sizes: int) -> list[fx.Node]:
    """Calls of ``mm`` on square matrices of these sizes."""
    program = small_program()
    return [call(aten.mm.default, torch.empty(n, n), torch.empty(n, n), program=program) for n in sizes]


SMALL = (2, 3, 4)


def test_what_was_disturbed_is_measured_again_once_all_others_are_there(
    clock: Callable[[Answer], list[fx.Node]], folder: Path
) -> None:
    nodes = products(*SMALL)
    asked = clock(lambda node, time: Figure(4.0, True) if (node, time) == (nodes[0], 1) else Figure(1.0))
    report = cost_report(nodes)
    assert asked == [*nodes[::-1], nodes[0]]  # the largest share first
    assert report.seconds == (1.0, 1.0, 1.0)
    assert (report.runs, report.doubtful, report.remark) == (3, 0, "")
    assert kept(folder)["doubtful"] == {}


def test_the_shorter_time_counts(clock: Callable[[Answer], list[fx.Node]]) -> None:
    (node,) = products(2)
    clock(lambda node, time: [Figure(2.0, True), Figure(3.0)][time - 1])
    assert cost_report([node]).seconds == (2.0,)


def test_what_stays_doubtful_is_estimated_and_the_next_process_measures_it(
    clock: Callable[[Answer], list[fx.Node]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = products(*SMALL)
    busy = nodes[1]
    asked = clock(lambda node, time: Figure(4.0, True) if node is busy else Figure(1.0))
    report = cost_report(nodes)
    assert asked.count(busy) > 2
    ratio = median(1.0 / roofline_seconds(node, TOY) for node in (nodes[0], nodes[2]))
    assert report.seconds == (1.0, pytest.approx(ratio * roofline_seconds(busy, TOY)), 1.0)
    assert (report.measured, report.estimated, report.doubtful) == (2, 1, 1)
    assert report.share == pytest.approx(1 / 3, rel=0.01)
    assert "33.3% of all seconds: 1 could only be measured while the machine had other work" in str(report)
    written = kept(folder)
    assert written["doubtful"] == {"seconds": [call_key(busy)]}
    asked.clear()
    again = cost_report(nodes)
    assert (asked, again.measured, again.cached, again.doubtful) == ([], 0, 2, 1)
    use_changed(folder, lambda data: None, monkeypatch)  # as another process finds it
    clock(lambda node, time: Figure(1.5))
    later = cost_report(nodes)
    assert (later.seconds, later.measured, later.cached, later.doubtful) == ((1.0, 1.5, 1.0), 1, 2, 0)
    assert kept(folder.parent / "changed")["doubtful"] == {}


def test_a_call_that_fails_the_second_time_keeps_its_first_figure(
    clock: Callable[[Answer], list[fx.Node]], folder: Path
) -> None:
    def answer(node: fx.Node, time: int) -> Figure:
        if time > 1:
            raise RuntimeError("the device is full")
        return Figure(4.0, True)

    (node,) = products(2)
    clock(answer)
    report = cost_report([node])
    assert (report.seconds, report.doubtful) == ((roofline_seconds(node, TOY),), 1)
    (figure,) = kept(folder)["seconds"].values()
    assert figure == 4.0


# --- how long it may take ---------------------------------------------------------------------------------------------


class Clocks:
    """Those of the wall and of the process, which stand until they are moved."""

    def __init__(self) -> None:
        self.wall = self.process = 0.0

    def perf_counter(self) -> float:
        return self.wall

    def process_time(self) -> float:
        return self.process


def pointwise(*sizes: int) -> list[fx.Node]:
    """Calls of ``add`` on vectors of these sizes."""
    program = small_program()
    return [call(aten.add.Tensor, torch.empty(n), torch.empty(n), program=program) for n in sizes]


@pytest.mark.parametrize("which", ["wall", "process"])
def test_measuring_ends_when_its_time_is_over_and_the_ratio_of_what_was_measured_holds_for_the_rest(
    which: str, clock: Callable[[Answer], list[fx.Node]], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    clocks = Clocks()
    fast = dataclasses.replace(TOY, memory_bandwidth=1e10, overhead=1e-6)
    monkeypatch.setattr(measurements, "time", clocks)
    monkeypatch.setattr(calibration, "profile_of", lambda device, cache, dtypes: fast)
    monkeypatch.setattr(measurements, "LEAST", 0.5)
    nodes = pointwise(300_000, 500_000, 400_000, 600_000)

    def answer(node: fx.Node, time: int) -> Figure:
        setattr(clocks, which, getattr(clocks, which) + 0.3)
        return Figure(3 * roofline_seconds(node, fast))

    asked = clock(answer)
    report = cost_report(nodes)
    assert asked == [nodes[3], nodes[1]]
    assert report.seconds == pytest.approx([3 * roofline_seconds(node, fast) for node in nodes])
    assert (report.measured, report.estimated, report.late, report.doubtful) == (2, 2, 2, 0)
    assert report.share == pytest.approx(7 / 18, rel=0.01)
    assert "the times of 2 distinct ops are estimated by the roofline, 38.9% of all seconds: 2 would have" in str(
        report
    )
    assert cost_report(nodes).seconds == report.seconds  # and takes no time again
    assert asked == [nodes[3], nodes[1]]
    use_changed(folder, lambda data: None, monkeypatch)  # the next process goes on
    again = cost_report(nodes)
    assert (asked[2:], again.late) == ([nodes[2], nodes[0]], 0)


def test_each_call_may_take_its_share_of_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def measure(node: fx.Node, device: torch.device, longest: float) -> Figure:
        given.append(longest)
        return Figure(1.0)

    monkeypatch.setattr(measurements, "time", Clocks())
    monkeypatch.setattr(measurements, "measured_seconds", measure)
    cost_report(products(2, 2, 2, 300))
    small, large = (roofline_seconds(node, TOY) for node in products(2, 300))
    whole = 1000.0 + 0.05 * (3 * small + large)
    assert given == pytest.approx([whole * 3 * small / (3 * small + large), whole])


# --- what the device can do ------------------------------------------------------------------------------------------

LARGE = 512


def test_a_time_that_cannot_be_is_measured_again(clock: Callable[[Answer], list[fx.Node]], folder: Path) -> None:
    nodes = products(LARGE, 2)
    clock(lambda node, time: Figure(1e-6 if (node, time) == (nodes[0], 1) else 0.5))
    report = cost_report(nodes)
    assert report.seconds == (0.5, 0.5)
    assert not report.reasons
    assert set(kept(folder)["seconds"].values()) == {0.5}


def test_the_roofline_stands_for_a_time_that_cannot_be(clock: Callable[[Answer], list[fx.Node]], folder: Path) -> None:
    nodes = products(LARGE, 2)
    clock(lambda node, time: Figure(1e-6))
    report = cost_report(nodes, profile=TOY)
    assert report.seconds == (roofline_seconds(nodes[0], TOY), 1e-6)
    assert (report.measured, report.estimated) == (1, 1)
    assert report.reasons == {"mm": "1.00 µs is less than this device can take"}
    assert list(kept(folder)["seconds"]) == [call_key(nodes[1])]


def test_a_time_in_the_file_that_cannot_be_is_measured_again(
    clock: Callable[[Answer], list[fx.Node]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = products(LARGE, 2)
    clock(lambda node, time: Figure(0.5))
    cost_report(nodes)

    def poison(data: Any) -> None:
        data["seconds"] = dict.fromkeys(data["seconds"], 1e-9)

    use_changed(folder, poison, monkeypatch)
    report = cost_report(nodes)
    assert report.seconds == (0.5, 1e-9)
    assert (report.measured, report.cached) == (1, 1)


def test_a_call_far_slower_than_its_like_is_measured_again(clock: Callable[[Answer], list[fx.Node]]) -> None:
    program: Program = small_program()
    nodes = [
        call(aten.add.Tensor, torch.empty(n), torch.empty(n), program=program) for n in (200_000, 300_000, 400_000)
    ]
    usual = [roofline_seconds(node, TOY) for node in nodes]
    asked = clock(lambda node, time: Figure(usual[nodes.index(node)] * (100 if (node, time) == (nodes[2], 1) else 2)))
    report = cost_report(nodes)
    assert asked == [*nodes[::-1], nodes[2]]
    assert report.seconds == tuple(2 * seconds for seconds in usual)
    slow = {nodes[0]: 2 * usual[0], nodes[1]: 2 * usual[1], nodes[2]: 100 * usual[2]}
    assert outliers(slow, [TOY] * 3) == {nodes[2]}
    assert outliers({node: slow[node] for node in nodes[1:]}, [TOY] * 2) == set()  # of two, neither is the rule


def test_the_shortest_time_that_is_possible() -> None:
    (product,) = products(LARGE)
    add = call(aten.add.Tensor, torch.empty(10**6), torch.empty(10**6))
    look_up = call(aten.embedding.default, torch.empty(10**5, 10), torch.zeros(4, dtype=torch.int64))
    assert shortest_possible(product, TOY) == pytest.approx(2 * LARGE**3 / 1e9 / 16)
    assert shortest_possible(add, TOY) == pytest.approx(12e6 / 1e6 / 64)
    assert shortest_possible(look_up, TOY) == 0.0
