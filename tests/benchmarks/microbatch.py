"""A GPT's step with ``Microbatch``, beside recomputation within the same bytes.

Bytes are what a step adds to parameters, optimizer state and the batch, predicted and measured. Times are medians of
paired rounds, as a ratio to the step without passes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from chunk_loss import compared, shown
from frontier_models import WORKLOADS
from harness import parser

import graphopt
from graphopt.errors import GraphoptError
from graphopt.passes import FitMemory, Microbatch, Recompute

WAYS: dict[str, list[Any]] = {
    "no passes": [],
    "Microbatch(2)": [Microbatch(2)],
    "Microbatch(4)": [Microbatch(4)],
    "Microbatch(8)": [Microbatch(8)],
    "Recompute(auto), Microbatch(8)": [Recompute("auto"), Microbatch(8)],
}


def made(passes: Sequence[Any], *, quick: bool) -> tuple[graphopt.TrainStep, Any]:
    """A step that has run twice, and its batch."""
    workload = WORKLOADS["gpt"]
    torch.manual_seed(0)
    model, batch = workload.make(quick)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    step = graphopt.optimize_step(model, optimizer, passes, loss=workload.loss)
    step(*batch)
    step(*batch)
    return step, batch


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=7, help="rounds that are timed")
    given = options.parse_args(argv)
    torch.set_num_threads(given.threads)
    ways = dict(list(WAYS.items())[:2]) if given.quick else WAYS
    steps: dict[str, graphopt.TrainStep] = {}
    for name, passes in ways.items():
        steps[name], batch = made(passes, quick=given.quick)
        if "Microbatch" in name:
            memory = steps[name].program.memory()
            within = memory.resident_bytes + memory.allocated_peak_bytes
            try:
                steps[f"FitMemory at the peak of {name}"], _ = made([FitMemory(within)], quick=given.quick)
            except GraphoptError:
                print(f"FitMemory finds no plan at the peak of {name}", file=sys.stderr)
    title = "A step of the GPT, beyond persistent memory"
    shown(title, compared(steps, batch, 1 if given.quick else given.rounds), as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
