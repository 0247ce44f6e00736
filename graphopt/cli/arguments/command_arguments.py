"""The arguments of each command, beside those that several share (``arguments``); nothing here needs torch."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path
from typing import get_args

from graphopt.analysis.costs.device_names import is_profile_file, near_devices
from graphopt.cli.arguments.arguments import (
    REMEASURE_HELP,
    batch_arguments,
    budget_argument,
    byte_count,
    cost_arguments,
    cost_problem,
    device_arguments,
    device_problem,
    format_of,
    output_arguments,
    passes_argument,
    positive,
    program_arguments,
    stage_argument,
    target_argument,
    time_limit_argument,
    two_formats,
    whole,
)
from graphopt.cli.arguments.exchange_arguments import exchange_arguments, exchange_problem, network_arguments
from graphopt.errors import did_you_mean
from graphopt.ir.phases import Phase
from graphopt.ir.words.written_units import parse_bytes
from graphopt.runtime.comparison.granularity import By

__all__ = [
    "advise_arguments",
    "cache_arguments",
    "compare_arguments",
    "memory_arguments",
    "plan_arguments",
    "profile_arguments",
    "tensors_arguments",
    "view_arguments",
]

_ACTIONS = ("list", "explain", "clear", "path")

_CACHE_EPILOG = """\
Captures are kept where the environment variable GRAPHOPT_CACHE names a folder (GRAPHOPT_CACHE_PROGRAMS=0: not), and a
process whose model, code, call, passes, optimizer and versions are the same reads them instead of capturing. They hold
programs as data, no parameters. Together they take at most 2 GB; what was used longest ago goes.

actions:
  list     what is kept (the default)
  explain  why each was captured, and why others were not kept; with KEY, all
           that it depends on
  clear    remove KEY, or everything
  path     print the folder
"""


def cache_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = _CACHE_EPILOG
    parser.add_argument("action", nargs="?", choices=_ACTIONS, default="list", help="what to do (default: list)")
    parser.add_argument("key", nargs="?", metavar="KEY", help="one entry: the first letters of its key")


_LIMIT = 40

_COMPARE_EPILOG = """\
Both programs run once on the example inputs from the same seed: forward, backward, and the update where there is an
optimizer. Nothing of the user's is changed. Gradients are called like their tensor with ~ behind. Without --tensors,
names of the form path::op are left out. --bisect tries sets of modules or ops to keep in float32; Ctrl-C shows the best
set found until then.

example:
  graphopt compare examples/train_gpt.py:factory \\
    --passes "mixed-precision{dtype=bfloat16}" --tensors "blocks.**"
  graphopt compare examples/train_gpt.py:factory \\
    --passes "mixed-precision{dtype=float16}" --bisect 0.01 --by op
"""

_TENSORS_HELP = (
    "compare only these: names or globs, of the form path::op too (layers.*::mm, **.weight~); again for several"
)
_TOLERANCE_HELP = "exit with 1 where the relative error of a compared tensor is larger than T"
_BISECT_HELP = "find a smallest set to keep in float32 so that the loss and all gradients (or --tensors) are within T"


def compare_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command, and an example."""
    parser.epilog = _COMPARE_EPILOG
    target_argument(parser)
    passes_argument(parser, required=True)
    stage_argument(parser, ("joint", "step"))
    parser.add_argument(
        "--match", "--tensors", dest="match", action="append", default=[], metavar="GLOB", help=_TENSORS_HELP
    )
    parser.add_argument("--limit", type=whole, default=_LIMIT, metavar="N", help=f"list the N worst (default {_LIMIT})")
    parser.add_argument("--seed", type=whole, default=0, metavar="N", help="of the random state (default 0)")
    bound = parser.add_mutually_exclusive_group()
    bound.add_argument("--tolerance", type=_tolerance, metavar="T", help=_TOLERANCE_HELP)
    bound.add_argument("--bisect", type=_tolerance, metavar="T", help=_BISECT_HELP)
    parser.add_argument("--by", choices=get_args(By), help="what --bisect keeps in float32 (default module)")
    parser.set_defaults(verify="structure", problem=_compare_problem)


def _compare_problem(options: argparse.Namespace) -> str:
    return "--by says what --bisect looks for: give --bisect too" if options.by and options.bisect is None else ""


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a relative error: write 0.01 or 1e-3")
    return value


