"""``graphopt view``: everything that passes make of a program as one page to look at in a browser."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
import webbrowser

from graphopt.cli.target.output import print_json, program_title, report_passes, write_output
from graphopt.cli.target.programs import pipeline_of, rewritten_program
from graphopt.report.console import terminal
from graphopt.report.page import page_of_rewritten
from graphopt.report.text.snapshots import records_json

__all__ = ["view", "view_command"]


def view_command(options: argparse.Namespace) -> str:
    """The command line that makes the page of a command's target, passes, budget and stage again."""
    words = ["graphopt", "view", options.target]
    if options.passes:
        words += ["--passes", options.passes]
    if options.config is not None:
        words += ["--config", str(options.config)]
    if options.allow_write is not None:
        words += ["--allow-write", str(options.allow_write)]
    if options.budget:
        words += ["--budget", options.budget]
    if options.cost:
        words += ["--cost", options.cost]
    if options.time_limit:
        words += ["--time-limit", f"{options.time_limit:g}"]
    if options.stage:
        words += ["--stage", options.stage]
    return shlex.join(words)


def view(options: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        GraphoptError: for a target or passes that are wrong, or a file that cannot be written.
    """
    pipeline = pipeline_of(options)
    rewritten = rewritten_program(options, pipeline)
    report_passes(rewritten)
    # tracing the optimizer once more, for the program without passes, may let the user's code print again
    with contextlib.redirect_stdout(sys.stderr):
        page = page_of_rewritten(rewritten, pipeline=str(pipeline), command=view_command(options))
    write_output(options, page)
    if options.json:
        size = options.output.stat().st_size
        passes = records_json(rewritten.records)
        print_json({**program_title(rewritten.program), "file": str(options.output), "bytes": size, "passes": passes})
    if options.open and not webbrowser.open(options.output.resolve().as_uri()):
        terminal.write(f"warning: there is no browser here; open {options.output} yourself", sys.stderr)
