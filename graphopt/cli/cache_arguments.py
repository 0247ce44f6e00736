"""The arguments of ``graphopt cache``."""

from __future__ import annotations

import argparse

__all__ = ["cache_arguments"]

_ACTIONS = ("list", "explain", "clear", "path")

_EPILOG = """\
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
    parser.epilog = _EPILOG
    parser.add_argument("action", nargs="?", choices=_ACTIONS, default="list", help="what to do (default: list)")
    parser.add_argument("key", nargs="?", metavar="KEY", help="one entry: the first letters of its key")
