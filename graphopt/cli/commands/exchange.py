"""``graphopt plan --world-size``: what each way to exchange gradients would cost on a network, and which one to use."""

from __future__ import annotations

import argparse
import json
import sys

from graphopt.analysis.costs.profiles import device_profile
from graphopt.cli.arguments.arguments import format_of
from graphopt.cli.arguments.exchange_arguments import NO_BANDWIDTH, exchange_ranks
from graphopt.cli.arguments.exit_codes import UsageError, wrong_use
from graphopt.cli.target.output import report_passes, write_output
from graphopt.cli.target.programs import pipeline_of, rewritten_program
from graphopt.ir.words.columns import filled
from graphopt.report.console import terminal
from graphopt.report.console.progress_bar import progress_bar
from graphopt.report.text.exchange_table import exchange_json, exchange_text
from graphopt.rewriting.distributed.prediction.advice import plan_exchange
from graphopt.rewriting.distributed.prediction.link import HostLink, Link
from graphopt.rewriting.distributed.prediction.workload import workload_of
from graphopt.rewriting.pipeline import Pipeline

__all__ = ["EXCHANGERS", "exchange_plan"]

EXCHANGERS = (
    "data-parallel",
    "compress-gradients",
    "deep-gradient-compression",
    "local-sgd",
    "adaptive-local-sgd",
    "diloco",
    "shard-optimizer",
)
"""The passes whose work is predicted; they are left out of those that run before."""

_LATENCY, _DENSITY, _STEPS = 50e-6, 0.001, (4, 8, 16)


def exchange_plan(options: argparse.Namespace) -> None:
    """Run the command for a network.

    Raises:
        GraphoptError: for a target or passes that are wrong, and for a program that has no gradients to exchange.
    """
    link = _link(options)
    rewritten = rewritten_program(options, _pipeline(options))
    report_passes(rewritten)
    program = rewritten.program
    with progress_bar("measuring the ops") as show:
        workload = workload_of(
            program, options.cost or "measured", progress=lambda done, total: show(done / total, f"{done} of {total}")
        )
    if options.step_time is not None:
        workload = workload.taking(options.step_time)
    plan = plan_exchange(
        workload,
        exchange_ranks(options) or 0,
        link,
        density=options.density or _DENSITY,
        k_steps=options.k_steps or _STEPS,
    )
    if format_of(options) == "json":
        write_output(options, json.dumps(exchange_json(plan, program.history), indent=2))
    else:
        write_output(options, filled(exchange_text(plan, program.history)))


def _link(options: argparse.Namespace) -> Link:
    """What joins the ranks: as described, and as the device's profile says.

    Raises:
        GraphoptError: for a device that is not known, and where its profile lacks what is not given.
    """
    with wrong_use():
        profile = None if options.device is None else device_profile(options.device)
    bandwidth, ranks, inside = options.bandwidth, options.host_ranks, options.host_bandwidth
    if profile is not None:
        bandwidth = bandwidth or profile.network_bandwidth
        inside = inside or profile.peer_bandwidth
        ranks = ranks or profile.devices_per_host
    if not bandwidth:
        raise UsageError(f"{NO_BANDWIDTH}, and the profile of --device {options.device} does not say")
    asked = (options.host_ranks, options.host_bandwidth, options.host_latency) != (None, None, None)
    if asked and (not inside or ranks < 2):
        missing = "--host-ranks" if inside else "--host-bandwidth"
        raise UsageError(f"give {missing} too: the profile of --device {options.device} has no links inside of a host")
    host = HostLink(ranks, inside, options.host_latency or 0.0) if inside and ranks > 1 else None
    latency = _LATENCY if options.latency is None else options.latency
    return Link(bandwidth, latency, options.algorithm or "ring", host)


def _pipeline(options: argparse.Namespace) -> Pipeline:
    """The passes that run before; those that exchange gradients are left out, and the user is told."""
    pipeline = pipeline_of(options, fitted=False)
    left_out = [current for current in pipeline.passes if current.name in EXCHANGERS]
    for current in left_out:
        terminal.write(f"{current} does not run: ways to exchange gradients are what is shown", sys.stderr)
    return Pipeline([current for current in pipeline.passes if current not in left_out]) if left_out else pipeline
