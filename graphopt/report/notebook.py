"""How graphopt's objects show themselves in notebooks: static HTML, and the interactive page in a frame.

What is static has no script, so that it also shows in notebooks that are not trusted and on sites that only render
them. Nothing here imports IPython.
"""

from __future__ import annotations

import sys
import tempfile
import webbrowser
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from graphopt.ir.memory.timeline import MemoryTimeline
from graphopt.ir.node import Phase
from graphopt.ir.program import Program
from graphopt.ir.words.written_units import format_bytes
from graphopt.report.console.escape import safe
from graphopt.report.console.terminal import write
from graphopt.report.pictures.memory_timeline import timeline_svg
from graphopt.rewriting.pass_ import PassRecord

__all__ = ["Frame", "in_notebook", "program_html", "records_html", "rewritten_html", "show_page", "timeline_html"]

_LARGEST = 150_000
"""Letters of a picture that a notebook gets; a larger one is left to ``to_svg``."""

_LONGEST = 300
"""Letters of a cell; more are cut."""

_MOST = 40
"""Rows of a table; more are counted."""

_LEFT = ' style="text-align:left"'
_SCROLL = '<div style="overflow:auto;max-height:40em">'


class Frame:
    """A page in a frame of a notebook.

    Args:
        page: HTML that needs nothing else. Its scripts run apart from the notebook, and reach nothing of it.
        height: of the frame, in pixels; nine tenths of the window at most.
    """

    def __init__(self, page: str, height: int = 720) -> None:
        self.page, self.height = page, height

    def _repr_html_(self) -> str:
        size = f'width="100%" height="{self.height}" style="border:0;max-height:90vh"'
        return f'<iframe sandbox="allow-scripts" {size} srcdoc="{_attribute(self.page)}"></iframe>'

    def __repr__(self) -> str:
        return f"<Frame: a page of {len(self.page):,} letters>"


def show_page(page: str, title: str) -> Frame | Path:
    """Show a page: in a notebook as the result of a cell, elsewhere in the browser.

    Args:
        page: HTML that needs nothing else.
        title: what the file is called.

    Returns:
        the frame that a notebook shows, or the file that the browser was asked to open; it is in the folder of
        temporary files, and stays.
    """
    if in_notebook():
        return Frame(page)
    plain = "".join(letter if letter.isalnum() else "-" for letter in title)[:40] or "program"
    folder = Path(tempfile.mkdtemp(prefix="graphopt-"))
    path = folder / f"{plain}.html"
    path.write_text(page, encoding="utf-8")
    if not webbrowser.open(path.as_uri()):
        write(f"there is no browser here; the page is {path}", sys.stderr)
    return path


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def _attribute(page: str) -> str:
    """A page as the value of an attribute; nothing of it is changed when it is read."""
    return page.replace("&", "&amp;").replace('"', "&quot;")


# --- static ----------------------------------------------------------------------------------------------------------


def program_html(program: Program) -> str:
    """A program as a table of facts and its folded picture."""
    rows = [(name, value) for name, value in _facts(program) if value]
    body = "".join(f"<tr><th{_LEFT}>{safe(name)}</th><td{_LEFT}>{_cell(value)}</td></tr>" for name, value in rows)
    return f"<div>{_caption(program)}<table>{body}</table>{_picture(program)}</div>"


def timeline_html(timeline: MemoryTimeline) -> str:
    """A memory timeline as its picture."""
    return f"<div>{timeline_svg(timeline).strip()}</div>"


def records_html(records: Iterable[PassRecord]) -> str:
    """What passes did, as a table: what changed, nodes, predicted peaks, numerics, seconds."""
    head = ("pass", "stage", "what it did", "nodes", "predicted peak", "numerics", "seconds")
    rows = [_record_row(record) for record in records]
    return _table(head, rows) if rows else "<div>no passes</div>"


def _record_row(record: PassRecord) -> tuple[str, ...]:
    nodes = f"{record.nodes_before:,} → {record.nodes_after:,}"
    seconds = f"{record.seconds:.2f}"
    return (record.spec, record.stage, _told(record), nodes, _peaks(record), record.numerics, seconds)


def rewritten_html(title: str, program: Program, records: Iterable[PassRecord]) -> str:
    """What a step or an optimized model runs: its passes, and its program."""
    return f"<div><b>{safe(title)}</b>{records_html(records)}{program_html(program)}</div>"


def _told(record: PassRecord) -> str:
    return "\n".join(
        [str(record.changed), *record.changed.lines[:8], *(["…"] if len(record.changed.lines) > 8 else [])]
    )


def _peaks(record: PassRecord) -> str:
    if record.peak_before is None or record.peak_after is None:
        return ""
    return f"{format_bytes(record.peak_before)} → {format_bytes(record.peak_after)}"


def _caption(program: Program) -> str:
    return f"<b>{safe(_short(program.title or 'program'))}</b>, {program.stage} stage"


def _facts(program: Program) -> Iterator[tuple[str, str]]:
    calls = [node for node in program.graph.nodes if node.op not in ("placeholder", "output")]
    phases = [(phase, sum(1 for _ in program.phase_nodes(phase))) for phase in Phase]
    parts = ", ".join(f"{count:,} {phase.value}" for phase, count in phases if count)
    yield "calls", f"{len(calls):,}: {parts}"
    yield "inputs", _roles([spec.role for spec in program.inputs])
    yield "outputs", _roles([spec.role for spec in program.outputs])
    yield "passes", ", ".join(program.history) or "none"
    if program.stage != "forward":
        timeline = program.memory()
        resident = f"of which {format_bytes(timeline.resident_bytes)} persistent"
        yield "predicted peak", f"{format_bytes(timeline.peak_bytes)}, {resident}"


def _roles(roles: list[str]) -> str:
    return ", ".join(f"{roles.count(role):,} {role}" for role in dict.fromkeys(roles))


def _picture(program: Program) -> str:
    picture = program.to_svg()
    if len(picture) > _LARGEST:
        size = f"{len(picture):,} letters"
        return f"<div>the picture is large ({size}): to_svg() makes it, show() the interactive page</div>"
    return f"{_SCROLL}{picture.strip()}</div>"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    titles = "".join(f"<th{_LEFT}>{safe(title)}</th>" for title in head)
    body = "".join(f"<tr>{''.join(f'<td{_LEFT}>{_cell(cell)}</td>' for cell in row)}</tr>" for row in rows[:_MOST])
    more = f"<div>and {len(rows) - _MOST} more</div>" if len(rows) > _MOST else ""
    return f"<div><table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>{more}</div>"


def _cell(text: str) -> str:
    return "<br>".join(safe(_short(line)) for line in text.split("\n"))


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
