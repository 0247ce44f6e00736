"""The arguments of ``graphopt view``."""

from __future__ import annotations

import argparse
from pathlib import Path

from graphopt.cli.arguments import program_arguments

__all__ = ["view_arguments"]

_FILE = Path("graphopt.html")

_EPILOG = """\
The page needs no network and nothing beside itself: it can be opened from a folder, sent, or attached to an issue.
Bytes on it are predicted, the seconds that passes took are measured. Names, shapes and source lines of the model are on
it, no values of tensors.

example:
  graphopt view examples/train_gpt.py:factory \\
    --passes "recompute{checkpoints=blocks.*}" -o step.html --open
"""


def view_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command, and an example."""
    parser.epilog = _EPILOG
    program_arguments(parser)
    parser.add_argument(
        "-o", "--output", type=Path, default=_FILE, metavar="FILE", help=f"write to FILE (default: {_FILE})"
    )
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
