"""The page as one file: markup, styles, scripts and data, under a policy that lets nothing else in."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from graphopt.ir.program import Program
from graphopt.report.console.escape import safe
from graphopt.report.page.data import page_data
from graphopt.report.page.story import MeasuredPeaks, Story, story_of_program, story_of_snapshots
from graphopt.rewriting.pass_ import PassRecord
from graphopt.runtime.programs.rewrite import Rewritten

__all__ = ["SCRIPTS", "page_of_program", "page_of_rewritten", "page_of_snapshots", "page_of_story"]

SCRIPTS = (
    "base.js", "words.js", "program.js", "plan.js", "timeline.js", "rows.js", "summaries.js", "edges.js", "drawing.js",
    "graph.js", "details.js", "search.js", "tables.js", "budget.js", "main.js",
)  # fmt: skip
"""The scripts in the order in which they are put together; they share one scope, which nothing outside sees."""

_UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}
"""What means something to HTML inside of JSON; everything beyond ASCII (U+2028 among it) is escaped as well."""


def page_of_program(program: Program) -> str:
    """One program of any stage as a page; nothing is compared.

    Raises:
        GraphoptError: for a program whose nodes lack their description (``Program.insert`` fills it in).
    """
    return page_of_story(story_of_program(program))


def page_of_snapshots(
    snapshots: Sequence[tuple[str, Program]],
    records: Sequence[PassRecord],
    *,
    pipeline: str | None = None,
    command: str = "",
    measured: MeasuredPeaks | None = None,
) -> str:
    """A capture and everything that passes made of it as a page: ``page_of_snapshots(step.snapshots, step.records)``.

    Args:
        snapshots: ``(label, program)`` after capture, after each lowering and after each pass.
        records: what each pass did, in order.
        pipeline: the passes as text; those that ran, by default.
        command: the command line that makes the page again.
        measured: what running the programs before and after took, which the page shows beside the predictions.

    Raises:
        GraphoptError: where snapshots and records do not belong together.
    """
    return page_of_story(
        story_of_snapshots(snapshots, records, pipeline=pipeline, command=command, measured=measured)
    )  # fmt: skip


def page_of_rewritten(
    rewritten: Rewritten, *, pipeline: str | None = None, command: str = "", measured: MeasuredPeaks | None = None
) -> str:
    """The same of what ``rewrite`` returns."""
    return page_of_snapshots(
        rewritten.snapshots, rewritten.records, pipeline=pipeline, command=command, measured=measured
    )  # fmt: skip


def page_of_story(story: Story) -> str:
    """The page: one HTML file in ASCII that needs no network, opens from a folder, and runs no script but its own."""
    data = page_data(story)
    style, script = _asset("page.css"), _script()
    pieces = {
        "title": safe(f"{data['title']} · graphopt"),
        "sentence": safe(data["sentence"]),
        "policy": _policy(script, style),
        "style": style,
        "script": script,
        "data": _json(data),
    }
    head, *rest = _asset("page.html").split("{{")
    parts = [head, *(pieces[name] + tail for name, tail in (part.split("}}", 1) for part in rest))]
    return "".join(parts).encode("ascii", "xmlcharrefreplace").decode("ascii")


def _asset(name: str) -> str:
    return (files("graphopt.report.page") / "assets" / name).read_text(encoding="utf-8")


def _script() -> str:
    """All scripts in one scope, in ASCII: no encoding on the way can change what the policy's hash is of."""
    body = "\n".join(_asset(name) for name in SCRIPTS)
    body = "".join(c if ord(c) < 128 else f"\\u{ord(c):04x}" for c in body)
    return f'(() => {{\n"use strict";\n{body}}})();\n'


def _policy(script: str, style: str) -> str:
    """Nothing may be loaded, and only this script and these styles apply."""
    parts = {"default-src": "'none'", "script-src": _hash(script), "style-src": _hash(style), "base-uri": "'none'"}
    return "; ".join(f"{name} {value}" for name, value in {**parts, "form-action": "'none'"}.items())


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode('ascii')}'"


def _json(data: dict[str, Any]) -> str:
    """Data as the content of a script element: JSON in which no character means anything to HTML."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character, escape in _UNSAFE.items():
        text = text.replace(character, escape)
    return text
