"""Arguments that several commands share, spelled the same everywhere; nothing here needs torch."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from graphopt.analysis.costs.device_names import COSTS, DEVICES, FileOr
from graphopt.cli.arguments.named_files import PREFIX
from graphopt.errors import GraphoptError
from graphopt.ir.phases import Stage
from graphopt.rewriting.memory.budget_text import check_budget

__all__ = [
    "REMEASURE_HELP",
    "batch_arguments",
    "budget_argument",
    "budget_problem",
    "byte_count",
    "cost_arguments",
    "cost_problem",
    "device_arguments",
    "device_problem",
    "format_of",
    "limit_argument",
    "match_argument",
    "output_arguments",
    "passes_argument",
    "positive",
    "program_arguments",
    "stage_argument",
    "target_argument",
    "time_limit_argument",
    "two_formats",
    "whole",
]

_STAGES: tuple[Stage, ...] = get_args(Stage)
_VERIFY = ("structure", "numerics", "off")

_TARGET_HELP = (
    "pkg.module:factory or path/file.py:factory; the factory takes no arguments and returns (model, example_inputs) or "
    "a dict with model, example_inputs, and optionally kwargs, loss, optimizer, dynamic_shapes; or, with --device, "
    "hf:config.json: a model of transformers by its configuration"
)
_VERIFY_HELP = "check the invariants after each pass (default), also compare results on the example inputs, or neither"
_PASSES_HELP = 'passes as text, such as "recompute{checkpoints=blocks.*}"; `graphopt passes` lists them'
_CONFIG_HELP = "a file with passes, as TOML, JSON or YAML; graphopt.configs.save writes one"
_ALLOW_HELP = "where passes of --config may write, such as the folder of offload-state; elsewhere they are refused"


def target_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``TARGET``."""
    parser.add_argument("target", metavar="TARGET", help=_TARGET_HELP)


def passes_argument(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    """Add ``--passes``, and ``--config``, one of which can be given, with ``--allow-write``."""
    group = parser.add_mutually_exclusive_group(required=required)
    group.add_argument("-p", "--passes", default="", metavar="PASSES", help=_PASSES_HELP)
    group.add_argument("--config", type=Path, metavar="FILE", help=_CONFIG_HELP)
    parser.add_argument("--allow-write", type=Path, metavar="FOLDER", help=_ALLOW_HELP)


def stage_argument(parser: argparse.ArgumentParser, stages: Sequence[Stage] = _STAGES) -> None:
    """Add ``--stage``, with the stages that the command knows."""
    parser.add_argument(
        "--stage", choices=stages, help="the stage to show (default: step where there is an optimizer, else joint)"
    )


def program_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``TARGET``, ``--passes``, ``--config``, ``--verify``, ``--stage``, and what fits a program into a budget."""
    target_argument(parser)
    passes_argument(parser)
    parser.add_argument("--verify", choices=_VERIFY, default="structure", help=_VERIFY_HELP)
    stage_argument(parser)
    budget_argument(parser, several=False)
    time_limit_argument(parser)
    cost_arguments(parser)
    device_arguments(parser)
    parser.set_defaults(fits=True)


def device_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--device``, for which a program is captured without data, and what describes the batch of an hf: target."""
    group = parser.add_argument_group("a device that need not be here")
    group.add_argument("--device", choices=FileOr(DEVICES), metavar="DEVICE", help=_DEVICE_HELP)
    group.add_argument("--devices", type=positive, default=1, metavar="N", help=_DEVICES_HELP)
    batch_arguments(group)


def batch_arguments(group: argparse._ActionsContainer) -> None:
    """Add what describes the batch of an hf: target."""
    group.add_argument(
        "--batch", type=positive, metavar="N", help="sequences in a batch, for an hf: target (default 1)"
    )
    group.add_argument("--tokens", type=positive, metavar="N", help="tokens of each sequence, for an hf: target")
    group.add_argument("--dtype", choices=_DTYPES, metavar="DTYPE", help=_DTYPE_HELP)


def device_problem(options: argparse.Namespace) -> str:
    """What is wrong with ``--device`` and the other arguments together; empty where nothing is."""
    config = options.target.startswith(PREFIX)
    sizes = [f"--{name}" for name in ("batch", "tokens", "dtype") if getattr(options, name) is not None]
    if config and options.device is None:
        return f"{options.target} is made without data: name the device that it is for with --device"
    if config and options.tokens is None:
        return f"{options.target} is a configuration without a batch: give --tokens, and --batch for more than one row"
    if sizes and not config:
        return f"{sizes[0]} is for a target such as hf:config.json; a factory returns its batch"
    if options.devices > 1 and options.device is None:
        return f"--devices {options.devices} are of the kind that --device names: give it too"
    if options.device is not None and getattr(options, "remeasure", False):
        return f"--remeasure measures on this device, and --device {options.device} runs nothing: leave one out"
    if options.device is not None and getattr(options, "cost", None) == "measured":
        return f"--cost measured runs ops here, and --device {options.device} runs nothing: leave one out"
    if options.device is not None and getattr(options, "verify", "") == "numerics":
        return f"--verify numerics runs the program, and --device {options.device} runs nothing: leave one out"
    return ""


_DTYPES = ("float32", "bfloat16", "float16")
_DEVICE_HELP = (
    "capture without data, as this device would run it: " + ", ".join(DEVICES) + ", or a .toml file with a profile"
)
_DEVICES_HELP = (
    "of the first of N such devices, each with a batch like the target's: passes such as data-parallel and "
    "shard-optimizer are for N ranks"
)
_DTYPE_HELP = "of the parameters of an hf: target: " + ", ".join(_DTYPES) + " (default: that of the file, or bfloat16)"


def output_arguments(parser: argparse.ArgumentParser, formats: Sequence[str]) -> None:
    """Add ``--format``, with text as its default, and ``--output``."""
    parser.add_argument("--format", choices=formats, metavar="FORMAT", help=f"{', '.join(formats)} (default: text)")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write to FILE (default: stdout)")


def format_of(options: argparse.Namespace) -> str:
    """The format that ``--format`` and ``--json`` ask for."""
    return options.format or ("json" if options.json else "text")


def two_formats(options: argparse.Namespace) -> str:
    """What is wrong where ``--json`` and ``--format`` disagree; empty where they do not."""
    form = format_of(options)
    if options.json and form != "json":
        return f"--json and --format {form} ask for two formats: give one of them"
    return ""


# --- numbers ---------------------------------------------------------------------------------------------------------


def whole(text: str) -> int:
    """A whole number of at least 0, as argparse wants it read."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def positive(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def byte_count(text: str) -> int:
    """A number of bytes, also with a unit."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMG]?)B?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes: write 65536, 64kB, 1.5MB or 2GB")
    return round(float(match[1]) * {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}[match[2]])


