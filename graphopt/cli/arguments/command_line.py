"""What the command line understands; building it needs no torch, so that help and completion come at once."""

from __future__ import annotations

import argparse
import textwrap

from graphopt.cli.arguments.arguments import format_of, output_arguments, program_arguments, two_formats
from graphopt.cli.arguments.command_arguments import (
    advise_arguments,
    cache_arguments,
    compare_arguments,
    memory_arguments,
    plan_arguments,
    profile_arguments,
    tensors_arguments,
    view_arguments,
)
from graphopt.cli.arguments.command_parser import CommandParser
from graphopt.cli.arguments.completion import SHELLS
from graphopt.cli.arguments.exchange_arguments import link_arguments, link_problem
from graphopt.cli.arguments.exit_codes import EXIT_CODES
from graphopt.ir.provided.formats import find_format, format_names
from graphopt.ir.version import VERSION

__all__ = ["command_line"]

_WHOLE = ("html", "json")
"""Formats in which one file holds what all passes did, as ``dump --after-each`` asks for."""


def command_line() -> argparse.ArgumentParser:
    """The parser of all commands; ``options.command`` is where the function of one is, ``module:function``."""
    parser = CommandParser(
        prog="graphopt",
        description="Look at a PyTorch training step as one program, and at what passes make of it.",
        epilog=_epilog(),
    )
    parser.add_argument("--version", action="version", version=f"graphopt {VERSION}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(command: str, name: str, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False)
        added.add_argument("--json", action="store_true", help="print data for machines")
        added.add_argument("--traceback", action="store_true", help="show where in Python an error comes from")
        added.set_defaults(command=command, parser=added, problem=lambda options: "")
        return added

    passes = add("looking:passes", "passes", "list the installed passes, or explain one with its options")
    passes.add_argument("name", nargs="?", metavar="NAME", help="a pass to explain")
    passes.add_argument("--long", action="store_true", help="all of them with their options")
    add("looking:formats", "formats", "list the formats that a program can be written in")
    tensors_arguments(
        add("tensors:tensors", "tensors", "list the tensors of a program: names, bytes, where they come from")
    )
    _dump_arguments(add("looking:dump", "dump", "print a program before, between or after passes"))
    memory_arguments(add("memory:memory", "memory", "show bytes over time and what is alive at the peak"))
    _diff_arguments(add("looking:diff", "diff", "show what passes change, node by node"))
    compare_arguments(
        add(
            "compare:compare", "compare", "run the original and the rewritten program, and list errors tensor by tensor"
        )
    )
    view_arguments(
        add("view:view", "view", "write all that passes make of a program as one interactive page (HTML, no network)")
    )
    plan_arguments(
        add(
            "plan:plan", "plan", "show what fits into how many bytes at what cost in time, and the plan for each budget"
        )
    )
    advise_arguments(
        add("advise:advise", "advise", "choose the passes for a machine: what fits, and is predicted to be fastest")
    )
    cache_arguments(
        add("cache:cache", "cache", "list the captures that are kept beyond the process, explain misses, remove them")
    )
    profile_arguments(
        add(
            "profile:profile",
            "profile",
            "measure what this machine can do, and write it to a file for --cost and --device",
        )
    )
    shells = add("words:completion", "completion", "print a script that completes commands and options in a shell")
    shells.add_argument("shell", choices=SHELLS, help="source the output, as in: source <(graphopt completion bash)")
    helped = add("words:help_", "help", "explain a command, or list all")
    helped.add_argument("about", nargs="?", metavar="COMMAND", choices=tuple(commands.choices), help="what to explain")
    return parser


_EPILOG = """\
graphopt help COMMAND explains one. A TARGET is pkg.module:factory or
path/file.py:factory; its factory returns (model, example_inputs).

exit codes:
{codes}

environment:
  GRAPHOPT_LOG       off, error, warning, info or debug: what goes to stderr
                     where it is no terminal and logging is not set up (default:
                     info: each capture, and what takes long)
  GRAPHOPT_OVERVIEW  1 prints the overview at the start of training anywhere,
                     0 nowhere (default: on a terminal)
  GRAPHOPT_TRACEBACK full shows every frame of an error, and each of its causes
                     (default: where it left graphopt, and lines of your own)
  GRAPHOPT_DUMP      a folder in which each run leaves its programs
  GRAPHOPT_CACHE     a folder for what outlives a process: captures of whole
                     steps, and measured costs (GRAPHOPT_CACHE_PROGRAMS=0: only
                     those)
"""


def _epilog() -> str:
    codes = (textwrap.wrap(f"{code:<5}{text}", 78, subsequent_indent=" " * 5) for code, text in EXIT_CODES.items())
    return _EPILOG.format(codes=textwrap.indent("\n".join(line for lines in codes for line in lines), "  "))


def _dump_arguments(parser: argparse.ArgumentParser) -> None:
    program_arguments(parser)
    parser.add_argument(
        "--after-each",
        action="store_true",
        help=("print the program after capture and after each pass (html holds them in any case)"),
    )
    output_arguments(parser, format_names())
    link_arguments(parser)
    parser.set_defaults(problem=_dump_problem)


def _dump_problem(options: argparse.Namespace) -> str:
    form = format_of(options)
    if options.after_each and form not in _WHOLE and not find_format(form).comment:
        return f"one {form} holds one program: give --after-each with another format"
    return two_formats(options) or link_problem(options)


def _diff_arguments(parser: argparse.ArgumentParser) -> None:
    program_arguments(parser)
    parser.set_defaults(problem=_diff_problem)


def _diff_problem(options: argparse.Namespace) -> str:
    if options.passes or options.config or options.budget:
        return ""
    return "a diff is between a program and what passes make of it: give -p/--passes, --config or -b/--budget"