_MEMORY_EPILOG = """\
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
    parser.epilog = _MEMORY_EPILOG
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
    parser.set_defaults(problem=_memory_problem)


def _memory_problem(options: argparse.Namespace) -> str:
    if format_of(options) == "png" and options.output is None:
        return "a png is no text: give a file with -o FILE"
    return two_formats(options)


_PLAN_EPILOG = """\
The passes of --passes run first; what is planned is the program that they leave. Plans are what the pass fit-memory
would do. Nothing of the user's is trained or changed. Ctrl-C during the search shows the best plans found until then.

With --devices and passes that exchange something, memory and communication are planned together; --world-size without
--budget compares the ways to exchange gradients.
Its seconds are those of this device with --cost measured; the network is not measured, but as --bandwidth and --latency
describe it, or as the profile of --device does: the network between hosts, and what joins the devices of a host.

examples:
  graphopt plan examples/train_gpt.py:factory --budget 200MB --budget 60%
  graphopt plan examples/train_gpt.py:factory \\
    --budget 60% --format svg -o frontier.svg
  graphopt plan hf:config.json --batch 1 --tokens 4096 \\
    --device h100-80gb --budget 75GB
  graphopt plan examples/train_gpt.py:factory \\
    --world-size 64 --bandwidth 1Gbit
  graphopt plan hf:config.json --batch 1 --tokens 4096 \\
    --device h100-80gb --devices 64 --network 400Gbit
"""


def plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command, and an example."""
    parser.epilog = _PLAN_EPILOG
    target_argument(parser)
    budget_argument(parser, several=True)
    passes_argument(parser)
    stage_argument(parser, ("joint", "step"))
    time_limit_argument(parser)
    cost_arguments(parser)
    output_arguments(parser, ("text", "json", "svg"))
    device_arguments(parser)
    exchange_arguments(parser)
    parser.set_defaults(verify="structure", problem=_plan_problem)


def _plan_problem(options: argparse.Namespace) -> str:
    """What is wrong with the arguments together; empty where nothing is."""
    return cost_problem(options) or device_problem(options) or two_formats(options) or exchange_problem(options)


_ADVISE_EPILOG = """\
Every precision and way to exchange gradients that --numerics allows is rewritten and simulated, bytes to the last one
and seconds of ops, exchanges and copies beside each other. What does not fit gets a plan of fit-memory, with what else
leaves memory. The model is not run. The first line of the answer is what --passes and passes= take. svg is a picture of
all pipelines by bytes and seconds; html is a page in which each of its points leads to the pipeline.

examples:
  graphopt advise examples/train_gpt.py:factory --device a100-80gb
  graphopt advise hf:config.json --tokens 4096 --dtype float32 \\
    --device h100-80gb --devices 64 --network 400Gbit --numerics changes
"""
_NUMERICS = ("bitwise", "tolerant", "changes")
_NUMERICS_HELP = (
    "what passes may do to results: bitwise (default), nothing but exchange gradients between devices; tolerant, sums "
    "in another order; changes, 16 bits, and an exchange that leaves something out"
)


_GLOBAL_BATCH_HELP = (
    "rows of an update on all devices together: choose too how many of them a call takes, and over how many calls "
    "gradients are added up (default: every call takes the target's rows, and updates)"
)


