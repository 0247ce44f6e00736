"""The arguments that say which program a command looks at, and the capture that follows from them."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from graphopt.cli.target import Target, load_target
from graphopt.errors import GraphoptError, PipelineError
from graphopt.ir.node import Stage
from graphopt.ir.program import Program
from graphopt.report.console import terminal
from graphopt.rewriting.pipeline import Pipeline
from graphopt.runtime.check_numerics import check_numerics
from graphopt.runtime.rewrite import Rewritten, Verify, rewrite

__all__ = [
    "before_passes",
    "passes_argument",
    "pipeline_of",
    "program_arguments",
    "rewritten_program",
    "stage_argument",
    "stage_to_show",
    "target_argument",
]

_STAGES: tuple[Stage, ...] = get_args(Stage)
_VERIFY: dict[str, Verify] = {"structure": "structure", "numerics": "numerics", "off": False}

_TARGET_HELP = (
    "pkg.module:factory or path/file.py:factory; the factory takes no arguments and returns (model, example_inputs) or "
    "a dict with model, example_inputs, and optionally kwargs, loss, optimizer, dynamic_shapes"
)
_VERIFY_HELP = "check the invariants after each pass (default), also compare results on the example inputs, or neither"
_PASSES_HELP = 'passes as text, such as "recompute{checkpoints=blocks.*}"; `graphopt passes` lists them'
_CONFIG_HELP = "a file with passes, as TOML, JSON or YAML; graphopt.configs.save writes one"


def target_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``TARGET``."""
    parser.add_argument("target", metavar="TARGET", help=_TARGET_HELP)


def passes_argument(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    """Add ``--passes``, and ``--config``, one of which can be given."""
    group = parser.add_mutually_exclusive_group(required=required)
    group.add_argument("-p", "--passes", default="", metavar="PASSES", help=_PASSES_HELP)
    group.add_argument("--config", type=Path, metavar="FILE", help=_CONFIG_HELP)


def pipeline_of(options: argparse.Namespace) -> Pipeline:
    """The passes of ``--passes`` or of ``--config``.

    Raises:
        GraphoptError: for passes that are wrong, and for a file that cannot be read.
    """
    return Pipeline(options.config if getattr(options, "config", None) is not None else options.passes)


def stage_argument(parser: argparse.ArgumentParser, stages: Sequence[Stage] = _STAGES) -> None:
    """Add ``--stage``, with the stages that the command knows."""
    parser.add_argument(
        "--stage", choices=stages, help="the stage to show (default: step where there is an optimizer, else joint)"
    )


def program_arguments(parser: argparse.ArgumentParser, *, needs_passes: bool = False) -> None:
    """Add ``TARGET``, ``--passes`` and ``--config``, ``--verify`` and ``--stage``."""
    target_argument(parser)
    passes_argument(parser, required=needs_passes)
    parser.add_argument("--verify", choices=_VERIFY, default="structure", help=_VERIFY_HELP)
    stage_argument(parser)


def rewritten_program(options: argparse.Namespace, pipeline: Pipeline | None = None) -> Rewritten:
    """Load the target, capture it and run the passes. What the user's code prints goes to stderr.

    Args:
        options: ``target``, ``stage``, ``verify``, and ``passes`` or ``config`` where no pipeline is given.
        pipeline: the passes to run.

    Raises:
        GraphoptError: for a target that gives no program, passes that are wrong or fail, a stage that is not reached.
    """
    pipeline = pipeline or pipeline_of(options)
    with contextlib.redirect_stdout(sys.stderr), terminal.working(f"capturing {options.target}"):
        target = load_target(options.target)
        stage = stage_to_show(options.stage, target, pipeline, options.verify)
        rewritten = rewrite(target.session(), pipeline, until=stage, verify=_VERIFY[options.verify])
        if options.verify == "numerics":
            check_numerics(rewritten)
    return rewritten


def stage_to_show(wanted: Stage | None, target: Target, pipeline: Pipeline, verify: str = "structure") -> Stage:
    """The stage that a command shows.

    Args:
        wanted: what ``--stage`` says.
        target: what is captured.
        pipeline: the passes that are to run.
        verify: what ``--verify`` says.

    Raises:
        GraphoptError: where the target does not reach the stage, or where a pass would silently not run.
    """
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


def before_passes(rewritten: Rewritten) -> Program:
    """The program of the last stage as it is without any pass, to compare with."""
    last = rewritten.program.stage
    if rewritten.pipeline.autocast is not None:
        program = rewritten.session.forward()
    else:
        first = rewritten.records[0].stage if rewritten.records else last
        program = next(p for _, p in rewritten.snapshots if p.stage == first)
    while program.stage != last:
        assert program.lower is not None
        program = program.lower(program)
    return program
