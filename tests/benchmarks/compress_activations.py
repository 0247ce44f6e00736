"""``CompressActivations``: what waits for backward, peak and time beside recomputation, and how training goes.

Bytes that wait for backward are those that forward has made and that are alive when it ends. Peaks are what a step adds
to parameters, optimizer state and the batch; times are medians of paired rounds, as a ratio to the step without passes.
Training is that of a GPT of bytes on the text that every Python carries, with held-out loss at its end.
"""

from __future__ import annotations

import argparse
import runpy
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from frontier_models import WORKLOADS
from harness import example_models, make_table, paired_ratio, paired_seconds, parser, show

import graphopt
from graphopt.ir.node import Phase, info
from graphopt.passes import ChunkLoss, CompressActivations, FitMemory

models = example_models()
TEXT = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "text.py"))
MODELS = ("gpt", "resnet50")


def waiting_bytes(program: graphopt.Program) -> int:
    """What forward has made and backward will read, where forward ends."""
    memory = program.memory(measure=False)
    end = max(place for place, node in enumerate(memory.nodes) if info(node).phase is Phase.FORWARD)
    return sum(s.bytes for s in memory.storages if not s.is_input and s.first <= end < s.last)


def ways(name: str) -> dict[str, list[Any]]:
    """The passes that are compared on a model."""
    found: dict[str, list[Any]] = {
        "no passes": [],
        "8 bits": [CompressActivations()],
        "4 bits": [CompressActivations(4)],
    }
    return found | ({"ChunkLoss(), 8 bits": [ChunkLoss(), CompressActivations()]} if name == "gpt" else {})


def made(name: str, passes: Sequence[Any], *, quick: bool) -> tuple[graphopt.TrainStep, Any]:
    """A step that has run once, and its batch."""
    workload = WORKLOADS[name]
    torch.manual_seed(0)
    model, batch = workload.make(quick)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    step = graphopt.optimize_step(model, optimizer, passes, loss=workload.loss)
    step(*batch)
    return step, batch


def beside_recomputation(name: str, rounds: int, *, quick: bool) -> list[dict[str, Any]]:
    """Each way, and ``FitMemory`` within the same peak: bytes and time."""
    steps: dict[str, graphopt.TrainStep] = {}
    for way, passes in ways(name).items():
        steps[way], batch = made(name, passes, quick=quick)
        memory = steps[way].program.memory()
        if passes:
            try:
                steps[f"FitMemory at the peak of {way}"], _ = made(name, [FitMemory(memory.peak_bytes)], quick=quick)
            except graphopt.GraphoptError:
                steps[f"FitMemory at the peak of {way}"] = None  # type: ignore[assignment]
    there = {way: step for way, step in steps.items() if step is not None}
    seconds = paired_seconds([lambda step=step: step(*batch) for step in there.values()], rounds)
    times = dict(zip(there, seconds, strict=True))
    found = []
    for way, step in steps.items():
        if step is None:
            found.append({"model": name, "way": way, "waiting": None, "peak": None, "ratio": None})
            continue
        memory = step.program.memory()
        found.append(
            {
                "model": name,
                "way": way,
                "waiting": waiting_bytes(step.program),
                "peak": memory.allocated_peak_bytes,
                "ratio": paired_ratio(times[way], times["no passes"]),
            }
        )
    return found


def trained(passes: Sequence[Any], seed: int, steps: int) -> float:
    """Held-out loss of a small GPT of bytes behind so many steps."""
    train, held_out = TEXT["split_tokens"]()
    torch.manual_seed(seed)
    model = models.GPT(models.GPTConfig(vocab=TEXT["VOCAB"], context=64, d=96, layers=2, heads=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    step = graphopt.optimize_step(model, optimizer, passes, loss=models.next_token_loss)
    for batch in TEXT["draw_batches"](train, count=steps, size=16, length=64, seed=seed):
        step(*batch)
    with torch.no_grad():
        batches = TEXT["draw_batches"](held_out, count=50, size=16, length=64, seed=1)
        return statistics.fmean(float(models.next_token_loss(model, *batch)) for batch in batches)


def curves(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Held-out loss with each number of bits, beside none."""
    steps, seeds = (3, 1) if options.quick else (options.steps, options.seeds)
    ways_: dict[str, list[Any]] = {
        "no passes": [],
        "8 bits": [CompressActivations(min_bytes=0)],
        "4 bits": [CompressActivations(4, min_bytes=0)],
    }
    found = []
    for seed in range(seeds):
        losses = {way: trained(passes, seed, steps) for way, passes in ways_.items()}
        found += [
            {"seed": seed, "way": way, "loss": loss, "plain": losses["no passes"]} for way, loss in losses.items()
        ]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=7, help="rounds that are timed")
    options.add_argument("--steps", type=int, default=2000, help="steps of training")
    options.add_argument("--seeds", type=int, default=3, help="how often to train")
    options.add_argument("--only", choices=("memory", "training"), help="one of the two parts")
    given = options.parse_args(argv)
    torch.set_num_threads(given.threads)
    tables, result = [], {}
    if given.only != "training":
        rows = [
            row
            for name in MODELS
            for row in beside_recomputation(name, 1 if given.quick else given.rounds, quick=given.quick)
        ]
        result["memory"] = rows
        tables.append(
            make_table("Bytes and time of a step", ("", "waiting", "peak", "time"), [_shown(r) for r in rows])
        )
    if given.only != "memory":
        result["training"] = losses = curves(given)
        shown = [
            (f"seed {row['seed']}, {row['way']}", f"{row['loss']:.4f}", f"{row['loss'] / row['plain'] - 1:+.2%}")
            for row in losses
        ]
        tables.append(make_table("Held-out loss of the GPT of bytes", ("", "loss", "beside none"), shown))
    show(result, tables, as_json=given.json)
    return 0


def _shown(row: dict[str, Any]) -> tuple[str, ...]:
    name = f"{row['model']}: {row['way']}"
    if row["peak"] is None:
        return name, "", "no plan", ""
    return name, f"{row['waiting'] / 1e6:.1f} MB", f"{row['peak'] / 1e6:.1f} MB", f"×{row['ratio']:.2f}"


if __name__ == "__main__":
    sys.exit(main())
