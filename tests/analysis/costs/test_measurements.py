"""Which measured times are believed: those of a busy machine and those that cannot be are measured again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from graphopt import Program
from graphopt.analysis.costs import cost, figures, measurements
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
    monkeypatch.setattr(measurements, "profile_of", lambda device, cache=True: TOY)
    monkeypatch.setattr(cost, "profile_of", lambda device, cache=True: TOY)
    monkeypatch.setattr(figures, "_fresh", False)
    return use_folder(tmp_path, monkeypatch)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer], list[fx.Node]]:
    """Let measurements give what a function of the call and of how often it was measured gives; lists the calls."""

    def use(answer: Answer) -> list[fx.Node]:
        asked: list[fx.Node] = []

        def measure(node: fx.Node, device: torch.device) -> Figure:
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
    assert asked == [*nodes, nodes[0]]
    assert report.seconds == (1.0, 1.0, 1.0)
    assert (report.runs, report.doubtful, report.remark) == (3, 0, "")
    assert kept(folder)["doubtful"] == {}


def test_the_shorter_time_counts(clock: Callable[[Answer], list[fx.Node]]) -> None:
    (node,) = products(2)
    clock(lambda node, time: [Figure(2.0, True), Figure(3.0)][time - 1])
    assert cost_report([node]).seconds == (2.0,)


def test_what_stays_doubtful_is_marked_and_the_next_process_measures_it(
    clock: Callable[[Answer], list[fx.Node]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = products(*SMALL)
    busy = nodes[1]
    asked = clock(lambda node, time: Figure(4.0, True) if node is busy else Figure(1.0))
    report = cost_report(nodes)
    assert asked.count(busy) > 2
    assert report.seconds == (1.0, 4.0, 1.0)
    assert (report.measured, report.doubtful) == (3, 1)
    assert "1 measured time was taken while the machine had other work" in str(report)
    written = kept(folder)
    assert written["doubtful"] == {"seconds": [call_key(busy)]}
    asked.clear()
    again = cost_report(nodes)
    assert (asked, again.measured, again.cached, again.doubtful) == ([], 0, 3, 1)
    use_changed(folder, lambda data: None, monkeypatch)  # as another process finds it
    clock(lambda node, time: Figure(1.5))
    later = cost_report(nodes)
    assert (later.seconds, later.measured, later.cached, later.doubtful) == ((1.0, 1.5, 1.0), 1, 2, 0)
    assert kept(folder.parent / "changed")["doubtful"] == {}


def test_a_call_that_fails_the_second_time_keeps_its_first_figure(clock: Callable[[Answer], list[fx.Node]]) -> None:
    def answer(node: fx.Node, time: int) -> Figure:
        if time > 1:
            raise RuntimeError("the device is full")
        return Figure(4.0, True)

    (node,) = products(2)
    clock(answer)
    report = cost_report([node])
    assert (report.seconds, report.doubtful) == ((4.0,), 1)


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
    assert asked == [*nodes, nodes[2]]
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
