"""The trade between bytes and time: its table, its data, its chart; and a search that is interrupted."""

from __future__ import annotations

import itertools
import json
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import graphopt
from graphopt.ir.words.written_units import format_seconds
from graphopt.planning import Problem, simulate
from graphopt.planning.frontier import Frontier
from graphopt.planning.planner import find_frontier
from graphopt.planning.simulation.schedule import Scheduler
from graphopt.report.pictures.frontier_chart import BudgetMark, frontier_svg
from graphopt.report.text.frontier_table import FrontierPoint, FrontierReport
from tests.support.planning_graphs import chain, problems
from tests.support.properties import examples

SVG = "{http://www.w3.org/2000/svg}"


@st.composite
def reports(draw: st.DrawFn) -> FrontierReport:
    """Trades of any size: peaks ascend, times descend to that of the unmodified program."""
    peaks = sorted(draw(st.sets(st.integers(1, 10**12), min_size=1, max_size=40)))
    extra = sorted(draw(st.sets(st.floats(1e-6, 50.0), min_size=len(peaks) - 1, max_size=len(peaks) - 1)), reverse=True)
    seconds = draw(st.floats(1e-6, 100.0))
    points = [
        FrontierPoint(peak, more, 1.0 + more / seconds, number)
        for number, (peak, more) in enumerate(zip(peaks, [*extra, 0.0], strict=True))
    ]
    return FrontierReport(
        title=draw(st.text(max_size=20)), stage="step", passes=(), plain_bytes=peaks[-1], resident_bytes=0,
        seconds=seconds, cost="roofline", costs="1 s in 3 calls", cut_short="", smallest_bytes=peaks[0],
        points=tuple(points),
    )  # fmt: skip


def report(**changes: Any) -> FrontierReport:
    """A small one."""
    points = (
        FrontierPoint(40_000_000, 0.2, 1.2, 7),
        FrontierPoint(60_000_000, 0.05, 1.05, 3),
        FrontierPoint(100_000_000, 0.0, 1.0, 0),
    )
    values: dict[str, Any] = {
        "title": "GPT", "stage": "step", "passes": ("recompute{checkpoints=blocks.*}",), "plain_bytes": 100_000_000,
        "resident_bytes": 10_000_000, "seconds": 1.0, "cost": "measured", "costs": "1 s in 3 calls\nby the roofline: x",
        "cut_short": "", "smallest_bytes": 40_000_000, "points": points,
    }  # fmt: skip
    return FrontierReport(**{**values, **changes})


def circles(svg: str, kind: str) -> list[tuple[float, float]]:
    found = [node for node in ET.fromstring(svg).iter(f"{SVG}circle") if node.get("class") == kind]
    return [(float(node.get("cx", "nan")), float(node.get("cy", "nan"))) for node in found]


def titles(svg: str) -> list[str]:
    return [node.text or "" for node in ET.fromstring(svg).iter(f"{SVG}title")]


# --- table and data --------------------------------------------------------------------------------------------------


def test_the_table() -> None:
    assert report().to_text() == (
        "GPT, step stage; passes: recompute{checkpoints=blocks.*}\n"
        "baseline peak        100.0 MB (100000000 bytes), 10.0 MB of it parameters, optimizer state and inputs\n"
        "smallest peak found  40.0 MB (40000000 bytes)\n"
        "baseline time        1 s in 3 calls\n"
        "                     by the roofline: x\n"
        "\n"
        "    peak      bytes  of the peak  recomputed  of the step  ops recomputed\n"
        " 40.0 MB   40000000        40.0%      200 ms        20.0%               7\n"
        " 60.0 MB   60000000        60.0%     50.0 ms         5.0%               3\n"
        "100.0 MB  100000000       100.0%         0 s         0.0%               0\n"
    )


def test_the_table_says_what_it_leaves_out() -> None:
    lines = report().to_text(most=2).splitlines()
    assert [line.split()[2] for line in lines[-3:-1]] == ["40000000", "100000000"]
    assert lines[-1] == "and 1 more plans between these"
    assert "with tensors moved to the host" in report(smallest_bytes=30_000_000).to_text()
    assert "the search ended at its time limit" in report(cut_short="time limit").to_text()


@given(reports(), st.integers(2, 20))
def test_rows_are_the_plans_of_evenly_spread_budgets(found: FrontierReport, most: int) -> None:
    rows = found.spread(most)
    assert len(rows) <= most
    assert (rows[0], rows[-1]) == (found.points[0], found.points[-1])
    assert [point for point in found.points if point in rows] == rows
    low, high = found.points[0].peak_bytes, found.points[-1].peak_bytes
    for number in range(most):
        budget = low + (high - low) * number // (most - 1)
        fits = [point for point in found.points if point.peak_bytes <= budget]
        assert min(fits, key=lambda point: point.extra_seconds) in rows


