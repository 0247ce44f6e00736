"""``graphopt tensors``: the tensors of a program, or what separates it, as a table or as data."""

from __future__ import annotations

import argparse
import sys

from graphopt.cli.arguments.exit_codes import UsageError
from graphopt.cli.target.output import print_json, print_report, program_title
from graphopt.cli.target.programs import rewritten_program
from graphopt.ir.names import match_names
from graphopt.ir.program import Program
from graphopt.report.console import terminal
from graphopt.report.text import candidate_table as candidates
from graphopt.report.text import tensor_table as tables

__all__ = ["tensors"]


def tensors(options: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        GraphoptError: for a target that is wrong, a pattern that names nothing, or a phase that the program lacks.
    """
    if options.checkpoints and options.stage == "forward":
        raise UsageError("--checkpoints counts what backward reads: use --stage joint or --stage step")
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
        print_report(candidates.candidates_text(chosen), _rest(left_out))


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
        print_report(_rest(left_out))


def _filters(options: argparse.Namespace) -> tables.TensorFilters:
    filters: tables.TensorFilters = {"min_bytes": options.min_bytes}
    if options.saved:
        filters["saved"] = True
    if options.phase:
        filters["phase"] = options.phase
    return filters


def _rest(left_out: int) -> str:
    return f"and {left_out} more, left out by --limit" if left_out else ""
