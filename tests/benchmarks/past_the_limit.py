"""The GPT of the README's picture, trained in a process that the system kills where it takes more than a limit.

Eager PyTorch and ``FitMemory`` run the same steps, each in a memory cgroup of its own; then eager PyTorch without the
limit, for its losses. Needs root, cgroups of the first version, and for the last run as much memory as the step takes.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from harness import make_table, parser, show
from memory_limit import limited, most_taken

import graphopt
from graphopt.ir.words.written_units import format_bytes, parse_bytes
from graphopt.passes import FitMemory

GROUP = "graphopt-limit"


def train(way: str, target: str, budget: str, steps: int) -> None:
    """Run steps in this process, and print a line of JSON behind each."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    torch.manual_seed(0)
    made = getattr(importlib.import_module("fit_gpt"), target)()
    model, optimizer, loss, batch = made["model"], made["optimizer"], made["loss"], made["example_inputs"]
    step: Any
    if way == "eager":

        def step(*given: torch.Tensor) -> torch.Tensor:
            value: torch.Tensor = loss(model, *given)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            return value.detach()

    else:
        step = graphopt.optimize_step(model, optimizer, [FitMemory(budget)], loss=loss)
    for _ in range(steps):
        started = time.perf_counter()
        value = step(*batch).item()
        print(json.dumps({"loss": value, "seconds": time.perf_counter() - started}), flush=True)


def outcome(way: str, limit: int, arguments: Sequence[str], threads: int) -> dict[str, Any]:
    """What a way comes to in a process of its own: its steps, what it took, and whether it was killed."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": str(threads)}
    command = limited([sys.executable, __file__, "--way", way, *arguments], limit, GROUP)
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    steps = [json.loads(line) for line in done.stdout.splitlines()]
    ended = {0: "trained", -9: "killed"}.get(done.returncode, f"failed with {done.returncode}")
    return {"way": way, "limit": limit, "ended": ended, "steps": steps, "most": most_taken(GROUP) if limit else None}


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--way", help="train in this process")
    options.add_argument("--target", default="large", help="a function of examples/fit_gpt.py")
    options.add_argument("--budget", default="8GB", help="bytes that FitMemory may take")
    options.add_argument(
        "--limit", default="10GB", help="bytes of the cgroup: the budget, and what Python itself takes"
    )
    options.add_argument("--steps", type=int, default=2)
    given = options.parse_args(argv)
    torch.set_num_threads(given.threads)
    if given.quick:
        given.target, given.budget, given.limit, given.steps = "factory", "128MB", "2GB", 1
    if given.way is not None:
        train(given.way, given.target, given.budget, given.steps)
        return 0
    arguments = [f"--target={given.target}", f"--budget={given.budget}", f"--steps={given.steps}"]
    limit = parse_bytes(given.limit)
    runs = [("eager", limit), ("FitMemory", limit), ("eager", 0)]
    found = [outcome(way, bytes_, arguments, given.threads) for way, bytes_ in runs]
    rows = [
        (
            f"{run['way']}, {'within ' + format_bytes(run['limit']) if run['limit'] else 'no limit'}",
            f"{run['ended']}, {len(run['steps'])} steps",
            format_bytes(run["most"]) if run["most"] else "",
            ", ".join(f"{step['seconds']:.0f} s" for step in run["steps"]),
            ", ".join(f"{step['loss']:.9f}" for step in run["steps"]),
        )
        for run in found
    ]
    table = make_table(f"{given.target}, budget {given.budget}", ("", "", "process", "steps take", "losses"), rows)
    show({"results": found}, [table], as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
