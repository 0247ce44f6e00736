"""What charts are drawn with: one style for light and dark, axes with round labels, texts and lines."""

from __future__ import annotations

import math
from dataclasses import dataclass

from graphopt.report.console.escape import safe

__all__ = [
    "LEFT",
    "LETTER",
    "PLOT_HEIGHT",
    "RIGHT",
    "STYLE",
    "UNITS",
    "WIDTH",
    "Axis",
    "anchor_at",
    "fit",
    "stroke",
    "svg_text",
]

STYLE = """
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
.gof .open{fill:none;stroke:#57606a}
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
.gof .open{stroke:#9aa4af}
.gof .budget{stroke:#ffa564}
.gof .chosen{stroke:#ffa564}
.gof .budget-text{fill:#ffa564}
}
"""

WIDTH = 800.0
LEFT, RIGHT = 84.0, 776.0
PLOT_HEIGHT = 340.0
LETTER = 7.2
"""No letter of the labels is wider on average, in pixels."""
UNITS = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3), ("bytes", 1))


@dataclass(frozen=True, slots=True)
class Axis:
    """From values to pixels, with round values to label."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """The place of a value."""
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


def anchor_at(x: float) -> str:
    """Labels near the edges are drawn inwards."""
    return "start" if x < LEFT + 60 else "end" if x > RIGHT - 60 else "middle"


def fit(text: str, letter: float) -> str:
    """Text cut to the width of the plot, by the width of its letters in pixels."""
    room = int((RIGHT - LEFT) / letter)
    return text if len(text) <= room else f"{text[: room - 1]}…"


def svg_text(x: float, y: float, text: str, kind: str = "", *, anchor: str = "") -> str:
    """A text at a place, of a class of ``STYLE``."""
    kinds = f' class="{kind}"' if kind else ""
    anchors = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text{kinds} x="{x:.2f}" y="{y:.2f}"{anchors}>{safe(text)}</text>'


def stroke(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    """A straight line of a class of ``STYLE``."""
    return f'<line class="{kind}" x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}"/>'
