"""``graphopt passes``, ``formats``, ``dump`` and ``diff``: what there is, and programs as they are."""

from __future__ import annotations

import argparse
import json
import sys

from graphopt.cli.arguments.arguments import format_of
from graphopt.cli.arguments.exit_codes import wrong_use
from graphopt.cli.commands.view import view_command
from graphopt.cli.target.output import (
    json_data,
    print_json,
    print_report,
    print_text,
    program_title,
    records_text,
    report_passes,
    write_output,
)
from graphopt.cli.target.programs import before_passes, ranks, rewritten_program
from graphopt.ir.provided.formats import available_formats, find_format
from graphopt.ir.words.columns import aligned, filled
from graphopt.report.console import terminal
from graphopt.report.page import page_of_rewritten
from graphopt.report.text import pass_table
from graphopt.report.text.after_each_pass import after_each_lines
from graphopt.report.text.snapshots import records_json, snapshots_json, snapshots_text
from graphopt.rewriting.distributed.prediction.collective import LINK
from graphopt.rewriting.distributed.prediction.link import Link, parse_bandwidth
from graphopt.rewriting.registry import available_passes, find_pass

__all__ = ["diff", "dump", "formats", "passes"]


def passes(options: argparse.Namespace) -> None:
    """Run the command ``passes``."""
    with wrong_use():
        found = [find_pass(options.name)] if options.name else list(available_passes().values())
    if options.json:
        print_json({"passes": pass_table.passes_json(found)})
    else:
        long = options.long or options.name is not None
        whole = options.name is not None
        print_report(pass_table.passes_text(found, whole=whole) if long else pass_table.passes_list(found))


def dump(options: argparse.Namespace) -> None:
    """Run the command ``dump``."""
    form = format_of(options)
    rewritten = rewritten_program(options)
    if not options.after_each:
        report_passes(rewritten)
    if form == "html":
        text = page_of_rewritten(rewritten, pipeline=str(rewritten.pipeline), command=view_command(options))
    elif form == "json":
        data = snapshots_json(rewritten) if options.after_each else rewritten.program.to_json()
        text = json.dumps(json_data(data), indent=2)
    elif options.after_each and form == "text" and options.output is None and terminal.is_terminal(sys.stdout):
        terminal.write_spans(after_each_lines(rewritten), sys.stdout)
        return
    elif options.after_each:
        text = snapshots_text(rewritten, find_format(form).text, find_format(form).comment)
    elif form in ("ranks", "perfetto"):
        with ranks(options):  # the ones that passes have rewritten the program for
            text = find_format(form).text(rewritten.program, link=_link(options))
    else:
        text = find_format(form).text(rewritten.program)
    write_output(options, text)


def _link(options: argparse.Namespace) -> Link:
    """What joins ranks, as ``--bandwidth`` and ``--latency`` say."""
    bandwidth = parse_bandwidth(LINK) if options.bandwidth is None else options.bandwidth
    return Link(bandwidth, options.latency or 0.0)


def diff(options: argparse.Namespace) -> None:
    """Run the command ``diff``."""
    rewritten = rewritten_program(options)
    text = before_passes(rewritten).diff(rewritten.program)
    if options.json:
        print_json({**program_title(rewritten.program), "passes": records_json(rewritten.records), "diff": text})
    else:
        print_text(filled(records_text(rewritten)), text)


def formats(options: argparse.Namespace) -> None:
    """Run the command ``formats``."""
    found = available_formats().values()
    if options.json:
        print_json({"formats": [{"name": form.name, "suffix": form.suffix, "help": form.help} for form in found]})
    else:
        print_report("\n".join(aligned([(form.name, form.suffix, form.help) for form in found])))
