"""The memory timeline of a program as a picture for papers and pages: one self-contained SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from graphopt.ir.memory.timeline import MemoryTimeline
from graphopt.ir.node import info
from graphopt.ir.words.written_units import format_bytes
from graphopt.report.console.escape import safe
from graphopt.report.text.memory_bands import (
    CATEGORY_STYLES,
    HATCHES,
    OTHER_STYLE,
    Section,
    bytes_by_category,
    columns,
    highest,
    sections,
)

__all__ = ["timeline_svg"]

_STYLE = """
.got{background:#fff;font-family:ui-sans-serif,system-ui,"Segoe UI",Helvetica,Arial,sans-serif}
.got text{fill:#1b1f24;font-size:12px}
.got .title{font-size:16px;font-weight:600}
.got .dim{fill:#57606a}
.got .over{paint-order:stroke;stroke:#fff;stroke-width:4px;stroke-linejoin:round}
.got .paper{fill:#fff}
.got .shade{fill:#f1f3f5}
.got .grid{stroke:#d5dae0;stroke-opacity:.7}
.got .axis{fill:none;stroke:#57606a}
.got .hatch{fill:none;stroke:#000;stroke-opacity:.38;stroke-width:1.2}
.got .outline{fill:none;stroke:#1b1f24;stroke-width:.8;stroke-opacity:.6}
.got .before{fill:none;stroke:#1b1f24;stroke-width:1.8;stroke-linejoin:round}
.got .peak{fill:none;stroke:#1b1f24;stroke-width:1.2}
.got .head{fill:#1b1f24}
@media (prefers-color-scheme:dark){
.got{background:#0d1117}
.got text{fill:#e6edf3}
.got .dim{fill:#9aa4af}
.got .over{stroke:#0d1117}
.got .paper{fill:#0d1117}
.got .shade{fill:#161b22}
.got .grid{stroke:#30363d}
.got .axis{stroke:#9aa4af}
.got .outline,.got .before,.got .peak{stroke:#e6edf3}
.got .head{fill:#e6edf3}
}
"""

_WIDTH = 900.0
_LEFT, _RIGHT = 84.0, 876.0
_TOP, _HEIGHT = 100.0, 280.0
_LETTER = 6.8
"""No letter of the labels is wider on average, in pixels."""
_ROW = 22.0
"""Height of a row of the legend."""
_UNITS = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3), ("bytes", 1))


def timeline_svg(timeline: MemoryTimeline, *, before: MemoryTimeline | None = None, title: str = "") -> str:
    """Bytes alive over the calls of a program, stacked by category, with the peak marked.

    The file needs nothing else, follows the reader's light or dark setting, tells categories apart by hatch as well as
    by color, and says in words what it shows to those who do not see it. A program of more calls than the chart has
    columns shows, in each column, the call at which the most bytes are alive, so that no peak is lost.

    Args:
        timeline: of a program; all bytes are predicted.
        before: of the program as it was, drawn as a line over it. Forward, backward and update of both stand
            above each other, whatever their numbers of calls.
        title: what stands above the chart.
    """
    return "\n".join(_Chart(timeline, before, title).draw()) + "\n"


@dataclass(frozen=True, slots=True)
class _Column:
    """The calls between two pixels: where it starts and ends, and the call that stands for it."""

    start: float
    end: float
    call: int


class _Chart:
    """One picture under construction; every method yields lines of SVG."""

    def __init__(self, timeline: MemoryTimeline, before: MemoryTimeline | None, title: str) -> None:
        self.timeline, self.before, self.title = timeline, before, title
        self.series = bytes_by_category(timeline)
        self.sections = sections(timeline)
        self.high = max([timeline.peak_bytes, before.peak_bytes if before else 0, 1]) * 1.09
        self.bottom = _TOP + _HEIGHT

    def draw(self) -> Iterator[str]:
        """The whole file."""
        legend = list(self._legend(self.bottom + 58))
        height = self.bottom + 58 + self._legend_height()
        size = f'width="{_WIDTH:g}" height="{height:g}"'
        view = f'viewBox="0 0 {_WIDTH:g} {height:g}"'
        yield f'<svg xmlns="http://www.w3.org/2000/svg" class="got" role="img" {size} {view}>'
        yield f"<title>{safe(self._title())}</title>"
        yield f"<desc>{safe(self._description())}</desc>"
        yield f"<style>{_STYLE}</style>"
        yield f"<defs>{''.join(_pattern(name) for name in self.series)}</defs>"
        yield f'<rect class="paper" {size}/>'
        yield _text(_LEFT, 26, _fit(self._title(), 8.8), "title")
        for line, text in enumerate(self._facts()):
            yield _text(_LEFT, 46 + 16 * line, _fit(text, _LETTER), "dim")
        yield from self._shades()
        yield from self._grid()
        yield from self._areas()
        if self.before is not None:
            yield from self._overlay(self.before)
        yield from self._peak()
        yield from legend
        yield "</svg>"

    # --- words -------------------------------------------------------------------------------------------------------

    def _title(self) -> str:
        return f"{self.title}: predicted memory" if self.title else "Predicted memory"

    def _where(self) -> str:
        """Where the peak is reached."""
        timeline = self.timeline
        if not timeline.nodes:
            return "a program without ops"
        position = timeline.bytes.index(timeline.peak_bytes)
        node = timeline.nodes[position]
        known = info(node)
        name = known.names[0] if known.names else node.name
        return f"{_short(name, 70)}, op {position + 1:,} of {len(timeline.nodes):,}, in {known.phase.value}"

    def _facts(self) -> list[str]:
        timeline = self.timeline
        first = f"peak {format_bytes(timeline.peak_bytes)} in {self._where()}"
        resident = f"{format_bytes(timeline.resident_bytes)} persistent, before and after"
        if self.before is None or not self.before.peak_bytes:
            return [first, resident]
        change = timeline.peak_bytes / self.before.peak_bytes - 1
        return [first, f"{resident}; before: {format_bytes(self.before.peak_bytes)} (now {change:+.1%})"]

    def _description(self) -> str:
        categories = self.timeline.categories if self.timeline.nodes else {}
        parts = sorted(categories.items(), key=lambda item: -item[1])
        listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts)
        return ". ".join([*self._facts(), *([f"At the peak: {listed}"] if listed else [])]) + "."

    # --- the chart ---------------------------------------------------------------------------------------------------

    def _x(self, position: float) -> float:
        return _LEFT + position / max(len(self.timeline.nodes), 1) * (_RIGHT - _LEFT)

    def _y(self, size: float) -> float:
        return self.bottom - size / self.high * _HEIGHT

    def _shades(self) -> Iterator[str]:
        """Every second part of the step on a darker ground, and the parts' names above."""
        for number, section in enumerate(self.sections):
            start, end = self._x(section.start), self._x(section.end)
            if number % 2:
                yield f'<rect class="shade" x="{start:.1f}" y="{_TOP}" width="{end - start:.1f}" height="{_HEIGHT}"/>'
            if end - start > len(section.name) * _LETTER:
                yield _text((start + end) / 2, _TOP - 8, section.name, "dim", "middle")

    def _grid(self) -> Iterator[str]:
        unit, factor = next((unit, factor) for unit, factor in _UNITS if self.high >= factor or factor == 1)
        for value in _ticks(self.high / factor):
            y = self._y(value * factor)
            yield f'<path class="grid" d="M{_LEFT},{y:.1f} H{_RIGHT}"/>'
            yield _text(_LEFT - 8, y + 4, f"{value:.10g}", anchor="end")
        yield f'<path class="axis" d="M{_LEFT},{_TOP} V{self.bottom} H{_RIGHT}"/>'
        middle = (_TOP + self.bottom) / 2
        label = _text(0, 0, f"{unit} alive", anchor="middle")
        yield f'<g transform="translate(22 {middle:g}) rotate(-90)">{label}</g>'
        count = len(self.timeline.nodes)
        yield _text(_LEFT, self.bottom + 18, "op 1", anchor="start")
        yield _text(_RIGHT, self.bottom + 18, f"{count:,}", anchor="end")

    def _columns(self) -> list[_Column]:
        found = []
        for section in self.sections:
            room = max(int(self._x(section.end) - self._x(section.start)), 1)
            for column in columns(section, room):
                call = highest(self.timeline, column)
                found.append(_Column(self._x(column.start), self._x(column.stop), call))
        return found

    def _areas(self) -> Iterator[str]:
        """The categories, each on top of the one before."""
        drawn = self._columns()
        if not drawn:
            return
        lower = [0] * len(drawn)
        edges = [drawn[0].start, *(column.end for column in drawn)]
        for name, sizes in self.series.items():
            upper = [below + sizes[column.call] for below, column in zip(lower, drawn, strict=True)]
            path = _area(edges, [self._y(size) for size in lower], [self._y(size) for size in upper])
            most = format_bytes(max(sizes))
            yield f'<path fill="{_fill(name)}" d="{path}"><title>{safe(name)}: up to {most}</title></path>'
            lower = upper
        yield f'<path class="outline" d="{_steps(edges, [self._y(size) for size in lower])}"/>'

    def _overlay(self, before: MemoryTimeline) -> Iterator[str]:
        """The total of the program before, each part of the step as wide as it is now."""
        places = _places(sections(before), self.sections, len(before.nodes), len(self.timeline.nodes))
        edges: list[float] = []
        heights: list[float] = []
        for section, (start, end) in places:
            left, right = self._x(start), self._x(end)
            for column in columns(section, max(int(right - left), 1)):
                edges.append(left + (column.start - section.start) / section.size * (right - left))
                heights.append(self._y(before.bytes[highest(before, column)]))
        if heights:
            edges.append(self._x(places[-1][1][1]))
            yield f'<path class="before" d="{_steps(edges, heights)}"><title>before</title></path>'

    def _peak(self) -> Iterator[str]:
        timeline = self.timeline
        if not timeline.nodes:
            return
        position = timeline.bytes.index(timeline.peak_bytes)
        x, y = self._x(position + 0.5), self._y(timeline.peak_bytes)
        yield f'<path class="peak" d="M{x:.1f},{y:.1f} V{self.bottom}" stroke-dasharray="1 3"/>'
        yield f'<path class="head" d="M{x:.1f},{y - 1:.1f} l-5,-8 h10 z"/>'
        anchor = "start" if x < _LEFT + 90 else "end" if x > _RIGHT - 90 else "middle"
        yield _text(x, y - 13, f"peak {format_bytes(timeline.peak_bytes)}", "over", anchor)

    # --- the legend --------------------------------------------------------------------------------------------------

    def _entries(self) -> list[tuple[str, str, float, float]]:
        """Category (empty for the program before), label, and place from the legend's corner."""
        at_peak = self.timeline.categories if self.timeline.nodes else {}
        labels = [(name, f"{name}, {format_bytes(at_peak.get(name, 0))}") for name in reversed(self.series)]
        labels += [("", "before, in all")] if self.before is not None else []
        x = y = 0.0
        found = []
        for name, label in labels:
            width = 44 + _LETTER * len(label)
            if x and x + width > _RIGHT - _LEFT:
                x, y = 0.0, y + _ROW
            found.append((name, label, x, y))
            x += width
        return found

    def _legend_height(self) -> float:
        return max((entry[3] for entry in self._entries()), default=0.0) + _ROW

    def _legend(self, top: float) -> Iterator[str]:
        if self.series:
            yield _text(_LEFT, top - 20, "from the top; bytes at the peak", "dim")
        for name, label, x, y in self._entries():
            left, row = _LEFT + x, top + y
            if name:
                yield f'<rect fill="{_fill(name)}" x="{left:g}" y="{row - 10:g}" width="22" height="14" rx="2"/>'
            else:
                yield f'<path class="before" d="M{left:g},{row - 3:g} h22"/>'
            yield _text(left + 28, row + 1, label)


# --- drawing ---------------------------------------------------------------------------------------------------------


def _places(
    old: Sequence[Section], new: Sequence[Section], old_calls: int, new_calls: int
) -> list[tuple[Section, tuple[float, float]]]:
    """Between which calls of the new program each part of the old one stands."""
    known = {section.name: (float(section.start), float(section.end)) for section in new}
    if all(section.name in known for section in old):
        return [(section, known[section.name]) for section in old]
    scale = new_calls / max(old_calls, 1)
    return [(section, (section.start * scale, section.end * scale)) for section in old]


def _steps(edges: Sequence[float], heights: Sequence[float]) -> str:
    """A line that is level from each edge to the next."""
    parts = [f"M{edges[0]:.1f},{heights[0]:.1f}"]
    for index, height in enumerate(heights):
        if index and f"{height:.1f}" != f"{heights[index - 1]:.1f}":
            parts.append(f"H{edges[index]:.1f}V{height:.1f}")
    return "".join([*parts, f"H{edges[-1]:.1f}"])


def _area(edges: Sequence[float], lower: Sequence[float], upper: Sequence[float]) -> str:
    """What is between two such lines."""
    back = _steps(list(reversed(edges)), list(reversed(lower)))
    return f"{_steps(edges, upper)}L{back[1:]}z"


def _ticks(high: float) -> list[float]:
    """Round values from 0 to ``high``, about six of them: 1, 2 or 5 times a power of ten apart."""
    power = 10.0 ** math.floor(math.log10(high / 6))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= high / 6 * 0.999)
    return [number * step for number in range(math.floor(high / step + 1e-9) + 1)]


def _key(name: str) -> str:
    return name.replace(" ", "-")


def _fill(name: str) -> str:
    color, hatch = CATEGORY_STYLES.get(name, OTHER_STYLE)
    return f"url(#got-{_key(name)})" if hatch else color


def _pattern(name: str) -> str:
    color, hatch = CATEGORY_STYLES.get(name, OTHER_STYLE)
    if not hatch:
        return ""
    return (
        f'<pattern id="got-{_key(name)}" width="6" height="6" patternUnits="userSpaceOnUse">'
        f'<rect width="6" height="6" fill="{color}"/><path class="hatch" d="{HATCHES[hatch]}"/></pattern>'
    )


def _short(text: str, room: int) -> str:
    return text if len(text) <= room else f"{text[: room - 1]}…"


def _fit(text: str, letter: float) -> str:
    return _short(text, int((_RIGHT - _LEFT) / letter))


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "") -> str:
    kinds = f' class="{kind}"' if kind else ""
    anchors = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text{kinds} x="{x:.1f}" y="{y:.1f}"{anchors}>{safe(text)}</text>'
