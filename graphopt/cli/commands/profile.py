"""``graphopt profile``: what this machine can do, measured, as a table and as a file that other commands take."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace

import torch

from graphopt.analysis.costs.calibration import measured_profile
from graphopt.analysis.costs.figures import device_here, remeasure
from graphopt.analysis.costs.profiles import DeviceProfile
from graphopt.analysis.workspace import measured_temporaries
from graphopt.cli.arguments.exit_codes import wrong_use
from graphopt.cli.target.output import print_json, print_report
from graphopt.cli.target.programs import program_without_data
from graphopt.ir.words.columns import aligned
from graphopt.ir.words.written_units import format_bytes, format_seconds
from graphopt.report.console import terminal
from graphopt.rewriting.progress import working

__all__ = ["profile"]


def profile(options: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        GraphoptError: for a device that is not here, and a file that cannot be written.
    """
    if options.remeasure:
        remeasure()
    if options.place is not None:
        with wrong_use():
            device_here(options.place)
    place = options.place or ("cuda" if torch.cuda.is_available() else "cpu")
    with working(f"measuring {place}"):
        found = measured_profile(place)
    if options.calls:
        found = replace(found, temporaries=_temporaries(found, device_here(place), options))
    if options.output is not None:
        found.save(options.output)
        terminal.write(f"wrote {options.output} ({options.output.stat().st_size} bytes)", sys.stderr)
    if options.json:
        print_json({"device": found.name, "profile": asdict(found)})
    else:
        print_report(f"{found.name} ({place})", "\n".join(aligned(list(_rows(found)), right=(1,))))


def _temporaries(profile: DeviceProfile, device: torch.device, options: argparse.Namespace) -> dict[str, int]:
    """What calls of the targets allocate for themselves on the device, by their text."""
    nodes = [node for text in options.calls for node in program_without_data(text, profile, options).nodes]
    with working(f"measuring ops on {device}"):
        return measured_temporaries([node for node in nodes if node.op == "call_function"], device)


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
    if found.temporaries:
        most = format_bytes(max(found.temporaries.values()))
        yield "ops that were measured", f"{len(found.temporaries)}, up to {most} for itself"


def _per_second(rate: float) -> str:
    return f"{format_bytes(rate)}/s" if rate else "not measured"
