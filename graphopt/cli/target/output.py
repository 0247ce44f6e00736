"""What commands write: to stdout or a file, as text or as data, and what the passes did."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

from graphopt.errors import GraphoptError
from graphopt.ir.program import Program
from graphopt.ir.words.columns import filled
from graphopt.report.console import terminal
from graphopt.rewriting.pass_ import record_lines
from graphopt.runtime.programs.rewrite import Rewritten

__all__ = [
    "JSON_SCHEMA",
    "json_data",
    "print_json",
    "print_report",
    "print_text",
    "program_title",
    "records_text",
    "report_passes",
    "write_output",
]

JSON_SCHEMA = 1
"""Of what ``--json`` prints: it grows by one when a key goes away or changes its meaning, not for a new key."""


def write_output(options: argparse.Namespace, text: str) -> None:
    """Write to the file of ``--output`` and say so on stderr, or to stdout.

    Raises:
        GraphoptError: where the file cannot be written.
    """
    path = options.output
    if path is None:
        print_text(text)
        return
    try:
        path.write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")
    except OSError as error:
        raise GraphoptError(f"cannot write {path}: {error.strerror or error}") from error
    terminal.write(f"wrote {path} ({path.stat().st_size} bytes)", sys.stderr)


def print_text(*pieces: str) -> None:
    """Write what is not empty to stdout, with colours where it is a terminal."""
    terminal.write("\n".join(piece for piece in pieces if piece), sys.stdout, style=terminal.line_style)


def json_data(data: Mapping[str, Any]) -> dict[str, Any]:
    """What a command says to machines: the number of its form, ``schema``, and the data, which may have its own."""
    return {"schema": JSON_SCHEMA, **data}


def print_report(*pieces: str) -> None:
    """The same, with sentences broken at the width of the terminal; not for programs, whose lines stay."""
    print_text(*map(filled, pieces))


def print_json(data: Mapping[str, Any]) -> None:
    """Write data with the number of its form to stdout."""
    terminal.write(json.dumps(json_data(data), indent=2), sys.stdout)


def program_title(program: Program) -> dict[str, str]:
    """What data of a program begins with."""
    return {"title": program.title, "stage": program.stage}


def records_text(rewritten: Rewritten) -> str:
    """What the passes did, as comments."""
    return "\n".join(f"# {line}" for record in rewritten.records for line in record_lines(record))


def report_passes(rewritten: Rewritten) -> None:
    """What the passes did, on stderr; those that did nothing are in the warnings, where they should have."""
    for record in rewritten.records:
        if record.changed or record.changed.satisfied:
            terminal.write("\n".join(record_lines(record)), sys.stderr)
