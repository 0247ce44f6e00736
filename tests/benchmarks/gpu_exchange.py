"""Two ranks with a device each that exchange gradients: seconds of a step without and with, and what is waited for.

Prints one JSON object: ``plain`` and ``exchanged``, the seconds of a step; ``exchange``, the seconds that the exchanges
of one step take, and ``exposed``, those in which no other kernel runs beside them, by the profiler's trace of rank 0.
``--device cpu`` tries it with gloo, of which the trace shows no kernels. ``gpu.py`` runs this.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from gpu import Setting, covered

from graphopt.passes import DataParallel


def exposed(spans: Sequence[tuple[float, float, str]]) -> tuple[float, float]:
    """The time of exchanges among kernels given as start, end and name, and how much of it no other runs beside."""
    exchanges = [span[:2] for span in spans if "nccl" in span[2].lower()]
    others = [span[:2] for span in spans if not any(word in span[2].lower() for word in ("nccl", "memcpy", "memset"))]
    total = sum(end - start for start, end in exchanges)
    return total, total * (1 - covered(exchanges, others))


def seconds(setting: Setting, step: Any, batch: Sequence[torch.Tensor]) -> float:
    """The median time of a step; ranks begin each together."""
    taken = []
    for _ in range(3 if setting.quick else 10):
        dist.barrier()
        setting.wait()
        started = time.perf_counter()
        step(*batch)
        setting.wait()
        taken.append(time.perf_counter() - started)
    return median(taken)


def traced(setting: Setting, step: Any, batch: Sequence[torch.Tensor]) -> tuple[float, float]:
    """Seconds of the exchanges of one step, and those that are exposed."""
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
        step(*batch)
        setting.wait()
    events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    spans = [(event.time_range.start, event.time_range.end, event.name) for event in events]
    total, alone = exposed(spans)
    return total * 1e-6, alone * 1e-6


def rank_of(rank: int, kind: str, quick: bool, folder: str) -> None:
    """One rank: measures, and the first one writes what it found."""
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=2)
    setting = Setting(device, quick)
    batch, found = setting.batch(), {}
    for name, passes in (("plain", []), ("exchanged", [DataParallel()])):
        _, step = setting.step(passes)
        for _ in range(2):
            step(*batch)
        found[name] = seconds(setting, step, batch)
    found["exchange"], found["exposed"] = traced(setting, step, batch)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> int:
    """Start both ranks, and print what the first one found."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--quick", action="store_true", help="small sizes")
    options = made.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        given = (options.device, options.quick, folder)
        torch.multiprocessing.start_processes(rank_of, given, nprocs=2, start_method="spawn")  # type: ignore[no-untyped-call]
        print(Path(folder, "found.json").read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
