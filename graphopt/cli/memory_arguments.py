"""The arguments of ``graphopt memory``."""

from __future__ import annotations

import argparse

from graphopt.cli.arguments import format_of, output_arguments, positive, program_arguments, two_formats

__all__ = ["memory_arguments"]

_EPILOG = """\
With --device the report has what the device's allocator reserves beside what is alive: torch's caching allocator
rounds requests up, asks for whole segments and keeps what is freed. The program's requests are replayed through a
simulation of it, in program order and two runs long, with the workspaces of libraries; "fits" compares what is reserved
and what is outside of the allocator with the device's memory.

On a terminal the chart stacks the categories in colours. svg is a picture for papers and pages that needs nothing else;
png is the same through rsvg-convert or inkscape, whichever is installed.

examples:
  graphopt memory examples/train_gpt.py:factory \\
    --passes "recompute{checkpoints=blocks.*}" --format svg -o memory.svg
  graphopt memory examples/train_gpt.py:factory --device h100-80gb
"""


def memory_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command, and an example."""
    parser.epilog = _EPILOG
    program_arguments(parser)
    parser.add_argument(
        "--limit", "--top", dest="limit", type=positive, default=10, metavar="N", help="list the N largest (default 10)"
    )
    parser.add_argument(
        "--precision",
        action="store_true",
        help="explain bytes by category with the known formulas of mixed precision, also where no dtype changes",
    )
    output_arguments(parser, ("text", "json", "svg", "png"))
    parser.set_defaults(problem=_problem)


def _problem(options: argparse.Namespace) -> str:
    if format_of(options) == "png" and options.output is None:
        return "a png is no text: give a file with -o FILE"
    return two_formats(options)
