"""The arguments of ``graphopt profile``."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from graphopt.analysis.costs.device_names import is_profile_file, near_devices
from graphopt.cli.arguments import REMEASURE_HELP, batch_arguments
from graphopt.errors import did_you_mean

__all__ = ["profile_arguments"]

_EPILOG = """\
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


def _problem(options: argparse.Namespace) -> str:
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
    parser.epilog = _EPILOG
    parser.set_defaults(problem=_problem)
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
