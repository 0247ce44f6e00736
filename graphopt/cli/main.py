"""The command line: parse, call, print."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence

import graphopt
from graphopt.cli import cache, compare, memory, plan, tensors, view
from graphopt.cli.command_parser import CommandParser, commands_of
from graphopt.cli.completion import SHELLS, completion_script
from graphopt.cli.output import (
    check_output,
    format_of,
    json_data,
    output_arguments,
    print_json,
    print_text,
    program_title,
    records_text,
    report_passes,
    two_formats,
    write_output,
)
from graphopt.cli.programs import (
    before_passes,
    program_arguments,
    rewritten_program,
)
from graphopt.errors import GraphoptError
from graphopt.ir.formats import available_formats, find_format
from graphopt.ir.text import aligned
from graphopt.report.console import terminal
from graphopt.report.page import page_of_rewritten
from graphopt.report.text import pass_table
from graphopt.report.text.after_each_pass import after_each_lines
from graphopt.report.text.snapshots import records_json, snapshots_json, snapshots_text
from graphopt.rewriting.pipeline import Pipeline
from graphopt.rewriting.registry import available_passes, find_pass

__all__ = ["main"]

_WHOLE = ("html", "json")
"""Formats in which one file holds what all passes did, as ``dump --after-each`` asks for."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments after the program's name; the process's own by default.

    Returns:
        0 where all went well, 1 for an error that graphopt found (its message is on stderr), 2 for arguments that do
        not parse, 130 for an interruption from the keyboard.
    """
    try:
        options = _parse(argv)
    except SystemExit as stop:  # argparse has printed help, the version or what is wrong
        return stop.code if isinstance(stop.code, int) else 0
    try:
        with _warnings_on_stderr():
            options.command(options)
        sys.stdout.flush()
    except GraphoptError as error:
        if options.traceback:
            traceback.print_exception(error)
        else:
            terminal.write_error(error)
        return 1
    except BrokenPipeError:
        _leave_stdout()
    except KeyboardInterrupt:
        return 130
    return 0


def _leave_stdout() -> None:
    """Whoever read stdout has closed it: send what is still buffered nowhere, so that the exit is silent."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def _warnings_on_stderr() -> Iterator[None]:
    """The logger's records at WARNING as lines on stderr; errors are left to ``main``, which prints the exception."""
    logger = logging.getLogger("graphopt")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(terminal.LogFormatter("graphopt: warning: %(message)s"))
    handler.addFilter(lambda record: record.levelno == logging.WARNING)
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate


# --- arguments -------------------------------------------------------------------------------------------------------


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options; exits the way argparse does where the arguments are wrong."""
    options, rest = _parser().parse_known_args(argv)
    if options.command is tensors.tensors and not any(text.startswith("-") for text in rest):
        options.patterns += rest  # argparse leaves out patterns that come after an option
    elif rest:
        options.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    problem = options.problem(options)
    if problem:
        options.parser.error(problem)
    return options


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="graphopt",
        description="Look at a PyTorch training step as one program, and at what passes make of it.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"graphopt {graphopt.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(command: Callable[[argparse.Namespace], None], name: str, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False)
        added.add_argument("--json", action="store_true", help="print data for machines")
        added.add_argument("--traceback", action="store_true", help="show where in Python an error comes from")
        added.set_defaults(command=command, parser=added, problem=lambda options: "")
        return added

    passes = add(_passes, "passes", "list the installed passes, or explain one with its options")
    passes.add_argument("name", nargs="?", metavar="NAME", help="a pass to explain")
    passes.add_argument("--long", action="store_true", help="all of them with their options")
    add(_formats, "formats", "list the formats that a program can be written in")
    tensors.tensors_arguments(
        add(tensors.tensors, "tensors", "list the tensors of a program: names, bytes, where they come from")
    )
    _dump_arguments(add(_dump, "dump", "print a program before, between or after passes"))
    memory.memory_arguments(add(memory.memory, "memory", "show bytes over time and what is alive at the peak"))
    program_arguments(add(_diff, "diff", "show what passes change, node by node"), needs_passes=True)
    compare.compare_arguments(
        add(compare.compare, "compare", "run the original and the rewritten program, and list errors tensor by tensor")
    )
    view.view_arguments(
        add(view.view, "view", "write all that passes make of a program as one interactive page (HTML, no network)")
    )
    plan.plan_arguments(
        add(plan.plan, "plan", "show what fits into how many bytes at what cost in time, and the plan for each budget")
    )
    cache.cache_arguments(
        add(cache.cache, "cache", "list the captures that are kept beyond the process, explain misses, remove them")
    )
    shells = add(_completion, "completion", "print a script that completes commands and options in a shell")
    shells.add_argument("shell", choices=SHELLS, help="source the output, as in: source <(graphopt completion bash)")
    helped = add(_help, "help", "explain a command, or list all")
    helped.add_argument("about", nargs="?", metavar="COMMAND", choices=tuple(commands.choices), help="what to explain")
    return parser


_EPILOG = """\
graphopt help COMMAND explains one. A TARGET is pkg.module:factory or
path/file.py:factory; its factory returns (model, example_inputs).