def _budget(text: str) -> str:
    try:
        check_budget(text)
    except GraphoptError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


# --- options ---------------------------------------------------------------------------------------------------------


def limit_argument(parser: argparse.ArgumentParser, what: str, default: int | None = None) -> None:
    """Add ``--limit``: how many rows a table has."""
    shown = "" if default is None else f" (default {default})"
    parser.add_argument("--limit", type=positive, default=default, metavar="N", help=f"{what}{shown}")


def match_argument(parser: argparse.ArgumentParser, help_: str, *, old: Sequence[str] = ()) -> None:
    """Add ``--match``: names or globs of tensors, again for several."""
    parser.add_argument("--match", *old, dest="match", action="append", default=[], metavar="GLOB", help=help_)


def time_limit_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--time-limit`` of the search for plans."""
    parser.add_argument("--time-limit", type=_seconds, metavar="S", help="end the search after S seconds")


def cost_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--cost`` and ``--remeasure``."""
    parser.add_argument("--cost", choices=FileOr(COSTS), metavar="COST", help=_COST_HELP)
    parser.add_argument("--remeasure", action="store_true", help=REMEASURE_HELP)


def cost_problem(options: argparse.Namespace) -> str:
    """What is wrong with the two together; empty where nothing is."""
    if options.remeasure and options.cost in FileOr(DEVICES):
        return f"--remeasure measures on this device, and --cost {options.cost} takes no time from it: leave one out"
    return ""


def budget_problem(options: argparse.Namespace) -> str:
    """What is wrong with a file's folder without a file, and with options for a budget without one; else empty."""
    if getattr(options, "allow_write", None) is not None and options.config is None:
        return "--allow-write is for the passes of a file: give --config too"
    if not getattr(options, "fits", False):
        return ""
    if device_problem(options):
        return device_problem(options)
    given = [f"--{name}" for name in ("cost", "time-limit", "remeasure") if getattr(options, name.replace("-", "_"))]
    if given and options.budget is None:
        return f"{given[0]} is for the search of plans: give --budget too"
    return cost_problem(options)


_COST_HELP = (
    "where the seconds of ops come from: measured here and kept (default), this device's roofline, or another's: "
    + ", ".join(COSTS)
    + ", or a .toml file that graphopt profile wrote"
)
REMEASURE_HELP = "measure everything anew, and replace what was kept; with --cost measured"


def budget_argument(parser: argparse.ArgumentParser, *, several: bool) -> None:
    """Add ``--budget``: one, or again for several."""
    if several:
        words = f"{_BUDGET_HELP}; again for several (default: the trade between bytes and time only)"
        parser.add_argument(
            "-b",
            "--budget",
            action="append",
            default=[],
            type=_budget,
            metavar="BUDGET",
            help=words,
        )
    else:
        parser.add_argument("-b", "--budget", type=_budget, metavar="BUDGET", help=_BUDGET_HELP)


_BUDGET_HELP = "a peak to meet: bytes, 8GB, 512MiB, 60%% of the peak without recomputation, or auto for what is free"
