"""The pipelines that passes were chosen from as a page: each point of the picture leads to its pipeline."""

from __future__ import annotations

from graphopt.ir.words.written_units import format_bytes, format_seconds
from graphopt.report.console.escape import safe
from graphopt.report.formats.plain_page import plain_page, plain_table
from graphopt.report.pictures.advice_chart import advice_svg
from graphopt.report.pictures.chart import STYLE
from graphopt.runtime.advice.evaluation import Evaluated
from graphopt.runtime.advice.recommendation import Advice

__all__ = ["advice_page"]

_ROW = "pipeline-"
"""What the ``id`` of a pipeline's row begins with."""

_STYLE = """
pre{white-space:pre-wrap;overflow-wrap:anywhere}
td:first-child{white-space:normal;overflow-wrap:anywhere;font:.85em ui-monospace,Menlo,Consolas,monospace}
tr:target{background:#d55e0033}
"""


def advice_page(advice: Advice) -> str:
    """The page: one HTML file in ASCII that needs no network and runs nothing.

    It has what the text has: the choice and why it is that one, the picture with every pipeline that was simulated, and
    all of them as a table, which a click on a point leads to.
    """
    title = f"Passes for {advice.machine}"
    rows = [_row(one, advice) for one in advice.evaluated]
    picture = advice_svg(advice, rows=f"#{_ROW}")
    body = [
        f"<h1>{safe(title)}</h1>", f"<pre>{safe(chr(10).join(advice.summary()))}</pre>",
        "<h2>All pipelines that were weighed</h2>", f'<div class="wide">{picture}</div>',
        *plain_table(("passes", "at the peak", "a step", "of the chosen one", ""), rows, text=4, name=_ROW),
        *(f'<p class="dim">Not considered: {safe(text)}</p>' for text in advice.unconsidered),
    ]  # fmt: skip
    return plain_page(title, body, STYLE + _STYLE)


def _row(one: Evaluated, advice: Advice) -> tuple[str, ...]:
    if one.problem:
        return str(one.candidate), "", "", "", f"not possible: {one.problem}"
    verdict = "chosen" if one is advice.chosen else "fits" if one.fits else "does not fit"
    if one.step is None:
        return str(one.candidate), f"at least {format_bytes(one.taken)}", "", "", verdict
    ratio = f"×{one.seconds / advice.step.seconds:.2f}"
    return str(one.candidate), format_bytes(one.taken), format_seconds(one.seconds), ratio, verdict
