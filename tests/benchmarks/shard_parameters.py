"""A GPT's whole step over several ranks: what each way leaves on every rank, its seconds, and a limit it keeps to.

Each way is a set of processes of its own, one thread each. *Resident* is what model, optimizer and batch take on a rank
between steps and *peak* what a step takes at most, as predicted; *predicted* and *measured* are what a step allocates
beside what is resident, *anonymous* what the system counts as a process's own memory between steps, above what it took
before the model was made: the most of all ranks. Seconds are the median of some steps. With ``--limit`` each rank
runs in a memory cgroup that kills what takes more, from the making of the model on.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import parser
from memory_limit import limited
from offload_state import GPT, anonymous_bytes
from torch.distributed.fsdp import fully_shard

import graphopt

FSDP2 = "FSDP2"
WITHOUT_DATA = "without data: "
WAYS = {
    "DataParallel": "data-parallel",
    "ShardOptimizer": "data-parallel,shard-optimizer",
    "FSDP2 (fully_shard)": FSDP2,
    "ShardParameters": "data-parallel,shard-parameters",
    "ShardParameters, made without data": WITHOUT_DATA + "data-parallel,shard-parameters",
    "the same with Recompute": WITHOUT_DATA + "data-parallel,shard-parameters,recompute{checkpoints=auto}",
}
COLUMNS = ("resident", "peak", "predicted", "measured", "anonymous")


def run(way: str, width: int, layers: int, steps: int) -> dict[str, Any]:
    """Train on this rank for some steps, and say what that took."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    before = anonymous_bytes()
    torch.manual_seed(0)
    passes = way.removeprefix(WITHOUT_DATA)
    if way.startswith(WITHOUT_DATA):
        with torch.device("meta"):
            model = GPT(width, layers, 2048, 128)
        graphopt.materialize_shards(model)
    else:
        model = GPT(width, layers, 2048, 128)
    generator = torch.Generator().manual_seed(rank)
    batches = [torch.randint(0, 2048, (4, 128), generator=generator) for _ in range(steps)]
    step, memory = _fully_sharded(model, ranks) if way == FSDP2 else _ours(model, passes, batches[0])
    losses, seconds = [], []
    for batch in batches:
        dist.barrier()
        begun = time.perf_counter()
        losses.append(float(step(batch)))
        seconds.append(time.perf_counter() - begun)
    between = anonymous_bytes() - before
    measured = graphopt.measure_peak(lambda: step(batches[-1])).allocated_peak_bytes
    return {
        "rank": rank,
        "losses": losses,
        "resident": memory.resident_bytes if memory else 0,
        "peak": memory.peak_bytes if memory else 0,
        "predicted": memory.allocated_peak_bytes if memory else 0,
        "measured": measured,
        "anonymous": between,
        "seconds": statistics.median(seconds[2:]),
    }


def _ours(model: GPT, passes: str, batch: torch.Tensor) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    step = graphopt.optimize_step(model, optimizer, passes)
    return step, step.prepare(batch).program.memory()


def _fully_sharded(model: GPT, ranks: int) -> tuple[Any, None]:
    mesh = dist.init_device_mesh("cpu", (ranks,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, None


def in_processes(way: str, ranks: int, arguments: Sequence[str], limit: int) -> list[dict[str, Any]] | str:
    """What the ranks say of a way; or that one was killed."""
    with tempfile.TemporaryDirectory() as folder:
        common = {
            **os.environ, "GRAPHOPT_CACHE": folder, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29711",
        }  # fmt: skip
        processes = [
            subprocess.Popen(
                limited(
                    [sys.executable, str(Path(__file__)), "--way", way, *arguments], limit, f"graphopt-rank-{rank}"
                ),
                env={**common, "RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for rank in range(ranks)
        ]  # fmt: skip
        while all(process.poll() is None for process in processes):
            time.sleep(0.2)
        if any(process.poll() for process in processes):  # the others would wait for the one that is gone
            for process in processes:
                process.terminate()
        texts = [process.communicate() for process in processes]
    if any(process.returncode == -9 for process in processes):
        return "killed"
    if any(process.returncode for process in processes):
        return max((error for _, error in texts), key=len)[-2000:]
    return [json.loads(text.splitlines()[-1]) for text, _ in texts]


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--way", help="be one rank of a way in this process")
    options.add_argument("--ways", default=";".join(WAYS), help="as the table calls them, with semicolons")
    options.add_argument("--ranks", type=int, default=4)
    options.add_argument("--width", type=int, default=512)
    options.add_argument("--layers", type=int, default=8)
    options.add_argument("--steps", type=int, default=8)
    options.add_argument("--limit", type=int, default=0, help="bytes of a memory cgroup that each rank runs in")
    given = options.parse_args(argv)
    torch.set_num_threads(1)
    if given.quick:
        given.ranks, given.width, given.layers, given.steps = 2, 64, 2, 5
    if given.way is not None:
        print(json.dumps(run(given.way, given.width, given.layers, given.steps)))
        return 0
    arguments = [f"--width={given.width}", f"--layers={given.layers}", f"--steps={given.steps}"]
    found = {name: in_processes(WAYS[name], given.ranks, arguments, given.limit) for name in given.ways.split(";")}
    if given.json:
        print(json.dumps(found))
        return 0
    print(f"{given.ranks} ranks" + (f", each within {given.limit:,} bytes" if given.limit else ""))
    print(f"{'':40}{''.join(f'{key:>14}' for key in COLUMNS)}{'seconds':>9}  last mean loss")
    for name, ranks in found.items():
        if isinstance(ranks, str):
            print(f"{name:40}{ranks}")
            continue
        numbers = "".join(f"{max(item[key] for item in ranks):14,}" for key in COLUMNS)
        loss = statistics.fmean(item["losses"][-1] for item in ranks)
        print(f"{name:40}{numbers}{max(item['seconds'] for item in ranks):9.3f}  {loss:.9f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
