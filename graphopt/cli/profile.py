"""``graphopt profile``: what this machine can do, measured, as a table and as a file that other commands take."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict

import torch

from graphopt.analysis.costs.calibration import measured_profile
from graphopt.analysis.costs.device_names import is_profile_file
from graphopt.analysis.costs.figures import remeasure
from graphopt.analysis.costs.profiles import DeviceProfile
from graphopt.cli.output import check_output, print_json, print_report
from graphopt.errors import GraphoptError
from graphopt.ir.columns import aligned
from graphopt.ir.ops.values import format_bytes, format_seconds
from graphopt.report.console import terminal

__all__ = ["profile"]


def profile(options: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        GraphoptError: for a device that is not here, and a file that cannot be written.
    """
    check_output(options)
    if options.output is not None and not is_profile_file(options.output.name):
        raise GraphoptError(f"a profile is written as TOML: let {options.output} end in .toml")
    if options.remeasure:
        remeasure()
    place = options.place or ("cuda" if torch.cuda.is_available() else "cpu")
    with terminal.working(f"measuring {place}"):
        found = measured_profile(place)
    if options.output is not None:
        found.save(options.output)
        terminal.write(f"wrote {options.output} ({options.output.stat().st_size} bytes)", sys.stderr)
    if options.json:
        print_json({"device": found.name, "profile": asdict(found)})
    else:
        print_report(f"{found.name} ({place})", "\n".join(aligned(list(_rows(found)), right=(1,))))


def _rows(found: DeviceProfile) -> Iterator[tuple[str, str]]:
    for dtype, rate in found.flops.items():
        yield f"matrix products in {dtype}", f"{rate / 1e12:,.3g} TFLOP/s"
    yield "memory, reading and writing", _per_second(found.memory_bandwidth)
    yield "link to the host, each direction", _per_second(found.host_bandwidth)
    yield "link to another device, each direction", _per_second(found.peer_bandwidth)
    yield "disk, the slower direction", _per_second(found.disk_bandwidth)
    yield "a small op", format_seconds(found.overhead)
    yield "memory in all", format_bytes(found.memory_bytes)
    yield "memory for tensors", format_bytes(found.usable_bytes)


def _per_second(rate: float) -> str:
    return f"{format_bytes(rate)}/s" if rate else "not measured"
