"""The arguments of ``graphopt profile``."""

from __future__ import annotations

import argparse
from pathlib import Path

from graphopt.cli.arguments import REMEASURE_HELP

__all__ = ["profile_arguments"]

_EPILOG = """\
Matrix products by dtype, copies in the device's memory and to the host, the disk of the folder for temporary files, and
what a small op takes beyond its work are measured, each once: figures are kept where GRAPHOPT_CACHE says, else in the
user's cache folder. With several GPUs, so is the link between two of them. Measure while nothing else runs.

The file is TOML, to be read and changed. It stands wherever a device is named: --device FILE, --cost FILE, and in
Python FitMemory(cost=FILE) and capture(device=FILE).

examples:
  graphopt profile -o mine.toml
  graphopt plan examples/train_gpt.py:factory --budget 60% --cost mine.toml
"""


def profile_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command, and an example."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "place", nargs="?", metavar="DEVICE", help="cpu, cuda or cuda:1 (default: cuda where there is one, else cpu)"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write the profile to FILE, which ends in .toml"
    )
    parser.add_argument("--remeasure", action="store_true", help=REMEASURE_HELP)
