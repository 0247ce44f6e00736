"""The command line: parse, call, print."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import graphopt
from graphopt.commands import compare, plan
from graphopt.commands.output import (
    check_output,
    format_of,
    output_arguments,
    print_json,
    print_text,
    program_title,
    records_text,
    report_passes,
    two_formats,
    write_output,
)
from graphopt.commands.programs import (
    before_passes,
    program_arguments,
    rewritten_program,
    stage_argument,
    target_argument,
)
from graphopt.errors import GraphoptError
from graphopt.names import match_names
from graphopt.pipeline import Pipeline, available_passes, find_pass
from graphopt.program import Program
from graphopt.report import candidates, catalogue, memory, precision, tables, terminal
from graphopt.report.snapshots import records_json, snapshots_json, snapshots_text
from graphopt.values import format_bytes

__all__ = ["main"]

_COMMENT = {"text": "#", "python": "#", "dot": "//"}
"""How a header line between the programs of ``dump --after-each`` starts, by format."""


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
    handler.setFormatter(logging.Formatter("warning: %(message)s"))
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
    if options.command is _tensors and not any(text.startswith("-") for text in rest):
        options.patterns += rest  # argparse leaves out patterns that come after an option
    elif rest:
        options.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    problem = options.problem(options)
    if problem:
        options.parser.error(problem)
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="graphopt",
        description="Look at a PyTorch training step as one program, and at what passes make of it.",
        epilog="Exit codes: 0 fine, 1 an error in the target or the passes, 2 wrong arguments.",
    )
    parser.add_argument("--version", action="version", version=f"graphopt {graphopt.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(command: Callable[[argparse.Namespace], None], name: str, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False)
        added.add_argument("--json", action="store_true", help="print data for machines")
        added.add_argument("--traceback", action="store_true", help="show where in Python an error comes from")
        added.set_defaults(command=command, parser=added, problem=lambda options: "")
        return added

    passes = add(_passes, "passes", "list the installed passes with their options, or explain one")
    passes.add_argument("name", nargs="?", metavar="NAME", help="a pass to explain")
    _tensors_arguments(add(_tensors, "tensors", "list the tensors of a program: names, bytes, where they come from"))
    _dump_arguments(add(_dump, "dump", "print a program before, between or after passes"))
    usage = add(_memory, "memory", "show bytes over time and what is alive at the peak")
    program_arguments(usage)
    usage.add_argument("--top", type=_positive, default=10, metavar="N", help="list the N largest (default 10)")
    usage.add_argument("--precision", action="store_true", help=(
        "explain bytes by category with the known formulas of mixed precision, also where no dtype changes"
    ))  # fmt: skip
    program_arguments(add(_diff, "diff", "show what passes change, node by node"), needs_passes=True)
    compare.compare_arguments(
        add(compare.compare, "compare", "run the original and the rewritten program, and list errors tensor by tensor")
    )
    plan.plan_arguments(
        add(plan.plan, "plan", "show what fits into how many bytes at what cost in time, and the plan for each budget")
    )
    return parser


def _tensors_arguments(parser: argparse.ArgumentParser) -> None:
    target_argument(parser)
    parser.add_argument(
        "patterns", nargs="*", metavar="PATTERN", help="names or globs: blocks.*, layers.*::mm, encoder.**"
    )
    stage_argument(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--checkpoints", action="store_true", help="the tensors that separate the network, and the bytes each saves"
    )
    which.add_argument("--saved", action="store_true", help="only what forward keeps for backward")
    parser.add_argument(
        "--min-bytes",
        type=_byte_count,
        default=0,
        metavar="N",
        help="only tensors of N bytes or more (also 64kB, 1MB)",
    )
    parser.set_defaults(passes="", verify="structure")


def _dump_arguments(parser: argparse.ArgumentParser) -> None:
    program_arguments(parser)
    parser.add_argument("--after-each", action="store_true", help="print the program after capture and after each pass")
    output_arguments(parser, ("text", "python", "dot", "svg", "json"))
    parser.set_defaults(problem=_dump_problem)


def _dump_problem(options: argparse.Namespace) -> str:
    if options.after_each and format_of(options) == "svg":
        return "one svg holds one program: give --after-each with another format"
    return two_formats(options)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _byte_count(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMG]?)B?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes: write 65536, 64kB, 1.5MB or 2GB")
    return round(float(match[1]) * {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}[match[2]])


# --- commands --------------------------------------------------------------------------------------------------------


def _passes(options: argparse.Namespace) -> None:
    found = [find_pass(options.name)] if options.name else list(available_passes().values())
    if options.json:
        print_json(catalogue.passes_json(found))
    else:
        print_text(catalogue.passes_text(found, whole=options.name is not None))


def _tensors(options: argparse.Namespace) -> None:
    if options.checkpoints and options.stage == "forward":
        raise GraphoptError("--checkpoints counts what backward reads: use --stage joint or --stage step")
    program = rewritten_program(options).program
    if options.checkpoints:
        known = {found.name: found for found in program.checkpoint_candidates() if found.bytes >= options.min_bytes}
        rows = match_names(options.patterns, known, "checkpoint candidate") if options.patterns else known
        chosen = list(rows.values())
        if options.json:
            print_json({**program_title(program), "checkpoints": candidates.candidates_json(chosen)})
        else:
            print_text(candidates.candidates_text(chosen))
        return
    filters: tables.TensorFilters = {"min_bytes": options.min_bytes}
    if options.saved:
        filters["saved"] = True
    if options.json:
        print_json({**program_title(program), "tensors": tables.tensors_json(program, options.patterns, **filters)})
    else:
        print_text(str(tables.tensors_table(program, options.patterns, **filters)))


def _dump(options: argparse.Namespace) -> None:
    form = format_of(options)
    check_output(options)
    rewritten = rewritten_program(options)
    if not options.after_each:
        report_passes(rewritten)
    if form == "json":
        data = snapshots_json(rewritten) if options.after_each else rewritten.program.to_json()
        text = json.dumps(data, indent=2)
    elif options.after_each:
        text = snapshots_text(rewritten, lambda program: _render(program, form), _COMMENT[form])
    else:
        text = _render(rewritten.program, form)
    write_output(options, text)


def _memory(options: argparse.Namespace) -> None:
    pipeline = Pipeline(options.passes)
    rewritten = rewritten_program(options, pipeline)
    before, after = before_passes(rewritten), rewritten.program
    level = precision.level_of(pipeline.passes)
    explain = after.stage != "forward" and (options.precision or precision.changes_precision(before, after))
    if options.json:
        pair = {"before": memory.memory_json(before), "after": memory.memory_json(after)}
        data: dict[str, Any] = {**pair} if rewritten.records else {"program": pair["after"]}
        data |= {"precision": precision.precision_json(before, after, level)} if explain else {}
        print_json({**program_title(after), "passes": records_json(rewritten.records), **data})
        return
    width = terminal.terminal_width()
    text = memory.memory_text(after, options.top, width)
    explained = f"==== precision\n{precision.precision_text(before, after, level)}" if explain else ""
    if not rewritten.records:
        print_text(text, explained)
        return
    old, new = before.memory().peak_bytes, after.memory().peak_bytes
    print_text(
        records_text(rewritten),
        f"peak {format_bytes(old)} -> {format_bytes(new)} ({(new - old) / old:+.1%})\n",
        f"==== before\n{memory.memory_text(before, options.top, width)}",
        f"==== after\n{text}",
        explained,
    )


def _diff(options: argparse.Namespace) -> None:
    rewritten = rewritten_program(options)
    text = before_passes(rewritten).diff(rewritten.program)
    if options.json:
        print_json({**program_title(rewritten.program), "passes": records_json(rewritten.records), "diff": text})
    else:
        print_text(records_text(rewritten), text)


def _render(program: Program, form: str) -> str:
    return {"text": program.to_text, "python": program.to_python, "dot": program.to_dot, "svg": program.to_svg}[form]()
