"""``graphopt tensors``: the tensors of a program, or what separates it, as a table or as data."""

from __future__ import annotations

import argparse
import re
import sys

from graphopt.cli.output import print_json, print_text, program_title
from graphopt.cli.programs import rewritten_program, stage_argument, target_argument
from graphopt.errors import GraphoptError
from graphopt.ir.names import match_names
from graphopt.ir.node import Phase
from graphopt.ir.program import Program
from graphopt.report.console import terminal
from graphopt.report.text import candidate_table as candidates
from graphopt.report.text import tensor_table as tables

__all__ = ["tensors", "tensors_arguments"]

_EPILOG = """\
examples:
  graphopt tensors examples/train_gpt.py:factory "blocks.0.*" --saved
  graphopt tensors examples/train_gpt.py:factory --match "blocks.**" --phase backward --sort bytes --limit 20
"""


def tensors_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command, and examples."""
    parser.epilog = _EPILOG
    target_argument(parser)
    parser.add_argument(
        "patterns", nargs="*", metavar="PATTERN", help="names or globs: blocks.*, layers.*::mm, encoder.**"
    )
    parser.add_argument("--match", action="append", default=[], metavar="GLOB", help="the same; again for several")
    stage_argument(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--checkpoints", action="store_true", help="the tensors that separate the network, and the bytes each saves"
    )
    which.add_argument("--saved", action="store_true", help="only what forward keeps for backward")
    phases = [phase.value for phase in Phase]
    parser.add_argument(
        "--phase", choices=phases, metavar="PHASE", help=f"only tensors made in this phase: {', '.join(phases)}"
    )
    parser.add_argument(
        "--min-bytes",
        type=_byte_count,
        default=0,
        metavar="N",
        help="only tensors of N bytes or more (also 64kB, 1MB)",
    )
    parser.add_argument(
        "--sort",
        choices=("program", "bytes", "name"),
        default="program",
        help="in the order of the program (default), the largest first, or by name",
    )
    parser.add_argument("--limit", type=_positive, metavar="N", help="only the first N; the last line counts the rest")
    parser.set_defaults(passes="", verify="structure", problem=_problem)


def _byte_count(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMG]?)B?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes: write 65536, 64kB, 1.5MB or 2GB")
    return round(float(match[1]) * {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}[match[2]])


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _problem(options: argparse.Namespace) -> str:
    if options.checkpoints and options.phase not in (None, "forward"):
        return f"--checkpoints are tensors of forward: leave out --phase {options.phase}"
    return ""


def tensors(options: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        GraphoptError: for a target that is wrong, a pattern that names nothing, or a phase that the program lacks.
    """
    if options.checkpoints and options.stage == "forward":
        raise GraphoptError("--checkpoints counts what backward reads: use --stage joint or --stage step")
    program = rewritten_program(options).program
    patterns = [*options.patterns, *options.match]
    if options.checkpoints:
        _print_candidates(program, patterns, options)
    else:
        _print_tensors(program, patterns, options)


def _print_candidates(program: Program, patterns: list[str], options: argparse.Namespace) -> None:
    known = {found.name: found for found in program.checkpoint_candidates() if found.bytes >= options.min_bytes}
    named = match_names(patterns, known, "checkpoint candidate") if patterns else known
    chosen, left_out = tables.chosen(list(named.values()), options.sort, options.limit)
    if options.json:
        data = {"checkpoints": candidates.candidates_json(chosen), "left_out": left_out}
        print_json({**program_title(program), **data})
    else:
        print_text(candidates.candidates_text(chosen), _rest(left_out))


def _print_tensors(program: Program, patterns: list[str], options: argparse.Namespace) -> None:
    table = tables.tensors_table(program, patterns, **_filters(options))
    rows, left_out = tables.chosen(table.rows, options.sort, options.limit)
    shown = tables.TensorsTable(tuple(rows))
    if options.json:
        print_json({**program_title(program), "tensors": tables.rows_json(shown.rows), "left_out": left_out})
        return
    lines = str(shown).removesuffix("\n").split("\n")
    styled = [(line, "bold" if number == 0 and shown.rows else "") for number, line in enumerate(lines)]
    terminal.write_spans([[span] for span in styled], sys.stdout)
    if left_out:
        print_text(_rest(left_out))


def _filters(options: argparse.Namespace) -> tables.TensorFilters:
    filters: tables.TensorFilters = {"min_bytes": options.min_bytes}
    if options.saved:
        filters["saved"] = True
    if options.phase:
        filters["phase"] = options.phase
    return filters


def _rest(left_out: int) -> str:
    return f"and {left_out} more, left out by --limit" if left_out else ""