@given(reports(), st.integers(0, 10**12 + 1))
def test_a_budget_gets_the_fastest_plan_within_it(found: FrontierReport, budget: int) -> None:
    fits = [point for point in found.points if point.peak_bytes <= budget]
    assert found.within(budget) == (min(fits, key=lambda point: point.extra_seconds) if fits else None)


@given(reports())
def test_data_survives_json(found: FrontierReport) -> None:
    data = json.loads(json.dumps(found.to_json()))
    assert data["versions"] == {"graphopt": graphopt.__version__, "torch": str(torch.__version__)}
    points = [(p["peak_bytes"], p["extra_seconds"], p["ratio"], p["runs_again"]) for p in data["frontier"]]
    assert points == [(p.peak_bytes, p.extra_seconds, p.ratio, p.runs_again) for p in found.points]
    assert (data["plain"]["peak_bytes"], data["plain"]["seconds"]) == (found.plain_bytes, found.seconds)
    assert data["smallest_peak_bytes"] == found.smallest_bytes


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"), (2e-9, "0.00200 µs"), (8.386e-6, "8.39 µs"), (9.996e-4, "1.00 ms"), (0.0236, "23.6 ms"),
        (0.1, "100 ms"), (0.9996, "1.00 s"), (1.414, "1.41 s"), (99.96, "100 s"), (4321.0, "4320 s"),
        (-0.002, "-2.00 ms"),
    ],
)  # fmt: skip
def test_seconds_as_people_read_them(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


# --- the chart -------------------------------------------------------------------------------------------------------


@given(reports())
def test_points_are_where_their_numbers_say(found: FrontierReport) -> None:
    svg = frontier_svg(found)
    places = circles(svg, "point")
    assert len(places) == len(found.points)
    told = [text for text in titles(svg) if "ops recomputed" in text]
    for text, point in zip(told, found.points, strict=True):
        assert text.startswith(f"{point.peak_bytes} bytes (")
        assert f"×{point.ratio:.4f}: {format_seconds(point.extra_seconds)} more" in text
        assert text.endswith(f", {point.runs_again} ops recomputed")
    (x0, y0), (x1, y1) = places[0], places[-1]
    first, last = found.points[0], found.points[-1]
    for (x, y), point in zip(places, found.points, strict=True):
        across = (point.peak_bytes - first.peak_bytes) / max(last.peak_bytes - first.peak_bytes, 1)
        up = (first.ratio - point.ratio) / max(first.ratio - last.ratio, 1e-300)
        assert x == pytest.approx(x0 + across * (x1 - x0), abs=0.02)
        assert y == pytest.approx(y0 + up * (y1 - y0), abs=0.02)
    root = ET.fromstring(svg)
    width, height = float(root.get("width", "nan")), float(root.get("height", "nan"))
    assert all(0 < x < width and 0 < y < height for x, y in places)


def test_the_line_is_level_from_one_plan_to_the_next() -> None:
    svg = frontier_svg(report())
    (path,) = [node.get("d", "") for node in ET.fromstring(svg).iter(f"{SVG}path") if node.get("class") == "line"]
    start, *moves = path.split()
    x, y = (float(number) for number in start[1:].split(","))
    corners = [(x, y)]
    for move in moves:
        x, y = (float(move[1:]), y) if move[0] == "H" else (x, float(move[1:]))
        corners.append((x, y))
    places = circles(svg, "point")
    assert corners[::2][: len(places)] == places
    for corner, before, after in zip(corners[1::2], places, places[1:], strict=False):
        assert corner == (after[0], before[1])
    assert corners[-1][1] == places[-1][1]


def texts(svg: str) -> list[str]:
    return [node.text or "" for node in ET.fromstring(svg).iter(f"{SVG}text")]


def test_axes_and_marks_have_units() -> None:
    shown = texts(frontier_svg(report()))
    for text in (
        "GPT, step stage: peak memory against time",
        "budget: peak memory in MB",
        "time of a step (× baseline)",
        "baseline: 100.0 MB",
        "smallest peak found: 40.0 MB",
        *("×1.00", "×1.20", "40", "60", "80", "100"),
    ):
        assert text in shown
    assert any(text.startswith("passes: recompute{checkpoints=blocks.*}; 3 plans; ") for text in shown)
    assert any("interrupted" in text for text in texts(frontier_svg(report(cut_short="interrupted"))))


def test_one_plan_alone() -> None:
    (plan,) = report().points[-1:]
    svg = frontier_svg(report(points=(plan,), smallest_bytes=plan.peak_bytes))
    assert len(circles(svg, "point")) == 1
    assert "baseline: 100.0 MB" in texts(svg)
    assert not any(text.startswith("smallest") for text in texts(svg))


def test_budgets_are_marked_with_their_plans() -> None:
    found = report()
    moved = FrontierPoint(30_000_000, 0.3, 1.3, 9)
    marks = [
        BudgetMark("70%", 70_000_000, found.points[1]),
        BudgetMark("auto", 10**12, found.points[2]),
        BudgetMark("1kB", 1000, None),
        BudgetMark("31MB", 31_000_000, moved),
    ]
    svg = frontier_svg(found, marks)
    assert {"70%", "▸ auto", "◂ 1kB", "31MB"} <= set(texts(svg))
    told = [text for text in titles(svg) if text.startswith("budget ")]
    assert told[0].startswith("budget 70%, 70000000 bytes: 60000000 bytes (60.0 MB), ×1.0500")
    assert told[2] == "budget 1kB, 1000 bytes: no plan was found within it"
    chosen, points = circles(svg, "chosen"), circles(svg, "point")
    assert chosen[:2] == [points[1], points[2]]
    assert chosen[2][0] < points[0][0]
    assert chosen[2][1] < points[0][1]


def test_names_of_budgets_do_not_cover_each_other() -> None:
    found = report()
    marks = [BudgetMark(f"{size} bytes", size, found.points[1]) for size in range(70_000_000, 70_000_006)]
    root = ET.fromstring(frontier_svg(found, marks))
    rows = [node.get("y") for node in root.iter(f"{SVG}text") if node.get("class") == "budget-text"]
    assert len(set(rows)) == len(marks)


def test_the_file_is_safe_and_needs_nothing_else() -> None:
    nasty = '<script>alert("&")</script>\x00\ud800'
    svg = frontier_svg(report(title=nasty, passes=(nasty,)), [BudgetMark(nasty, 50_000_000, None)])
    root = ET.fromstring(svg)
    assert {node.tag.removeprefix(SVG) for node in root.iter()} <= {
        "svg", "title", "style", "rect", "text", "g", "line", "path", "circle",
    }  # fmt: skip
    assert any(text.startswith('<script>alert("&")</script>') for text in titles(svg))
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")
    assert "prefers-color-scheme:dark" in svg


# --- an interrupted search -------------------------------------------------------------------------------------------


class InterruptedAt:
    """Raises KeyboardInterrupt at a line of the planner, as a signal may."""

    def __init__(self, line: int) -> None:
        self.left = line
        self.fired = False

    def __call__(self, frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        if self.fired or "planning" not in frame.f_code.co_filename:
            return None
        if event == "line":
            self.left -= 1
            if self.left < 0:
                self.fired = True
                raise KeyboardInterrupt
        return self


@pytest.mark.sweep
@examples(25)
@given(problems(fewest=3, most=6), st.integers(0, 20_000))
def test_an_interrupted_search_keeps_what_it_has(problem: Problem, line: int) -> None:
    interrupt, before = InterruptedAt(line), sys.gettrace()
    sys.settrace(interrupt)
    try:
        frontier = find_frontier(problem, time_limit=0.5, interruptible=True)
    except KeyboardInterrupt:
        assert line < 2000  # nothing had been found
        return
    finally:
        sys.settrace(before)
    if interrupt.fired:
        assert frontier.cut_short == "interrupted"
    scheduler = Scheduler(problem)
    points = list(frontier)
    assert points
    for point in points:
        simulated = simulate(problem, scheduler.evaluate(point.drops).plan)
        assert simulated.peak == point.peak
        assert simulated.again == pytest.approx(point.again)
    assert all(a.peak < b.peak and a.again > b.again for a, b in itertools.pairwise(points))
    assert frontier.within(points[0].peak) is points[0]


def test_an_interrupt_ends_the_program_unless_the_search_may_keep_it() -> None:
    def progress(share: float, frontier: Frontier) -> None:
        if len(frontier) > 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        find_frontier(chain(6), progress=progress)
    kept = find_frontier(chain(6), progress=progress, interruptible=True)
    assert kept.cut_short == "interrupted"
    assert len(kept) > 1
    assert find_frontier(chain(3)).cut_short == ""
