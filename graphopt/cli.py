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
from pathlib import Path
from typing import Any, get_args

import graphopt
from graphopt.errors import GraphoptError, PipelineError
from graphopt.names import match_names
from graphopt.pipeline import Pipeline, available_passes, find_pass
from graphopt.program import Program, Stage
from graphopt.report import candidates, catalogue, memory, tables, terminal
from graphopt.report.snapshots import record_lines, records_json, snapshots_json, snapshots_text
from graphopt.runtime.compare import check_numerics
from graphopt.runtime.rewrite import Rewritten, Verify, rewrite
from graphopt.targets import Target, load_target
from graphopt.values import format_bytes

__all__ = ["main"]

_STAGES: tuple[Stage, ...] = get_args(Stage)
_VERIFY: dict[str, Verify] = {"structure": "structure", "numerics": "numerics", "off": False}
_COMMENT = {"text": "#", "python": "#", "dot": "//"}
"""How a header line between the programs of ``dump --after-each`` starts, by format."""

_TARGET_HELP = (
    "pkg.module:factory or path/file.py:factory; the factory takes no arguments and returns (model, example_inputs) or "
    "a dict with model, example_inputs, and optionally kwargs, loss, optimizer, dynamic_shapes"
)
_PASSES_HELP = 'passes as text, such as "recompute{checkpoints=blocks.*}"; `graphopt passes` lists them'


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
    problem = _format_problem(options) if options.command is _dump else ""
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
        added.set_defaults(command=command, parser=added)
        return added

    passes = add(_passes, "passes", "list the installed passes with their options, or explain one")
    passes.add_argument("name", nargs="?", metavar="NAME", help="a pass to explain")
    _tensors_arguments(add(_tensors, "tensors", "list the tensors of a program: names, bytes, where they come from"))
    _dump_arguments(add(_dump, "dump", "print a program before, between or after passes"))
    usage = add(_memory, "memory", "show bytes over time and what is alive at the peak")
    _program_arguments(usage)
    usage.add_argument("--top", type=_positive, default=10, metavar="N", help="list the N largest (default 10)")
    _program_arguments(add(_diff, "diff", "show what passes change, node by node"), needs_passes=True)
    return parser


def _program_arguments(parser: argparse.ArgumentParser, *, needs_passes: bool = False) -> None:
    parser.add_argument("target", metavar="TARGET", help=_TARGET_HELP)
    parser.add_argument("-p", "--passes", default="", required=needs_passes, metavar="PASSES", help=_PASSES_HELP)
    parser.add_argument("--verify", choices=_VERIFY, default="structure", help=(
        "check the invariants after each pass (default), also compare results on the example inputs, or neither"
    ))  # fmt: skip
    _stage_argument(parser)


def _stage_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--stage", choices=_STAGES, help="the stage to show (default: step where there is an optimizer, else joint)"
    )


def _tensors_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", help=_TARGET_HELP)
    parser.add_argument(
        "patterns", nargs="*", metavar="PATTERN", help="names or globs: blocks.*, layers.*::mm, encoder.**"
    )
    _stage_argument(parser)
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
    _program_arguments(parser)
    parser.add_argument("--after-each", action="store_true", help="print the program after capture and after each pass")
    parser.add_argument("--format", choices=("text", "python", "dot", "svg", "json"), help="default: text")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write to FILE (default: stdout)")


def _format(options: argparse.Namespace) -> str:
    return options.format or ("json" if options.json else "text")


def _format_problem(options: argparse.Namespace) -> str:
    form = _format(options)
    if options.json and form != "json":
        return f"--json and --format {form} ask for two formats: give one of them"
    if options.after_each and form == "svg":
        return "one svg holds one program: give --after-each with another format"
    return ""


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
        _print_json(catalogue.passes_json(found))
    else:
        _print(catalogue.passes_text(found, whole=options.name is not None))


def _tensors(options: argparse.Namespace) -> None:
    if options.checkpoints and options.stage == "forward":
        raise GraphoptError("--checkpoints counts what backward reads: use --stage joint or --stage step")
    program = _rewritten(options).program
    if options.checkpoints:
        known = {found.name: found for found in program.checkpoint_candidates() if found.bytes >= options.min_bytes}
        rows = match_names(options.patterns, known, "checkpoint candidate") if options.patterns else known
        chosen = list(rows.values())
        if options.json:
            _print_json({**_of(program), "checkpoints": candidates.candidates_json(chosen)})
        else:
            _print(candidates.candidates_text(chosen))
        return
    filters: tables.TensorFilters = {"min_bytes": options.min_bytes}
    if options.saved:
        filters["saved"] = True
    if options.json:
        _print_json({**_of(program), "tensors": tables.tensors_json(program, options.patterns, **filters)})
    else:
        _print(str(tables.tensors_table(program, options.patterns, **filters)))


