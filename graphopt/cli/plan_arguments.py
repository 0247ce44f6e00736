"""The arguments of ``graphopt plan``."""

from __future__ import annotations

import argparse

from graphopt.cli.arguments import (
    budget_argument,
    cost_arguments,
    cost_problem,
    device_arguments,
    device_problem,
    output_arguments,
    passes_argument,
    stage_argument,
    target_argument,
    time_limit_argument,
    two_formats,
)
from graphopt.cli.exchange_arguments import exchange_arguments, exchange_problem

__all__ = ["plan_arguments"]

_EPILOG = """\
The passes of --passes run first; what is planned is the program that they leave. Plans are what the pass fit-memory
would do. Nothing of the user's is trained or changed. Ctrl-C during the search shows the best plans found until then.

With --world-size the exchange of gradients is planned, not memory; --budget and --world-size are asked one at a time.
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
    parser.epilog = _EPILOG
    target_argument(parser)
    budget_argument(parser, several=True)
    passes_argument(parser)
    stage_argument(parser, ("joint", "step"))
    time_limit_argument(parser)
    cost_arguments(parser)
    output_arguments(parser, ("text", "json", "svg"))
    device_arguments(parser)
    exchange_arguments(parser)
    parser.set_defaults(verify="structure", problem=_problem)


def _problem(options: argparse.Namespace) -> str:
    """What is wrong with the arguments together; empty where nothing is."""
    return cost_problem(options) or device_problem(options) or two_formats(options) or exchange_problem(options)
