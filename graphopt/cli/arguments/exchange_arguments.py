"""The arguments that describe a network: for the exchange of gradients, and for when ranks wait for each other."""

from __future__ import annotations

import argparse
from typing import Any, get_args

from graphopt.cli.arguments.arguments import format_of
from graphopt.errors import GraphoptError
from graphopt.rewriting.distributed.prediction.link import Algorithm, parse_bandwidth, parse_latency

__all__ = [
    "NO_BANDWIDTH",
    "exchange_arguments",
    "exchange_problem",
    "exchange_ranks",
    "joint_problem",
    "link_arguments",
    "link_problem",
    "network_arguments",
]

_BANDWIDTH_HELP = (
    "of one rank's link, in each direction: 10Mbit, 1Gbit, 100Gbps (bits per second), 25GB/s (bytes per second)"
)
_HOST_RANKS_HELP = "ranks of one host, which have links of their own (default: those of --device)"
_HOST_BANDWIDTH_HELP = (
    "of one rank to the others of its host, in each direction: 450GB/s (default: that of --device); --bandwidth is "
    "then that of the network between hosts"
)
_LATENCY_HELP = "of each round of a collective: 50us, 1ms (default {})"
_ALGORITHM_HELP = (
    "how collectives are made of rounds: in a ring of all ranks (default; gloo, and NCCL with large messages), or "
    "in a tree, which takes fewer rounds with many ranks"
)
NO_BANDWIDTH = "--world-size needs --bandwidth, what one rank's link carries: --bandwidth 1Gbit"
"""What is wrong where nothing says how fast the network is."""

_DENSITY_HELP = "share of the elements that sparse exchange sends behind its warm-up: 0.001, 0.1%% (default 0.001)"
_STEP_TIME_HELP = (
    "what a step without exchange takes where it will run, if you know it: 350ms; all computation is scaled to it"
)


def exchange_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that describe a network."""
    group = parser.add_argument_group(
        "several ranks",
        "with --devices or --world-size and passes that exchange something, or a budget, memory and communication are "
        "planned together: the peak of a rank, and the step with what is exchanged beside it. Without both, "
        "--world-size (or --devices with --network) compares the ways to exchange gradients: bytes and seconds of "
        "each, which one to use, and where one overtakes another. No process group is needed",
    )
    group.add_argument("--world-size", type=_ranks, metavar="N", help="ranks, each with a batch like the target's")
    _add_link(group, "50us")
    group.add_argument("--host-ranks", type=_ranks, metavar="N", help=_HOST_RANKS_HELP)
    group.add_argument("--host-bandwidth", type=_checked(parse_bandwidth), metavar="B", help=_HOST_BANDWIDTH_HELP)
    group.add_argument("--host-latency", type=_checked(parse_latency), metavar="T", help=_LATENCY_HELP.format("none"))
    group.add_argument("--algorithm", choices=get_args(Algorithm), help=_ALGORITHM_HELP)
    group.add_argument("--density", type=_density, metavar="D", help=_DENSITY_HELP)
    group.add_argument("--k-steps", type=_steps, metavar="K,K", help="intervals of local SGD (default 4,8,16)")
    group.add_argument("--step-time", type=_checked(_parse_step_time), metavar="T", help=_STEP_TIME_HELP)


def link_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that describe the link of a page of ranks."""
    group = parser.add_argument_group(
        "what joins ranks", "with --format ranks or perfetto, which show when they wait for it"
    )
    _add_link(group, "none")


