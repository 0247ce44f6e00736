"""A page for each pass that comes with graphopt: what it does, its options, its text form, what goes together."""

from __future__ import annotations

import inspect
import re
from html import escape
from typing import Any

from pdoc import docstrings
from pdoc.render_helpers import to_html

from graphopt.report.text.pass_table import passes_json
from graphopt.rewriting.pass_ import Pass
from graphopt.rewriting.registry import available_passes
from tests.support.documentation.pages import Entry, Page, plain_text

__all__ = ["built_in_passes", "docstring_html", "pass_page"]

_NUMERICS = {
    "bitwise": "results equal those without the pass, to the last bit",
    "tolerant": "results differ within the tolerance stated above",
    "changes": "results differ by design",
}
_STAGES = {
    "forward": "the forward program, before it is differentiated",
    "joint": "the program of forward and backward",
    "step": "the program of the whole step, with the update",
    "last": "the program that runs: forward and backward of a drop-in model, or the whole step",
}


def built_in_passes() -> list[type[Pass]]:
    """The passes that come with graphopt, by name."""
    return [cls for cls in available_passes().values() if cls.__module__.startswith("graphopt.passes.")]


def docstring_html(doc: str) -> str:
    """HTML of a docstring in Google's style."""
    return str(to_html(docstrings.convert(doc, "google", None)))


def pass_page(cls: type[Pass]) -> Page:
    """The page of a pass."""
    (data,) = passes_json([cls])
    doc = inspect.getdoc(cls) or ""
    described, doc = _take_arguments(doc)
    body = "\n".join(
        [
            f"<h1>{cls.__name__}</h1>",
            docstring_html(doc),
            '<p>The example uses <a href="../index.html#examples">names that all examples use</a>.</p>',
            '<h2 id="options">Options</h2>',
            _options(data["options"], described),
            '<h2 id="contract">How it is given, and what it goes together with</h2>',
            _facts(cls, data),
        ]
    )
    path = f"passes/{cls.name}.html"
    entries = [
        Entry(cls.__name__, f"pass {cls.name}", path, plain_text(body)),
        *(
            Entry(f"{cls.__name__}({name.replace('-', '_')}=)", "option", f"{path}#option-{name}", text)
            for name, text in described.items()
        ),
    ]
    return Page(cls.__name__, "Passes", path, body, entries)


def _take_arguments(doc: str) -> tuple[dict[str, str], str]:
    """What the docstring says of each argument, and the docstring without that."""
    block = re.search(r"^Args:\n((?:[ \t]+.*\n?|\n)*)", doc, re.MULTILINE)
    if block is None:
        return {}, doc
    items = re.findall(r"^ {4}(\w+):[ \n](.*(?:\n {5,}.*|\n(?=\n {5}))*)", block[1], re.MULTILINE)
    return {name.replace("_", "-"): " ".join(text.split()) for name, text in items}, doc[: block.start()] + doc[
        block.end() :
    ]


def _options(options: list[dict[str, Any]], described: dict[str, str]) -> str:
    if not options:
        return "<p>It has no options.</p>"
    rows = [
        (
            f'<code id="option-{option["name"]}">{option["name"]}</code>',
            f"<code>{escape(option['type'])}</code>",
            "required" if option["required"] else f"<code>{escape(repr(option['default']))}</code>",
            docstring_html(described.get(option["name"], "")),
        )
        for option in options
    ]
    head = "<tr><th>option</th><th>type</th><th>default</th><th>meaning</th></tr>"
    return f"<table>{head}{''.join(_row(row) for row in rows)}</table>"


def _facts(cls: type[Pass], data: dict[str, Any]) -> str:
    text_form = cls.name + (f"{{{' '.join(o['name'] + '=…' for o in data['options'])}}}" if data["options"] else "")
    stages = [cls.stage, *cls.also]
    facts = [
        ("import", f"<code>from graphopt.passes import {cls.__name__}</code>"),
        ("as text", f"<code>{escape(text_form)}</code>"),
        ("rewrites", "; then ".join(f"{stage}: {_STAGES[stage]}" for stage in stages)),
        ("numerics", f"{cls.numerics}: {_NUMERICS[cls.numerics]}"),
        ("runs after", _named(cls.after)),
        ("needs", _named(cls.requires)),
        ("not together with", _named(cls.conflicts)),
        ("a model captured in parts", "is rewritten part by part" if cls.in_parts else "is refused"),
        ("inputs and outputs of the program", "may differ" if cls.changes_signature else "stay as they are"),
        ("random numbers", "are drawn for itself too" if cls.draws else "stay as they are"),
    ]
    return f"<table>{''.join(_row((f'<b>{name}</b>', value)) for name, value in facts)}</table>"


def _named(names: tuple[str, ...]) -> str:
    return ", ".join(f"<code>{name}</code>" for name in names) or "none"


def _row(cells: tuple[str, ...]) -> str:
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