def _memory(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def advise_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command, and an example."""
    parser.epilog = _ADVISE_EPILOG
    target_argument(parser)
    parser.add_argument(
        "--memory", type=_memory, metavar="SIZE", help="of one device (default: what --device has, or is free here)"
    )
    parser.add_argument("--numerics", choices=_NUMERICS, default="bitwise", metavar="WORD", help=_NUMERICS_HELP)
    parser.add_argument("--global-batch", type=positive, metavar="ROWS", help=_GLOBAL_BATCH_HELP)
    output_arguments(parser, ("text", "json", "svg", "html"))
    device_arguments(parser)
    network_arguments(parser)
    parser.set_defaults(problem=_advise_problem)


def _advise_problem(options: argparse.Namespace) -> str:
    """What is wrong with the arguments together; empty where nothing is."""
    rows, devices = options.global_batch, options.devices or 1
    if rows is not None and rows % devices:
        return f"--global-batch {rows} is not a multiple of --devices {devices}, which all take equally many rows"
    given = [f"--{name}" for name, value in (("network", options.bandwidth), ("latency", options.latency)) if value]
    if given and options.devices < 2:
        return f"{given[0]} is for several devices: give --devices too"
    return device_problem(options) or two_formats(options)


_PROFILE_EPILOG = """\
Matrix products by dtype, copies in the device's memory and to the host, the disk of the folder for temporary files, and
what a small op takes beyond its work are measured, each once: figures are kept where GRAPHOPT_CACHE says, else in the
user's cache folder. With several GPUs, so is the link between two of them. Measure while nothing else runs.

The file is TOML, to be read and changed. It stands wherever a device is named: --device FILE, --cost FILE, and in
Python FitMemory(cost=FILE) and capture(device=FILE).

Libraries choose on the device what convolutions and linear algebra allocate for themselves. With --calls, those of the
targets are run once each, and the file knows for the next plan what they take.

examples:
  graphopt profile -o mine.toml
  graphopt profile --calls examples/resnet50_checkpoints.py:factory -o mine.toml
  graphopt plan examples/train_gpt.py:factory --budget 60% --cost mine.toml
"""


def _profile_problem(options: argparse.Namespace) -> str:
    if options.output is not None and not is_profile_file(options.output.name):
        return f"a profile is written as TOML: let {options.output} end in .toml"
    configs = [text for text in options.calls if text.startswith("hf:")]
    given = [f"--{name}" for name in ("batch", "tokens", "dtype") if getattr(options, name) is not None]
    if configs and options.tokens is None:
        return f"{configs[0]} is a configuration without a batch: give --tokens, and --batch for more than one row"
    if given and not configs:
        return f"{given[0]} is for calls of a target such as hf:config.json, and --calls names none"
    return ""


def _place(text: str) -> str:
    """A device of this machine; whether it is there is known to torch."""
    if re.fullmatch(r"cpu|cuda(:\d+)?", text):
        return text
    near, known = did_you_mean(text, ("cpu", "cuda")), near_devices(text)
    figures = f"; figures of {', '.join(known)} come with graphopt, for --device and --cost" if known else ""
    raise argparse.ArgumentTypeError(
        f"{text!r} is not a device of this machine: write cpu, cuda or cuda:1{near and f'; {near}'}{figures}"
    )


def profile_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command, and an example."""
    parser.epilog = _PROFILE_EPILOG
    parser.set_defaults(problem=_profile_problem)
    parser.add_argument(
        "place",
        nargs="?",
        type=_place,
        metavar="DEVICE",
        help="cpu, cuda or cuda:1 (default: cuda where there is one, else cpu)",
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write the profile to FILE, which ends in .toml"
    )
    parser.add_argument(
        "--calls",
        nargs="+",
        default=(),
        metavar="TARGET",
        help="measure what convolutions and linear algebra of these targets allocate for themselves; a target is what "
        "graphopt plan --device takes",
    )
    batch_arguments(parser)
    parser.add_argument("--remeasure", action="store_true", help=REMEASURE_HELP)


_TENSORS_EPILOG = """\
examples:
  graphopt tensors examples/train_gpt.py:factory "blocks.0.*" --saved
  graphopt tensors examples/train_gpt.py:factory \\
    --match "blocks.**" --phase backward --sort bytes --limit 20
"""


def tensors_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command, and examples."""
    parser.epilog = _TENSORS_EPILOG
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
        type=byte_count,
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
    parser.add_argument("--limit", type=positive, metavar="N", help="only the first N; the last line counts the rest")
    device_arguments(parser)
    parser.set_defaults(passes="", verify="structure", problem=_tensors_problem)


def _tensors_problem(options: argparse.Namespace) -> str:
    if options.checkpoints and options.phase not in (None, "forward"):
        return f"--checkpoints are tensors of forward: leave out --phase {options.phase}"
    return device_problem(options)


_FILE = Path("graphopt.html")

_VIEW_EPILOG = """\
The page needs no network and nothing beside itself: it can be opened from a folder, sent, or attached to an issue.
Bytes on it are predicted, the seconds that passes took are measured. Names, shapes and source lines of the model are on
it, no values of tensors.

example:
  graphopt view examples/train_gpt.py:factory \\
    --passes "recompute{checkpoints=blocks.*}" -o step.html --open
"""


def view_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command, and an example."""
    parser.epilog = _VIEW_EPILOG
    program_arguments(parser)
    parser.add_argument(
        "-o", "--output", type=Path, default=_FILE, metavar="FILE", help=f"write to FILE (default: {_FILE})"
    )
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
