"""The first step of a process: CPU seconds of capture, passes, code generation and one run, for GPTs of several depths.

Each figure is that of a process of its own, without what it takes to import torch and graphopt. What ``FitMemory``
measures of each kind of call is measured anew.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
from harness import example_models, make_table, parser, show

import graphopt
from graphopt.passes import FitMemory

models = example_models()


def first_step(layers: int, width: int, budget: str) -> dict[str, Any]:
    """CPU seconds of the first step in this process; without passes where the budget is empty."""
    config = models.GPTConfig(vocab=64, context=64, d=width, layers=layers, heads=2)
    model = models.GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch = torch.randint(config.vocab, (2, 8, config.context))
    started = time.process_time()
    step = graphopt.optimize_step(model, optimizer, [FitMemory(budget)] if budget else [], loss=models.next_token_loss)
    step(*batch)
    seconds = time.process_time() - started
    nodes = len(step.snapshots[-2 if budget else -1][1].nodes)
    return {"layers": layers, "budget": budget, "nodes": nodes, "cpu_seconds": seconds}


def in_a_process(layers: int, width: int, budget: str, threads: int) -> dict[str, Any]:
    """The same in a process of its own, which finds nothing that earlier ones have kept."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            __file__,
            "--layers",
            str(layers),
            "--width",
            str(width),
            "--budget",
            budget,
            "--one",
        ]
        ran = subprocess.run(
            [*command, "--threads", str(threads)],
            env={**os.environ, "XDG_CACHE_HOME": folder, "GRAPHOPT_CACHE": folder},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--layers", type=int, nargs="+", help="depths (default: 8 24 48 96; 1 2 with --quick)")
    options.add_argument("--width", type=int, default=64, help="features of a token")
    options.add_argument("--budget", default="60%", help="of FitMemory")
    options.add_argument("--one", action="store_true", help="measure in this process, the first depth only")
    given = options.parse_args(argv)
    torch.set_num_threads(given.threads)
    depths = given.layers or ([1, 2] if given.quick else [8, 24, 48, 96])
    if given.one:
        print(json.dumps(first_step(depths[0], given.width, given.budget)))
        return 0
    results = [
        in_a_process(layers, given.width, budget, given.threads) for layers in depths for budget in ("", given.budget)
    ]
    rows = [
        (
            f"{row['layers']} layers, {'FitMemory ' + row['budget'] if row['budget'] else 'no passes'}",
            f"{row['nodes']:,}",
            f"{row['cpu_seconds']:.2f} s",
            f"{row['cpu_seconds'] / row['nodes'] * 1e3:.2f}",
        )
        for row in results
    ]
    table = make_table("First step of a process", ("", "nodes", "CPU time", "ms/node"), rows)
    show({"results": results}, [table], as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
