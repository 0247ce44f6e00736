"""The trade between peak bytes and time as a picture: one self-contained SVG."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from graphopt.ir.words.written_units import counted, format_bytes, format_seconds
from graphopt.report.pictures.picture import printable
from graphopt.report.text.frontier_table import FrontierPoint, FrontierReport

__all__ = ["BudgetMark", "frontier_svg"]

_STYLE = """
.gof{background:#fff;font-family:ui-sans-serif,system-ui,"Segoe UI",Helvetica,Arial,sans-serif}
.gof text{fill:#1b1f24;font-size:12px}
.gof .over{paint-order:stroke;stroke:#fff;stroke-width:4px}
.gof .title{font-size:16px;font-weight:600}
.gof .dim{fill:#57606a}
.gof .paper{fill:#fff}
.gof .grid{stroke:#e3e6ea}
.gof .axis{stroke:#57606a}
.gof .none{fill:#f4f5f7}
.gof .line{fill:none;stroke:#0072b2;stroke-width:2}
.gof .point{fill:#0072b2;stroke:#fff}
.gof .mark{stroke:#57606a;stroke-dasharray:5 4}
.gof .budget{stroke:#d55e00;stroke-width:1.5;stroke-dasharray:2 3}
.gof .chosen{fill:none;stroke:#d55e00;stroke-width:2}
.gof .budget-text{fill:#9a3f00}
@media (prefers-color-scheme:dark){
.gof{background:#0d1117}
.gof text{fill:#e6edf3}
.gof .over{stroke:#0d1117}
.gof .dim{fill:#9aa4af}
.gof .paper{fill:#0d1117}
.gof .grid{stroke:#262c35}
.gof .axis{stroke:#9aa4af}
.gof .none{fill:#161b22}
.gof .line{stroke:#56b4e9}
.gof .point{fill:#56b4e9;stroke:#0d1117}
.gof .mark{stroke:#9aa4af}
.gof .budget{stroke:#ffa564}
.gof .chosen{stroke:#ffa564}
.gof .budget-text{fill:#ffa564}
}
"""

_WIDTH = 800.0
_LEFT, _RIGHT = 84.0, 776.0
_PLOT_HEIGHT = 340.0
_HEAD = 78.0
"""Room for the title and what is known of the program."""
_ROW = 17.0
"""Height of a row of the budgets' names."""
_LETTER = 7.2
"""No letter of the labels is wider on average, in pixels."""
_UNITS = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3), ("bytes", 1))


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
    """The chart: the budget in bytes from left to right, the time of a step over that of the program as it is upwards.

    Each plan is a point; the line is the time that a budget gets, level from one plan to the next. The peak of the
    program as it is and the smallest peak found are marked, and pointing at a plan tells its bytes, its time and how
    much runs again. The file needs nothing else and follows the reader's light or dark setting.

    Args:
        report: of a program.
        budgets: to mark, each with the plan that it gets; those outside of the chart are named at its edge.
    """
    return "\n".join(_Chart(report, budgets).draw()) + "\n"


@dataclass(frozen=True, slots=True)
class _Axis:
    """From values to pixels, with round values to label."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    @property
    def step(self) -> float:
        """The distance of labels: 1, 2 or 5 times a power of ten, so that there are about six."""
        rough = (self.high - self.low) / 6
        power = 10.0 ** math.floor(math.log10(rough))
        return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)

    def ticks(self) -> list[float]:
        """Round values within the axis."""
        step = self.step
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


class _Chart:
    """One chart under construction; every method yields lines of SVG."""

    def __init__(self, report: FrontierReport, budgets: Sequence[BudgetMark]) -> None:
        self.report = report
        drawn = [*report.points, *(mark.point for mark in budgets if mark.point is not None)]
        sizes = [report.plain_bytes, report.smallest_bytes, *(point.peak_bytes for point in drawn)]
        low, high = min(sizes), max(sizes)
        margin = max((high - low) * 0.06, high * 0.01, 1.0)
        self.x = _Axis(max(low - margin, 0.0), high + margin, _LEFT, _RIGHT)
        self.rows = _budget_rows([(self._edge(mark.bytes), mark.name) for mark in budgets])
        self.budgets = budgets
        self.top = _HEAD + _ROW * (max(self.rows, default=-1) + 1)
        self.bottom = self.top + _PLOT_HEIGHT
        above = max(max(point.ratio for point in drawn) - 1.0, 0.01)
        self.y = _Axis(1.0 - above * 0.06, 1.0 + above * 1.12, self.bottom, self.top)

    def _edge(self, size: int) -> float:
        return self.x(min(max(size, self.x.low), self.x.high))

    def draw(self) -> Iterator[str]:
        """The whole file."""
        size = f'width="{_WIDTH:g}" height="{self.bottom + 58:g}"'
        view = f'viewBox="0 0 {_WIDTH:g} {self.bottom + 58:g}"'
        yield f'<svg xmlns="http://www.w3.org/2000/svg" class="gof" role="img" {size} {view}>'
        yield f"<title>{_safe(self._title())}</title>"
        yield f"<style>{_STYLE}</style>"
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
        yield _text(_LEFT, 26, _fit(self._title(), 8.6), "title")
        passes = f"passes: {', '.join(report.passes)}; " if report.passes else ""
        time = f"time as it is ({report.cost}): {format_seconds(report.seconds)}"
        yield _text(_LEFT, 46, _fit(f"{passes}{counted(len(report.points), 'plans')}; {time}", _LETTER), "dim")
        if report.remark:
            yield _text(_LEFT, 64, report.remark, "dim")

    def _grid(self) -> Iterator[str]:
        unit, factor = next((unit, factor) for unit, factor in _UNITS if self.x.high >= factor or factor == 1)
        smallest = self.x(self.report.smallest_bytes)
        yield (
            f'<rect class="none" x="{_LEFT:g}" y="{self.top:g}" width="{smallest - _LEFT:.2f}" '
            f'height="{_PLOT_HEIGHT:g}"><title>no plan was found here</title></rect>'
        )
        scaled = _Axis(self.x.low / factor, self.x.high / factor, _LEFT, _RIGHT)
        for value in scaled.ticks():
            x = scaled(value)
            yield _stroke("grid", x, self.top, x, self.bottom)
            yield _text(x, self.bottom + 18, f"{value:.10g}", anchor="middle")
        decimals = max(2, -math.floor(math.log10(self.y.step)))
        for value in self.y.ticks():
            yield _stroke("grid", _LEFT, self.y(value), _RIGHT, self.y(value))
            yield _text(_LEFT - 8, self.y(value) + 4, f"×{value:.{decimals}f}", anchor="end")
        yield _stroke("axis", _LEFT, self.bottom, _RIGHT, self.bottom)
        yield _stroke("axis", _LEFT, self.top, _LEFT, self.bottom)
        middle = (self.top + self.bottom) / 2
        yield _text((_LEFT + _RIGHT) / 2, self.bottom + 42, f"budget: peak memory in {unit}", anchor="middle")
        yield (
            f'<g transform="translate(20 {middle:g}) rotate(-90)">'
            + _text(0, 0, "time of a step (× the program as it is)", anchor="middle")
            + "</g>"
        )

    def _marks(self) -> Iterator[str]:
        smallest, plain = self.report.smallest_bytes, self.report.plain_bytes
        yield _stroke("mark", self.x(plain), self.top, self.x(plain), self.bottom)
        yield _text(self.x(plain) - 6, self.top + 16, f"as it is: {format_bytes(plain)}", "over", anchor="end")
        if smallest < plain:
            yield _stroke("mark", self.x(smallest), self.top, self.x(smallest), self.bottom)
            yield _text(
                self.x(smallest) + 6, self.bottom - 24, f"smallest peak found: {format_bytes(smallest)}", "over"
            )

    def _budgets(self) -> Iterator[str]:
        for mark, row in zip(self.budgets, self.rows, strict=True):
            x, y = self._edge(mark.bytes), _HEAD + _ROW * row + 10
            side = "◂ " if mark.bytes < self.x.low else "▸ " if mark.bytes > self.x.high else ""
            gets = _told(mark.point) if mark.point is not None else "no plan was found within it"
            yield f"<g><title>{_safe(f'budget {mark.name}, {mark.bytes} bytes: {gets}')}</title>"
            yield _stroke("budget", x, y + 4, x, self.bottom)
            yield _text(x, y, _short(side + mark.name), "budget-text", anchor=_anchor(x))
            if mark.point is not None:
                yield f'<circle class="chosen" {self._place(mark.point)} r="7"/>'
            yield "</g>"

    def _line(self) -> Iterator[str]:
        first, *rest = self.report.points
        path = f"M{self.x(first.peak_bytes):.2f},{self.y(first.ratio):.2f}"
        for point in rest:
            path += f" H{self.x(point.peak_bytes):.2f} V{self.y(point.ratio):.2f}"
        yield f'<path class="line" d="{path} H{_RIGHT:g}"/>'

    def _points(self) -> Iterator[str]:
        for point in self.report.points:
            yield f'<circle class="point" {self._place(point)} r="3.5"><title>{_safe(_told(point))}</title></circle>'

    def _place(self, point: FrontierPoint) -> str:
        return f'cx="{self.x(point.peak_bytes):.2f}" cy="{self.y(point.ratio):.2f}"'


def _told(point: FrontierPoint) -> str:
    """A plan in words, to the byte."""
    return (
        f"{point.peak_bytes} bytes ({format_bytes(point.peak_bytes)}), ×{point.ratio:.4f}: "
        f"{format_seconds(point.extra_seconds)} more, {point.runs_again} ops run again"
    )


def _budget_rows(labels: Sequence[tuple[float, str]]) -> list[int]:
    """The row of each label (its place in pixels, its text), so that none covers another."""
    ends: list[list[tuple[float, float]]] = []
    found = []
    for x, text in labels:
        width = (len(_short(text)) + 3) * _LETTER
        start = {"start": x, "middle": x - width / 2, "end": x - width}[_anchor(x)]
        span = (start, start + width)
        free = (row for row, taken in enumerate(ends) if all(span[1] < low or high < span[0] for low, high in taken))
        row = next(free, len(ends))
        if row == len(ends):
            ends.append([])
        ends[row].append(span)
        found.append(row)
    return found


def _anchor(x: float) -> str:
    """Labels near the edges are drawn inwards."""
    return "start" if x < _LEFT + 60 else "end" if x > _RIGHT - 60 else "middle"


def _short(text: str) -> str:
    return text if len(text) <= 24 else f"{text[:23]}…"


def _fit(text: str, letter: float) -> str:
    room = int((_RIGHT - _LEFT) / letter)
    return text if len(text) <= room else f"{text[: room - 1]}…"


def _safe(text: object) -> str:
    """Text for XML, as content or attribute."""
    return html.escape(printable(text))


def _text(x: float, y: float, text: str, kind: str = "", *, anchor: str = "") -> str:
    kinds = f' class="{kind}"' if kind else ""
    anchors = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text{kinds} x="{x:.2f}" y="{y:.2f}"{anchors}>{_safe(text)}</text>'


def _stroke(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}"/>'
