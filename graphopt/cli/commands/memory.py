"""``graphopt memory``: bytes over time and what is alive at the peak, as text, as data, or as a picture."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from graphopt.cli.arguments.arguments import format_of
from graphopt.cli.target.output import (
    json_data,
    print_report,
    program_title,
    records_text,
    report_passes,
    write_output,
)
from graphopt.cli.target.programs import before_passes, pipeline_of, rewritten_program
from graphopt.ir.program import Program
from graphopt.ir.words.columns import filled
from graphopt.ir.words.written_units import format_bytes
from graphopt.report.console import terminal
from graphopt.report.pictures.images import png_of_svg, write_bytes
from graphopt.report.pictures.memory_timeline import timeline_svg
from graphopt.report.text import precision_table as precision
from graphopt.report.text.memory_table import memory_json, memory_spans, memory_text
from graphopt.report.text.snapshots import records_json
from graphopt.runtime.programs.rewrite import Rewritten

__all__ = ["memory"]


def memory(options: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        GraphoptError: for a target or passes that are wrong; for a file that cannot be written; for a png where
            nothing is installed that makes one.
    """
    pipeline = pipeline_of(options)
    rewritten = rewritten_program(options, pipeline)
    before, after = before_passes(rewritten), rewritten.program
    form = format_of(options)
    if form in ("svg", "png"):
        report_passes(rewritten)
        picture = _picture(rewritten, before, after)
        if form == "svg":
            write_output(options, picture)
        else:
            write_bytes(options.output, png_of_svg(picture))
        return
    level = precision.level_of(pipeline.passes)
    explain = after.stage != "forward" and (options.precision or precision.changes_precision(before, after))
    if form == "json":
        more = {"precision": precision.precision_json(before, after, level)} if explain else {}
        write_output(options, json.dumps(json_data(_data(rewritten, before, after) | more), indent=2))
        return
    explained = f"==== precision\n{precision.precision_text(before, after, level)}" if explain else ""
    _show(options, rewritten, before, explained)


def _picture(rewritten: Rewritten, before: Program, after: Program) -> str:
    title = f"{after.title or 'program'}, {after.stage} stage"
    changed = before.memory() if rewritten.records else None
    return timeline_svg(after.memory(), before=changed, title=title)


def _data(rewritten: Rewritten, before: Program, after: Program) -> dict[str, Any]:
    data = {"before": memory_json(before), "after": memory_json(after)} if rewritten.records else {}
    shown = data or {"program": memory_json(after)}
    return {**program_title(after), "passes": records_json(rewritten.records), **shown}


def _show(options: argparse.Namespace, rewritten: Rewritten, before: Program, explained: str) -> None:
    """The report as text: of the program before and after, where passes ran."""
    width, after = terminal.terminal_width(), rewritten.program
    colored = options.output is None and terminal.is_terminal(sys.stdout)
    head, programs = "", [("", after)]
    if rewritten.records:
        old, new = before.memory().peak_bytes, after.memory().peak_bytes
        change = f"peak {format_bytes(old)} -> {format_bytes(new)} ({(new - old) / old:+.1%})\n"
        head = "\n".join([records_text(rewritten), change])
        programs = [("==== before\n", before), ("==== after\n", after)]
    if not colored:
        texts = [heading + memory_text(program, options.limit, width) for heading, program in programs]
        write_output(options, filled("\n".join(piece for piece in [head, *texts, explained] if piece)))
        return
    if head:
        print_report(head + "\n")
    for number, (heading, program) in enumerate(programs):
        lines = memory_spans(program, options.limit, width)
        lines = [[(heading.rstrip("\n"), "bold")], *lines] if heading else lines
        terminal.write_spans([[("", "")], *lines] if number else lines, sys.stdout)
    if explained:
        print_report("\n" + explained)
