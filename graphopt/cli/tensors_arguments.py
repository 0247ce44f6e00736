"""The arguments of ``graphopt tensors``."""

from __future__ import annotations

import argparse

from graphopt.cli.arguments import (
    byte_count,
    device_arguments,
    device_problem,
    positive,
    stage_argument,
    target_argument,
)
from graphopt.ir.phases import Phase

__all__ = ["tensors_arguments"]

_EPILOG = """\
examples:
  graphopt tensors examples/train_gpt.py:factory "blocks.0.*" --saved
  graphopt tensors examples/train_gpt.py:factory \\
    --match "blocks.**" --phase backward --sort bytes --limit 20
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
    parser.set_defaults(passes="", verify="structure", problem=_problem)


def _problem(options: argparse.Namespace) -> str:
    if options.checkpoints and options.phase not in (None, "forward"):
        return f"--checkpoints are tensors of forward: leave out --phase {options.phase}"
    return device_problem(options)