def _dump(options: argparse.Namespace) -> None:
    form = _format(options)
    if options.output is not None and not options.output.parent.is_dir():
        raise GraphoptError(f"cannot write {options.output}: there is no folder {options.output.parent}")
    rewritten = _rewritten(options)
    if not options.after_each:
        _report_passes(rewritten)
    if form == "json":
        data = snapshots_json(rewritten) if options.after_each else rewritten.program.to_json()
        text = json.dumps(data, indent=2)
    elif options.after_each:
        text = snapshots_text(rewritten, lambda program: _render(program, form), _COMMENT[form])
    else:
        text = _render(rewritten.program, form)
    _print(text) if options.output is None else _write_file(options.output, text)


def _memory(options: argparse.Namespace) -> None:
    rewritten = _rewritten(options)
    before, after = _before(rewritten), rewritten.program
    if options.json:
        pair = {"before": memory.memory_json(before), "after": memory.memory_json(after)}
        data = pair if rewritten.records else {"program": pair["after"]}
        _print_json({**_of(after), "passes": records_json(rewritten.records), **data})
        return
    width = terminal.terminal_width()
    text = memory.memory_text(after, options.top, width)
    if not rewritten.records:
        _print(text)
        return
    old, new = before.memory().peak_bytes, after.memory().peak_bytes
    _print(
        _records_text(rewritten),
        f"peak {format_bytes(old)} -> {format_bytes(new)} ({(new - old) / old:+.1%})\n",
        f"==== before\n{memory.memory_text(before, options.top, width)}",
        f"==== after\n{text}",
    )


def _diff(options: argparse.Namespace) -> None:
    rewritten = _rewritten(options)
    text = _before(rewritten).diff(rewritten.program)
    if options.json:
        _print_json({**_of(rewritten.program), "passes": records_json(rewritten.records), "diff": text})
    else:
        _print(_records_text(rewritten), text)


def _of(program: Program) -> dict[str, str]:
    return {"title": program.title, "stage": program.stage}


# --- programs --------------------------------------------------------------------------------------------------------


def _rewritten(options: argparse.Namespace) -> Rewritten:
    """Load the target, capture it and run the passes. What the user's code prints goes to stderr."""
    pipeline = Pipeline(options.passes)
    with contextlib.redirect_stdout(sys.stderr), terminal.working(f"capturing {options.target}"):
        target = load_target(options.target)
        stage = _stage(options.stage, target, pipeline, options.verify)
        rewritten = rewrite(target.session(), pipeline, until=stage, verify=_VERIFY[options.verify])
        if options.verify == "numerics":
            check_numerics(rewritten, pipeline)
    return rewritten


def _stage(wanted: Stage | None, target: Target, pipeline: Pipeline, verify: str) -> Stage:
    """The stage to show; an error where the target does not reach it, or where a pass would silently not run."""
    stage = wanted or target.last_stage
    if stage == "step" and target.optimizer is None:
        raise GraphoptError(
            f"{target.text} gives no optimizer, and the step stage holds its update: return a dict with the key "
            "'optimizer', or use --stage joint"
        )
    late = [p for p in pipeline.passes if p.stage != "last" and _STAGES.index(p.stage) > _STAGES.index(stage)]
    if late:
        names = ", ".join(f"{p.name!r} (a {p.stage} pass)" for p in late)
        way_out = f"--stage {late[-1].stage}" if wanted else "a dict with the key 'optimizer' in the target"
        raise PipelineError(f"{names} would not run, because the {stage} stage comes before: use {way_out}")
    if verify == "numerics" and stage == "forward":
        raise GraphoptError("--verify numerics compares outputs and gradients: use --stage joint or --stage step")
    return stage


def _before(rewritten: Rewritten) -> Program:
    """The program of the last stage as it is without any pass, to compare with."""
    last = rewritten.program.stage
    first = rewritten.records[0].stage if rewritten.records else last
    program = next(p for _, p in rewritten.snapshots if p.stage == first)
    while program.stage != last:
        assert program.lower is not None
        program = program.lower(program)
    return program


def _render(program: Program, form: str) -> str:
    return {"text": program.to_text, "python": program.to_python, "dot": program.to_dot, "svg": program.to_svg}[form]()


# --- printing --------------------------------------------------------------------------------------------------------


def _records_text(rewritten: Rewritten) -> str:
    return "\n".join(f"# {line}" for record in rewritten.records for line in record_lines(record))


def _report_passes(rewritten: Rewritten) -> None:
    """What the passes did, on stderr; those that did nothing are in the warnings."""
    for record in rewritten.records:
        if record.changed:
            terminal.write("\n".join(record_lines(record)), sys.stderr)


def _print(*pieces: str) -> None:
    terminal.write("\n".join(piece for piece in pieces if piece), sys.stdout, style=terminal.line_style)


def _print_json(data: Any) -> None:
    terminal.write(json.dumps(data, indent=2), sys.stdout)


def _write_file(path: Path, text: str) -> None:
    try:
        path.write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")
    except OSError as error:
        raise GraphoptError(f"cannot write {path}: {error.strerror or error}") from error
    terminal.write(f"wrote {path} ({path.stat().st_size} bytes)", sys.stderr)
