"""The pipelines that passes were chosen from as a picture in a terminal: bytes against the seconds of a step."""

from __future__ import annotations

from graphopt.ir.words.written_units import format_bytes, format_seconds
from graphopt.runtime.advice.evaluation import Evaluated
from graphopt.runtime.advice.recommendation import Advice

__all__ = ["advice_plot"]

_ROWS, _COLUMNS = 10, 64
_CHOSEN, _FITS, _TOO_LARGE, _BUDGET = "◆", "●", "○", "┊"


def advice_plot(advice: Advice) -> str:
    """The picture, with a line that says what its marks are; where marks fall together, the best one is seen."""
    points = [one for one in advice.evaluated if one.step is not None]
    most = max(one.taken for one in points)
    right = max(most, min(advice.budget, 2 * most))
    slowest = max(one.seconds for one in points)
    cells = [[" "] * _COLUMNS for _ in range(_ROWS)]
    if advice.budget <= right:
        for row in cells:
            row[_column(advice.budget, right)] = _BUDGET
    for one in sorted(points, key=lambda one: (one is advice.chosen, one.fits)):
        height = round((1 - one.seconds / slowest) * (_ROWS - 1)) if slowest else _ROWS - 1
        cells[height][_column(one.taken, right)] = _mark(one, advice)
    top, bottom = format_seconds(slowest), "0 s"
    width = max(len(top), len(bottom))
    labels = [top, *[""] * (_ROWS - 2), bottom]
    lines = [f"{label:>{width}} │{''.join(row)}".rstrip() for label, row in zip(labels, cells, strict=True)]
    lines.append(f"{'':{width}} └{'─' * _COLUMNS}")
    low, high = "0 B", format_bytes(right)
    lines.append(f"{'':{width}}  {low}{high:>{_COLUMNS - len(low)}}")
    lines.append(f"{_CHOSEN} chosen  {_FITS} fits  {_TOO_LARGE} does not fit  {_BUDGET} {format_bytes(advice.budget)}")
    return "\n".join(lines)


def _column(size: int, right: int) -> int:
    return round(size / right * (_COLUMNS - 1)) if right else 0


def _mark(one: Evaluated, advice: Advice) -> str:
    return _CHOSEN if one is advice.chosen else _FITS if one.fits else _TOO_LARGE