def network_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that describe the network between the hosts of ``--devices``."""
    group = parser.add_argument_group("what joins the hosts of --devices", "by default what the device's profile says")
    _add_link(group, "50us")


def link_problem(options: argparse.Namespace) -> str:
    """What is wrong with the arguments of ``link_arguments``; empty where nothing is."""
    if format_of(options) in ("ranks", "perfetto"):
        return ""
    given = [f"--{name}" for name in ("bandwidth", "latency") if getattr(options, name) is not None]
    return f"{given[0]} is for --format ranks or perfetto, which show when ranks wait for each other" if given else ""


def _add_link(group: Any, latency: str) -> None:
    group.add_argument("--bandwidth", "--network", type=_checked(parse_bandwidth), metavar="B", help=_BANDWIDTH_HELP)
    group.add_argument("--latency", type=_checked(parse_latency), metavar="T", help=_LATENCY_HELP.format(latency))


def _ranks(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks that exchange gradients: 2 or more")
    return int(text)


def _checked(parse: Any) -> Any:
    """A parser of text as argparse wants it."""

    def checked(text: str) -> float:
        try:
            return float(parse(text))
        except GraphoptError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked


def _parse_step_time(text: str) -> float:
    try:
        seconds = parse_latency(text)
    except GraphoptError:
        seconds = 0.0
    if not seconds:
        raise GraphoptError(f"{text!r} is not the time of a step: write 350ms or 1.2s")
    return seconds


def _density(text: str) -> float:
    try:
        density = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        density = 0.0
    if not 0 < density < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share above 0 and below 1: write 0.001 or 0.1%")
    return density


def _steps(text: str) -> tuple[int, ...]:
    pieces = text.split(",")
    if not all(piece.strip().isdecimal() and int(piece) for piece in pieces):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers above 0: write 4,8,16")
    return tuple(int(piece) for piece in pieces)


def exchange_ranks(options: argparse.Namespace) -> int | None:
    """How many ranks exchange gradients; None where that is not asked for."""
    if options.world_size is None and options.devices > 1 and options.bandwidth is not None:
        return int(options.devices)
    return None if options.world_size is None else int(options.world_size)


def exchange_problem(options: argparse.Namespace) -> str:
    """What is wrong with the arguments together; empty where nothing is."""
    network = {
        "--bandwidth": options.bandwidth,
        "--latency": options.latency,
        "--host-ranks": options.host_ranks,
        "--host-bandwidth": options.host_bandwidth,
        "--host-latency": options.host_latency,
        "--algorithm": options.algorithm,
        "--density": options.density,
        "--k-steps": options.k_steps,
        "--step-time": options.step_time,
    }
    given = [name for name, value in network.items() if value is not None]
    if exchange_ranks(options) is None:
        return f"{given[0]} describes an exchange of gradients: give --world-size too" if given else ""
    if options.bandwidth is None and options.device is None:
        return NO_BANDWIDTH
    if options.host_bandwidth is not None and options.host_ranks is None and options.device is None:
        return "--host-bandwidth needs --host-ranks, how many ranks a host has: --host-ranks 8"
    asked = options.host_ranks is not None or options.host_latency is not None
    if asked and options.host_bandwidth is None and options.device is None:
        return "--host-ranks and --host-latency need --host-bandwidth, what joins the ranks of a host"
    if options.budget:
        return joint_problem(options)
    if options.time_limit is not None:
        return "--time-limit ends the search for --budget, and nothing is searched with --world-size"
    return "--format svg draws the trade of memory; with --world-size use text or json" if _wants_svg(options) else ""


def joint_problem(options: argparse.Namespace) -> str:
    """What is wrong with the arguments of a plan for memory and communication together."""
    if options.device is None:
        return (
            "--budget for several ranks needs --device, whose seconds and links are planned with: --device h100-80gb "
            "--devices 8"
        )
    if options.world_size is not None and options.devices not in (1, options.world_size):
        return f"--world-size {options.world_size} and --devices {options.devices} differ: give --devices alone"
    compared = {"--density": options.density, "--k-steps": options.k_steps, "--step-time": options.step_time}
    compared["--algorithm"] = options.algorithm
    given = [name for name, value in compared.items() if value is not None]
    if not given:
        return ""
    return f"{given[0]} is for comparing ways to exchange gradients, and here those of --passes are planned"


def _wants_svg(options: argparse.Namespace) -> bool:
    return format_of(options) == "svg"
