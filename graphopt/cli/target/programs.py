"""The arguments that say which program a command looks at, and the capture that follows from them."""

from __future__ import annotations

import argparse
import contextlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from graphopt import _torch
from graphopt.analysis.costs.cost import check_cost
from graphopt.analysis.costs.figures import remeasure
from graphopt.analysis.costs.profiles import DeviceProfile, device_profile
from graphopt.capture.devices.meta_tensors import without_data
from graphopt.cli.arguments.exit_codes import UsageError, wrong_use
from graphopt.cli.arguments.named_files import PREFIX
from graphopt.cli.target.model_config import model_of_config
from graphopt.cli.target.target import Target, checked_target, load_target
from graphopt.errors import PipelineError
from graphopt.ir.context import Context
from graphopt.ir.node import Stage
from graphopt.ir.program import Program
from graphopt.rewriting.config_translation.config_file import load
from graphopt.rewriting.pass_ import Pass
from graphopt.rewriting.pipeline import Pipeline
from graphopt.rewriting.progress import working
from graphopt.rewriting.registry import find_pass
from graphopt.runtime.programs.check_numerics import check_numerics
from graphopt.runtime.programs.rewrite import Checks, Rewritten, Verify, rewrite

__all__ = [
    "before_passes",
    "joined_profile",
    "loaded_target",
    "pipeline_of",
    "program_without_data",
    "ranks",
    "rewritten_program",
    "stage_to_show",
]

_FITTER = "fit-memory"
"""The pass that keeps a program within a budget."""

_STAGES: tuple[Stage, ...] = get_args(Stage)
_VERIFY: dict[str, Verify] = {"structure": "structure", "numerics": "numerics", "off": False}


def rewritten_program(options: argparse.Namespace, pipeline: Pipeline | None = None) -> Rewritten:
    """Load the target, capture it and run the passes. What the user's code prints goes to stderr.

    Args:
        options: ``target``, ``stage``, ``verify``, and what ``pipeline_of`` takes where no pipeline is given.
        pipeline: the passes to run.

    Raises:
        GraphoptError: for a target that gives no program, passes that are wrong or fail, a stage that is not reached.
    """
    pipeline = pipeline or pipeline_of(options)
    if getattr(options, "fits", False) and options.remeasure:
        remeasure()
    with contextlib.redirect_stdout(sys.stderr):
        with wrong_use():
            profile = None if options.device is None else joined_profile(options)
            if getattr(options, "cost", None) is not None:
                check_cost(options.cost)
        target = loaded_target(options)
        stage = stage_to_show(options.stage, target, pipeline, options.verify)
        session, context = target.session(profile), Context(device=profile)
        with ranks(options):
            rewritten = rewrite(session, pipeline, until=stage, checks=Checks(_VERIFY[options.verify]), context=context)
        if options.verify == "numerics":
            check_numerics(rewritten)
    return rewritten


def loaded_target(options: argparse.Namespace) -> Target:
    """The target of the command, without data where it is for a device that need not be here.

    Raises:
        GraphoptError: for a target that gives no program.
    """
    with working(f"loading {options.target}"):
        return _target(options.target, options, data=options.device is None)


def ranks(options: argparse.Namespace) -> contextlib.AbstractContextManager[None]:
    """While the block runs, this process is the first of ``--devices`` ranks, in hosts as the device's profile says."""
    per_host = 1 if options.device is None else joined_profile(options).devices_per_host
    return _torch.ranks_without_network(options.devices, per_host)


def joined_profile(options: argparse.Namespace) -> DeviceProfile:
    """The profile of ``--device``, with what the arguments say of the links between such devices.

    Raises:
        GraphoptError: for a device that is not known.
    """
    profile = device_profile(options.device)
    said = {
        "network_bandwidth": "bandwidth",
        "network_latency": "latency",
        "devices_per_host": "host_ranks",
        "peer_bandwidth": "host_bandwidth",
        "peer_latency": "host_latency",
    }
    given = {name: getattr(options, argument, None) for name, argument in said.items()}
    return replace(profile, **{name: value for name, value in given.items() if value is not None})


def program_without_data(text: str, profile: DeviceProfile, options: argparse.Namespace) -> Program:
    """The program of a target without passes, captured for a device without data.

    Args:
        text: names the target.
        profile: of the device.
        options: ``batch``, ``tokens`` and ``dtype``, for an ``hf:`` target.

    Raises:
        GraphoptError: for a target that gives no program.
    """
    with contextlib.redirect_stdout(sys.stderr):
        with working(f"loading {text}"):
            target = _target(text, options, data=False)
        stage = stage_to_show(None, target, Pipeline([]))
        found = rewrite(target.session(profile), Pipeline([]), until=stage, context=Context(device=profile))
    return found.stages[stage]


def _target(text: str, options: argparse.Namespace, *, data: bool) -> Target:
    """The target: what a factory returns, with or without data, or a model by configuration."""
    if text.startswith(PREFIX):
        path = Path(text.removeprefix(PREFIX))
        with wrong_use():
            parts = model_of_config(path, batch=options.batch or 1, tokens=options.tokens, dtype=options.dtype)
        return checked_target(parts, text)
    with contextlib.nullcontext() if data else without_data():
        return load_target(text)


def pipeline_of(options: argparse.Namespace, *, fitted: bool = True) -> Pipeline:
    """The passes of ``--passes`` or ``--config``, and the one that keeps to ``--budget``.

    Args:
        options: of the command.
        fitted: with that one.

    Raises:
        GraphoptError: for passes that are wrong, for a file that cannot be read, and for two budgets.
    """
    with wrong_use():
        return _pipeline_of(options, fitted)


def _pipeline_of(options: argparse.Namespace, fitted: bool) -> Pipeline:
    config = getattr(options, "config", None)
    given = Pipeline(options.passes) if config is None else load(config, allow_write=options.allow_write)
    budget = getattr(options, "budget", None) if fitted else None
    if budget is None:
        return given
    if any(current.name == _FITTER for current in given.passes):
        raise PipelineError(f"--budget {budget} and {_FITTER} among the passes are two budgets: give one of them")
    fitting: Any = find_pass(_FITTER)
    fitter: Pass = fitting(budget=budget, cost=options.cost or "measured", time_limit=options.time_limit)
    return Pipeline([*given.passes, fitter])


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
        raise UsageError(
            f"{target.text} gives no optimizer, and the step stage holds its update: return a dict with the key "
            "'optimizer', or use --stage joint"
        )
    late = [p for p in pipeline.passes if p.stage != "last" and _STAGES.index(p.stage) > _STAGES.index(stage)]
    if late:
        names = ", ".join(f"{p.name!r} (a {p.stage} pass)" for p in late)
        way_out = f"--stage {late[-1].stage}" if wanted else "a dict with the key 'optimizer' in the target"
        raise PipelineError(f"{names} would not run, because the {stage} stage comes before: use {way_out}")
    if verify == "numerics" and stage == "forward":
        raise UsageError("--verify numerics compares outputs and gradients: use --stage joint or --stage step")
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
