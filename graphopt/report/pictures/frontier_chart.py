"""The trade between peak bytes and time as a picture: one self-contained SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from graphopt.ir.words.written_units import counted, format_bytes, format_seconds
from graphopt.report.console.escape import safe
from graphopt.report.pictures.chart import (
    LEFT,
    LETTER,
    PLOT_HEIGHT,
    RIGHT,
    STYLE,
    UNITS,
    WIDTH,
    Axis,
    anchor_at,
    fit,
    stroke,
    svg_text,
)
from graphopt.report.text.frontier_table import FrontierPoint, FrontierReport

__all__ = ["BudgetMark", "frontier_svg"]

_HEAD = 78.0
"""Room for the title and what is known of the program."""
_ROW = 17.0
"""Height of a row of the budgets' names."""


@dataclass(frozen=True, slots=True)
class BudgetMark:
    """A budget to mark in the chart.

    Attributes:
        name: how the user wrote it.
        bytes: how many they are.
        point: the plan that it gets; None where none was found.
    """

    name: str
    bytes: int
    point: FrontierPoint | None


def frontier_svg(report: FrontierReport, budgets: Sequence[BudgetMark] = ()) -> str:
    """The chart: the budget in bytes from left to right, the time of a step over that of the baseline upwards.

    Each plan is a point; the line is the time that a budget gets, level from one plan to the next. The peak of the
    program as it is and the smallest peak found are marked, and pointing at a plan tells its bytes, its time and how
    much is recomputed. The file needs nothing else and follows the reader's light or dark setting.

    Args:
        report: of a program.
        budgets: to mark, each with the plan that it gets; those outside of the chart are named at its edge.
    """
    return "\n".join(_Chart(report, budgets).draw()) + "\n"