exit codes:
  0    fine
  1    a check failed: an error in the target or in passes, a budget that no
       plan meets, a tolerance that is exceeded; the message is on stderr
  2    wrong use: arguments that do not parse or do not go together
  130  interrupted from the keyboard

environment:
  GRAPHOPT_LOG       off, error, warning, info or debug: what goes to stderr
                     where it is no terminal and logging is not set up (default:
                     info, one line for each capture)
  GRAPHOPT_OVERVIEW  1 prints the overview at the start of training anywhere,
                     0 nowhere (default: on a terminal)
  GRAPHOPT_DUMP      a folder in which each run leaves its programs
  GRAPHOPT_CACHE     a folder for what outlives a process: captures of whole
                     steps, and measured costs (GRAPHOPT_CACHE_PROGRAMS=0: only
                     those)
"""


def _dump_arguments(parser: argparse.ArgumentParser) -> None:
    program_arguments(parser)
    parser.add_argument("--after-each", action="store_true", help=(
        "print the program after capture and after each pass (html holds them in any case)"
    ))  # fmt: skip
    output_arguments(parser, tuple(available_formats()))
    parser.set_defaults(problem=_dump_problem)


def _dump_problem(options: argparse.Namespace) -> str:
    form = format_of(options)
    if options.after_each and form not in _WHOLE and not find_format(form).comment:
        return f"one {form} holds one program: give --after-each with another format"
    return two_formats(options)


# --- commands --------------------------------------------------------------------------------------------------------


def _passes(options: argparse.Namespace) -> None:
    found = [find_pass(options.name)] if options.name else list(available_passes().values())
    if options.json:
        print_json({"passes": pass_table.passes_json(found)})
    else:
        long = options.long or options.name is not None
        whole = options.name is not None
        print_text(pass_table.passes_text(found, whole=whole) if long else pass_table.passes_list(found))


def _help(options: argparse.Namespace) -> None:
    parser = _parser()
    print_text((commands_of(parser)[options.about] if options.about else parser).format_help())


def _completion(options: argparse.Namespace) -> None:
    print_text(completion_script(options.shell, commands_of(_parser())))


def _dump(options: argparse.Namespace) -> None:
    form = format_of(options)
    check_output(options)
    rewritten = rewritten_program(options)
    if not options.after_each:
        report_passes(rewritten)
    if form == "html":
        text = page_of_rewritten(
            rewritten, pipeline=str(Pipeline(options.passes)), command=view.view_command(options)
        )  # fmt: skip
    elif form == "json":
        data = snapshots_json(rewritten) if options.after_each else rewritten.program.to_json()
        text = json.dumps(json_data(data), indent=2)
    elif options.after_each and form == "text" and options.output is None and terminal.is_terminal(sys.stdout):
        terminal.write_spans(after_each_lines(rewritten), sys.stdout)
        return
    elif options.after_each:
        text = snapshots_text(rewritten, find_format(form).text, find_format(form).comment)
    else:
        text = find_format(form).text(rewritten.program)
    write_output(options, text)


def _diff(options: argparse.Namespace) -> None:
    rewritten = rewritten_program(options)
    text = before_passes(rewritten).diff(rewritten.program)
    if options.json:
        print_json({**program_title(rewritten.program), "passes": records_json(rewritten.records), "diff": text})
    else:
        print_text(records_text(rewritten), text)


def _formats(options: argparse.Namespace) -> None:
    found = available_formats().values()
    if options.json:
        print_json({"formats": [{"name": form.name, "suffix": form.suffix, "help": form.help} for form in found]})
    else:
        print_text("\n".join(aligned([(form.name, form.suffix, form.help) for form in found])))
