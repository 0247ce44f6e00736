"""An SVG with one panel for each model: peak memory on x, time against eager PyTorch on y, one colour for each way.

A line joins the points of a way that are faster than all its points of lower peaks: the others nobody would choose.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

PANEL_WIDTH, PANEL_HEIGHT = 460, 320
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 34, 44
LEGEND_ROW = 20
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#000000")
"""Okabe and Ito's colours, which colour-blind people tell apart."""


@dataclass(frozen=True)
class Series:
    """A line: points of (bytes, ratio)."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    series: Sequence[Series]


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About ``count`` round numbers from ``low`` to ``high``."""
    rough = (high - low) / count or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


class _Axes:
    """From bytes and ratios to pixels of a panel."""

    def __init__(self, panel: Panel) -> None:
        xs = [x / 1e6 for series in panel.series for x, _ in series.points]
        ys = [1.0, *(y for series in panel.series for _, y in series.points)]
        self.high_x = max(xs, default=1.0) * 1.05
        margin = max(0.02, 0.08 * (max(ys) - min(ys)))
        self.low_y, self.high_y = min(ys) - margin, max(ys) + margin

    def x(self, megabytes: float) -> float:
        return LEFT + (PANEL_WIDTH - LEFT - RIGHT) * megabytes / self.high_x

    def y(self, ratio: float) -> float:
        return TOP + (PANEL_HEIGHT - TOP - BOTTOM) * (self.high_y - ratio) / (self.high_y - self.low_y)


def draw(panels: Sequence[Panel], *, columns: int = 2) -> str:
    """The picture as SVG text, which stands alone."""
    names = list(dict.fromkeys(series.name for panel in panels for series in panel.series))
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}
    columns = min(columns, len(panels)) or 1
    width = columns * PANEL_WIDTH
    legend, lines = _legend(names, colours, width)
    top = 8 + lines * LEGEND_ROW
    height = -(-len(panels) // columns) * PANEL_HEIGHT + top
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        *legend,
    ]
    for index, panel in enumerate(panels):
        row, column = divmod(index, columns)
        parts.append(f'<g transform="translate({column * PANEL_WIDTH} {top + row * PANEL_HEIGHT})">')
        parts += [*_frame(panel), *_lines(panel, colours), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _legend(names: Sequence[str], colours: dict[str, str], width: int) -> tuple[list[str], int]:
    """The names in their colours, and how many lines they take."""
    parts, left, line = [], float(LEFT), 1
    for name in names:
        needed = 28 + 6.5 * len(name)
        if left > LEFT and left + needed > width:
            left, line = float(LEFT), line + 1
        middle = line * LEGEND_ROW - 4
        parts.append(f'<circle cx="{left:.0f}" cy="{middle}" r="4" fill="{colours[name]}"/>')
        parts.append(f'<text x="{left + 8:.0f}" y="{middle + 4}">{html.escape(name)}</text>')
        left += needed
    return parts, line


def _frame(panel: Panel) -> list[str]:
    axes = _Axes(panel)
    bottom, right = PANEL_HEIGHT - BOTTOM, PANEL_WIDTH - RIGHT
    parts = [f'<text x="{LEFT}" y="{TOP - 12}" font-weight="bold">{html.escape(panel.title)}</text>']
    for value in ticks(axes.low_y, axes.high_y):
        y = axes.y(value)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{right}" stroke="#dddddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">×{value:.2f}</text>')
    for value in ticks(0.0, axes.high_x):
        x = axes.x(value)
        parts.append(f'<path d="M{x:.1f} {bottom}v4" stroke="#000000"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{value:g}</text>')
    parts.append(f'<path d="M{LEFT} {TOP}V{bottom}H{right}" fill="none" stroke="#000000"/>')
    parts.append(
        f'<text x="{(LEFT + right) / 2:.0f}" y="{bottom + 34}" text-anchor="middle">peak above resident, MB</text>'
    )
    return parts


def _lines(panel: Panel, colours: dict[str, str]) -> list[str]:
    axes = _Axes(panel)
    parts = []
    for series in panel.series:
        colour = colours[series.name]
        places = [(axes.x(x / 1e6), axes.y(y), x, y) for x, y in sorted(series.points)]
        line = " ".join(
            f"{x:.1f},{y:.1f}"
            for index, (x, y, _, ratio) in enumerate(places)
            if all(ratio < sooner[3] for sooner in places[:index])
        )
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}">'
            f"<title>{html.escape(series.name)}: {peak / 1e6:.1f} MB, ×{ratio:.3f}</title></circle>"
            for x, y, peak, ratio in places
        ]
    return parts