class _Chart:
    """One chart under construction; every method yields lines of SVG."""

    def __init__(self, report: FrontierReport, budgets: Sequence[BudgetMark]) -> None:
        self.report = report
        drawn = [*report.points, *(mark.point for mark in budgets if mark.point is not None)]
        sizes = [report.plain_bytes, report.smallest_bytes, *(point.peak_bytes for point in drawn)]
        low, high = min(sizes), max(sizes)
        margin = max((high - low) * 0.06, high * 0.01, 1.0)
        self.x = Axis(max(low - margin, 0.0), high + margin, LEFT, RIGHT)
        self.rows = _budget_rows([(self._edge(mark.bytes), mark.name) for mark in budgets])
        self.budgets = budgets
        self.top = _HEAD + _ROW * (max(self.rows, default=-1) + 1)
        self.bottom = self.top + PLOT_HEIGHT
        above = max(max(point.ratio for point in drawn) - 1.0, 0.01)
        self.y = Axis(1.0 - above * 0.06, 1.0 + above * 1.12, self.bottom, self.top)

    def _edge(self, size: int) -> float:
        return self.x(min(max(size, self.x.low), self.x.high))

    def draw(self) -> Iterator[str]:
        """The whole file."""
        size = f'width="{WIDTH:g}" height="{self.bottom + 58:g}"'
        view = f'viewBox="0 0 {WIDTH:g} {self.bottom + 58:g}"'
        yield f'<svg xmlns="http://www.w3.org/2000/svg" class="gof" role="img" {size} {view}>'
        yield f"<title>{safe(self._title())}</title>"
        yield f"<style>{STYLE}</style>"
        yield f'<rect class="paper" {size}/>'
        yield from self._head()
        yield from self._grid()
        yield from self._marks()
        yield from self._budgets()
        yield from self._line()
        yield from self._points()
        yield "</svg>"

    def _title(self) -> str:
        return f"{self.report.title or 'program'}, {self.report.stage} stage: peak memory against time"

    def _head(self) -> Iterator[str]:
        report = self.report
        yield svg_text(LEFT, 26, fit(self._title(), 8.6), "title")
        passes = f"passes: {', '.join(report.passes)}; " if report.passes else ""
        time = f"baseline time ({report.cost}): {format_seconds(report.seconds)}"
        yield svg_text(LEFT, 46, fit(f"{passes}{counted(len(report.points), 'plans')}; {time}", LETTER), "dim")
        if report.remark:
            yield svg_text(LEFT, 64, report.remark, "dim")

    def _grid(self) -> Iterator[str]:
        unit, factor = next((unit, factor) for unit, factor in UNITS if self.x.high >= factor or factor == 1)
        smallest = self.x(self.report.smallest_bytes)
        yield (
            f'<rect class="none" x="{LEFT:g}" y="{self.top:g}" width="{smallest - LEFT:.2f}" '
            f'height="{PLOT_HEIGHT:g}"><title>no plan was found here</title></rect>'
        )
        scaled = Axis(self.x.low / factor, self.x.high / factor, LEFT, RIGHT)
        for value in scaled.ticks():
            x = scaled(value)
            yield stroke("grid", x, self.top, x, self.bottom)
            yield svg_text(x, self.bottom + 18, f"{value:.10g}", anchor="middle")
        decimals = max(2, -math.floor(math.log10(self.y.step)))
        for value in self.y.ticks():
            yield stroke("grid", LEFT, self.y(value), RIGHT, self.y(value))
            yield svg_text(LEFT - 8, self.y(value) + 4, f"×{value:.{decimals}f}", anchor="end")
        yield stroke("axis", LEFT, self.bottom, RIGHT, self.bottom)
        yield stroke("axis", LEFT, self.top, LEFT, self.bottom)
        middle = (self.top + self.bottom) / 2
        yield svg_text((LEFT + RIGHT) / 2, self.bottom + 42, f"budget: peak memory in {unit}", anchor="middle")
        yield (
            f'<g transform="translate(20 {middle:g}) rotate(-90)">'
            + svg_text(0, 0, "time of a step (× baseline)", anchor="middle")
            + "</g>"
        )

    def _marks(self) -> Iterator[str]:
        smallest, plain = self.report.smallest_bytes, self.report.plain_bytes
        yield stroke("mark", self.x(plain), self.top, self.x(plain), self.bottom)
        yield svg_text(self.x(plain) - 6, self.top + 16, f"baseline: {format_bytes(plain)}", "over", anchor="end")
        if smallest < plain:
            yield stroke("mark", self.x(smallest), self.top, self.x(smallest), self.bottom)
            yield svg_text(
                self.x(smallest) + 6, self.bottom - 24, f"smallest peak found: {format_bytes(smallest)}", "over"
            )

    def _budgets(self) -> Iterator[str]:
        for mark, row in zip(self.budgets, self.rows, strict=True):
            x, y = self._edge(mark.bytes), _HEAD + _ROW * row + 10
            side = "◂ " if mark.bytes < self.x.low else "▸ " if mark.bytes > self.x.high else ""
            gets = _told(mark.point) if mark.point is not None else "no plan was found within it"
            yield f"<g><title>{safe(f'budget {mark.name}, {mark.bytes} bytes: {gets}')}</title>"
            yield stroke("budget", x, y + 4, x, self.bottom)
            yield svg_text(x, y, _short(side + mark.name), "budget-text", anchor=anchor_at(x))
            if mark.point is not None:
                yield f'<circle class="chosen" {self._place(mark.point)} r="7"/>'
            yield "</g>"

    def _line(self) -> Iterator[str]:
        first, *rest = self.report.points
        path = f"M{self.x(first.peak_bytes):.2f},{self.y(first.ratio):.2f}"
        for point in rest:
            path += f" H{self.x(point.peak_bytes):.2f} V{self.y(point.ratio):.2f}"
        yield f'<path class="line" d="{path} H{RIGHT:g}"/>'

    def _points(self) -> Iterator[str]:
        for point in self.report.points:
            yield f'<circle class="point" {self._place(point)} r="3.5"><title>{safe(_told(point))}</title></circle>'

    def _place(self, point: FrontierPoint) -> str:
        return f'cx="{self.x(point.peak_bytes):.2f}" cy="{self.y(point.ratio):.2f}"'


def _told(point: FrontierPoint) -> str:
    """A plan in words, to the byte."""
    return (
        f"{point.peak_bytes} bytes ({format_bytes(point.peak_bytes)}), ×{point.ratio:.4f}: "
        f"{format_seconds(point.extra_seconds)} more, {point.runs_again} ops recomputed"
    )


def _budget_rows(labels: Sequence[tuple[float, str]]) -> list[int]:
    """The row of each label (its place in pixels, its text), so that none covers another."""
    ends: list[list[tuple[float, float]]] = []
    found = []
    for x, text in labels:
        width = (len(_short(text)) + 3) * LETTER
        start = {"start": x, "middle": x - width / 2, "end": x - width}[anchor_at(x)]
        span = (start, start + width)
        free = (row for row, taken in enumerate(ends) if all(span[1] < low or high < span[0] for low, high in taken))
        row = next(free, len(ends))
        if row == len(ends):
            ends.append([])
        ends[row].append(span)
        found.append(row)
    return found


def _short(text: str) -> str:
    return text if len(text) <= 24 else f"{text[:23]}…"
