"""The pipelines that passes were chosen from as a picture: bytes against the seconds of a step, the choice marked."""

from __future__ import annotations

from collections.abc import Iterator

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
    fit,
    stroke,
    svg_text,
)
from graphopt.runtime.advice.evaluation import Evaluated
from graphopt.runtime.advice.recommendation import Advice

__all__ = ["advice_svg"]

_TOP = 78.0
_BOTTOM = _TOP + PLOT_HEIGHT


def advice_svg(advice: Advice, rows: str = "") -> str:
    """The chart: bytes at the peak from left to right, the seconds of a step upwards, a point for each pipeline.

    What does not fit is hollow. The choice has a ring, and its pipeline is written; pointing at another point tells its
    own, with its bytes and seconds. The line is the budget.

    Args:
        advice: what was chosen, and from what.
        rows: of a page that the chart is put into, and that brings the style: each point is a link to this and the
            place of its pipeline in ``advice.evaluated``. By default the chart stands alone, without links.
    """
    return "\n".join(_drawn(advice, rows)) + "\n"


def _drawn(advice: Advice, rows: str) -> Iterator[str]:
    numbered = [(number, one) for number, one in enumerate(advice.evaluated) if one.step is not None]
    points = [one for _, one in numbered]
    x, y = _axes(advice, points)
    size = f'width="{WIDTH:g}" height="{_BOTTOM + 58:g}"'
    title = f"Passes for {advice.machine}: {advice.pipeline or 'none'}"
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="gof" role="img" {size} '
        f'viewBox="0 0 {WIDTH:g} {_BOTTOM + 58:g}">'
    )
    yield f"<title>{safe(title)}</title>"
    yield "" if rows else f"<style>{STYLE}</style>"
    yield f'<rect class="paper" {size}/>'
    yield svg_text(LEFT, 26, fit(f"Passes for {advice.machine}", 8.6), "title")
    chosen = f"{advice.pipeline or 'no pass'}: {format_seconds(advice.step.seconds)}, limited by {advice.limit}"
    yield svg_text(LEFT, 46, fit(chosen, LETTER), "dim")
    yield svg_text(LEFT, 64, f"{counted(len(points), 'pipelines')}; hollow ones do not fit", "dim")
    yield from _grid(x, y)
    place = x(min(max(advice.budget, x.low), x.high))
    yield stroke("budget", place, _TOP, place, _BOTTOM)
    over = place > (LEFT + RIGHT) / 2
    told = f"{format_bytes(advice.budget)} for the program"
    yield svg_text(place + (-6 if over else 6), _TOP + 16, told, "budget-text over", anchor="end" if over else "")
    for number, one in numbered:
        at = f'cx="{x(one.taken):.2f}" cy="{y(one.seconds):.2f}"'
        if one is advice.chosen:
            yield f'<circle class="chosen" {at} r="8"/>'
        kind = "point" if one.fits else "open"
        point = f'<circle class="{kind}" {at} r="{6 if rows else 4}"><title>{safe(_told(one))}</title></circle>'
        yield f'<a href="{safe(rows)}{number}">{point}</a>' if rows else point
    yield "</svg>"


def _axes(advice: Advice, points: list[Evaluated]) -> tuple[Axis, Axis]:
    """Of bytes and of seconds, from nothing; the budget is on the first one unless it is far beyond."""
    most = max(one.taken for one in points)
    right = max(most, min(advice.budget, 2 * most)) * 1.05
    return Axis(0.0, right, LEFT, RIGHT), Axis(0.0, max(one.seconds for one in points) * 1.1, _BOTTOM, _TOP)


def _grid(x: Axis, y: Axis) -> Iterator[str]:
    unit, factor = next((unit, factor) for unit, factor in UNITS if x.high >= factor or factor == 1)
    scaled = Axis(x.low / factor, x.high / factor, LEFT, RIGHT)
    for value in scaled.ticks():
        yield stroke("grid", scaled(value), _TOP, scaled(value), _BOTTOM)
        yield svg_text(scaled(value), _BOTTOM + 18, f"{value:.10g}", anchor="middle")
    for value in y.ticks():
        yield stroke("grid", LEFT, y(value), RIGHT, y(value))
        yield svg_text(LEFT - 8, y(value) + 4, format_seconds(value), anchor="end")
    yield stroke("axis", LEFT, _BOTTOM, RIGHT, _BOTTOM)
    yield stroke("axis", LEFT, _TOP, LEFT, _BOTTOM)
    yield svg_text((LEFT + RIGHT) / 2, _BOTTOM + 42, f"peak memory of a device in {unit}", anchor="middle")


def _told(one: Evaluated) -> str:
    """A pipeline in words."""
    fits = "" if one.fits else ", does not fit"
    return f"{one.candidate}: {format_bytes(one.taken)}, {format_seconds(one.seconds)}{fits}"
