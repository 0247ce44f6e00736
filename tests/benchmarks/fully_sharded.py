"""A model after ``fully_shard``: FSDP2 with its own ways to save memory, and with programs within budgets.

    python tests/benchmarks/fully_sharded.py --ranks 2
    python tests/benchmarks/fully_sharded.py --tensor

With ``--tensor`` the feed-forward layers are divided by ``parallelize_module`` instead, and torch's own way to run
them stands in FSDP2's place.

A GPT of blocks, each given to ``fully_shard``, and the whole; forward and backward, two processes of one thread each.
Bytes are what a pass through both allocates at most on the first rank, as measured and as predicted; times are paired
within rounds, beside FSDP2. Every way gives the same gradients to the last bit, or the script ends with 1.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import make_table, parser, show
from offload_state import GPT
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import graphopt

VOCABULARY, CONTEXT = 2048, 128


def built(width: int, layers: int, *, checkpoints: bool = False, frees: bool = True) -> Any:
    """The GPT after ``fully_shard``, the same each time."""
    torch.manual_seed(0)
    model: Any = GPT(width, layers, VOCABULARY, CONTEXT)
    for place, block in enumerate(list(model.blocks)):
        if checkpoints:
            block = model.blocks[place] = checkpoint_wrapper(block)
        fully_shard(block, reshard_after_forward=frees)
    return fully_shard(model, reshard_after_forward=frees)


def divided(width: int, layers: int, *, checkpoints: bool = False) -> Any:
    """The GPT after ``parallelize_module``, the same each time."""
    torch.manual_seed(0)
    model: Any = GPT(width, layers, VOCABULARY, CONTEXT)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for place, block in enumerate(list(model.blocks)):
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if checkpoints:
            model.blocks[place] = checkpoint_wrapper(block)
    return model


def ways(width: int, layers: int, budgets: Sequence[str], *, tensor: bool) -> dict[str, Any]:
    """The models, by what is done to them; torch's own way first."""
    if tensor:
        made = {
            "torch": divided(width, layers),
            "torch, checkpoints": divided(width, layers, checkpoints=True),
            "optimize": graphopt.optimize(divided(width, layers)),
        }
        return made | {
            f"FitMemory({budget!r})": graphopt.optimize(divided(width, layers), f"fit-memory{{budget={budget}}}")
            for budget in budgets
        }
    made = {
        "FSDP2": built(width, layers),
        "FSDP2, reshard_after_forward=False": built(width, layers, frees=False),
        "FSDP2, checkpoints": built(width, layers, checkpoints=True),
        "FSDP2, checkpoints, reshard_after_forward=False": built(width, layers, checkpoints=True, frees=False),
        "optimize": graphopt.optimize(built(width, layers)),
    }
    return made | {
        f"FitMemory({budget!r})": graphopt.optimize(built(width, layers), f"fit-memory{{budget={budget}}}")
        for budget in budgets
    }


def rank(width: int, layers: int, batch: int, rounds: int, budgets: Sequence[str], tensor: bool) -> dict[str, Any]:
    """What this process finds of each way."""
    torch.set_num_threads(1)
    logging.getLogger("graphopt").setLevel(logging.WARNING)
    dist.init_process_group("gloo")
    seed = 0 if tensor else dist.get_rank()  # who shares layers has the same batch
    tokens = torch.randint(0, VOCABULARY, (batch, CONTEXT), generator=torch.Generator().manual_seed(seed))
    models, found, first = ways(width, layers, budgets, tensor=tensor), {}, None
    for name, model in models.items():
        for _ in range(2):
            _train(model, tokens)
        peaks = []
        for _ in range(3):  # gloo's threads may let go of an exchange a moment late
            model.zero_grad()
            peaks.append(graphopt.measure_peak(lambda model=model: model(tokens).backward()).allocated_peak_bytes)
        gradients = [getattr(p.grad, "full_tensor", p.grad.clone)() for p in model.parameters()]
        first = gradients if first is None else first
        predicted = model.program.memory().allocated_peak_bytes if hasattr(model, "program") else 0
        equal = all(map(torch.equal, first, gradients))
        found[name] = {"peak": min(peaks), "predicted": predicted, "equal": equal, "seconds": []}
    for _ in range(rounds):
        for name, model in models.items():
            dist.barrier()
            started = time.perf_counter()
            _train(model, tokens)
            dist.barrier()
            found[name]["seconds"].append(time.perf_counter() - started)
    dist.destroy_process_group()
    return found


def _train(model: Any, tokens: torch.Tensor) -> None:
    model.zero_grad()
    model(tokens).backward()


def main(argv: Sequence[str] | None = None) -> int:
    """Start the processes and print a table; returns 1 where gradients differ."""
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=9, help="of all ways")
    options.add_argument("--ranks", type=int, default=2, help="how many processes")
    options.add_argument("--width", type=int, default=256, help="features")
    options.add_argument("--layers", type=int, default=6, help="blocks")
    options.add_argument("--batch", type=int, default=8, help="sequences of a process")
    options.add_argument("--budgets", nargs="+", default=["80%", "60%", "50%", "40%"], help="of FitMemory")
    options.add_argument("--tensor", action="store_true", help="tensor parallelism in the place of FSDP2")
    given = options.parse_args(argv)
    rounds = 2 if given.quick else given.rounds
    if "RANK" in os.environ:
        print(json.dumps(rank(given.width, given.layers, given.batch, rounds, given.budgets, given.tensor)))
        return 0
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29713", "WORLD_SIZE": str(given.ranks)}
    processes = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__)), *(sys.argv[1:] if argv is None else argv)],
            env={**common, "RANK": str(number), "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True,
        )
        for number in range(given.ranks)
    ]  # fmt: skip
    texts = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        return 1
    found: dict[str, Any] = json.loads(texts[0].splitlines()[-1])
    reference = next(iter(found.values()))["seconds"]
    rows = [
        (
            name,
            f"{way['peak'] / 1e6:.1f} MB",
            f"{way['predicted'] / 1e6:.1f} MB" if way["predicted"] else "",
            f"×{statistics.median(a / b for a, b in zip(way['seconds'], reference, strict=True)):.3f}",
        )
        for name, way in found.items()
    ]
    title = f"a GPT of {given.layers} blocks on {given.ranks} ranks"
    show(found, [make_table(title, ("way", "peak", "predicted", "time"), rows)], as_json=given.json)
    return 0 if all(way["equal"] for way in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
