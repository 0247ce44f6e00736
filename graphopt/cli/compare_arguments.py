"""The arguments of ``graphopt compare``."""

from __future__ import annotations

import argparse
import math
from typing import get_args

from graphopt.cli.arguments import passes_argument, stage_argument, target_argument, whole
from graphopt.runtime.comparison.granularity import By

__all__ = ["compare_arguments"]

_LIMIT = 40

_EPILOG = """\
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
    parser.epilog = _EPILOG
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
    parser.set_defaults(verify="structure", problem=_problem)


def _problem(options: argparse.Namespace) -> str:
    return "--by says what --bisect looks for: give --bisect too" if options.by and options.bisect is None else ""


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a relative error: write 0.01 or 1e-3")
    return value
