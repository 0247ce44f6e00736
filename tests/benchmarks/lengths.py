"""32 lengths between 17 and 512 in random order: captures, peaks and seconds of graphopt and of torch.compile.

Every way trains the same GPT for one step at each length. What it captures or compiles on the way is part of its time.
"""

from __future__ import annotations

import copy
import gc
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from harness import example_models, make_table, parser, show

import graphopt
from graphopt.passes import FitMemory

models = example_models()

Batch = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
VOCAB, ROWS = 256, 4


class Case:
    """A GPT, its batches, and a budget: a share of what a step takes at the largest length.

    Args:
        lengths: of the batches.
        quick: a smaller model.
        share: of the plain peak at the largest length.
    """

    def __init__(self, lengths: Sequence[int], quick: bool, share: float) -> None:
        d, layers = (32, 2) if quick else (128, 4)
        torch.manual_seed(0)
        self.model = models.GPT(models.GPTConfig(VOCAB, max(lengths), d, layers, 4, dropout=0.1))
        self.batches: list[Batch] = [
            (torch.randint(VOCAB, (ROWS, length)), torch.randint(VOCAB, (ROWS, length))) for length in lengths
        ]
        model, optimizer = self.new()
        largest = max(self.batches, key=lambda batch: batch[0].shape[1])
        program = graphopt.capture(model, largest, loss=models.next_token_loss, optimizer=optimizer)
        self.plain = program.memory().peak_bytes
        self.budget = int(self.plain * share)

    def new(self) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        """A copy of the model as it was made, and its optimizer."""
        model = copy.deepcopy(self.model)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def loop(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """The usual step of a model."""

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = models.next_token_loss(model, tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def eager(case: Case) -> Step:
    return loop(*case.new())


def compiled(backend: str) -> Callable[[Case], Step]:
    """torch.compile with sizes that vary from the beginning."""

    def make(case: Case) -> Step:
        torch.compiler.reset()
        model, optimizer = case.new()
        return loop(torch.compile(model, backend=backend, dynamic=True), optimizer)

    return make


def captured(*, fit: bool, dynamic_shapes: Any = "auto") -> Callable[[Case], Step]:
    """A whole step, with or without a budget."""

    def make(case: Case) -> Step:
        model, optimizer = case.new()
        passes = [FitMemory(case.budget, cost="roofline")] if fit else []
        return graphopt.optimize_step(
            model, optimizer, passes, loss=models.next_token_loss, dynamic_shapes=dynamic_shapes
        )

    return make


WAYS: dict[str, Callable[[Case], Step]] = {
    "eager PyTorch": eager,
    "optimize_step": captured(fit=False),
    "optimize_step, each length captured": captured(fit=False, dynamic_shapes=None),
    "FitMemory": captured(fit=True),
    "FitMemory, each length captured": captured(fit=True, dynamic_shapes=None),
    "torch.compile(dynamic=True), aot_eager": compiled("aot_eager"),
    "torch.compile(dynamic=True), inductor": compiled("inductor"),
}


def measure(name: str, case: Case, reference: list[torch.Tensor] | None) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Train in one way; what it took, and its losses."""
    gc.collect()
    torch.manual_seed(1)
    started = time.perf_counter()
    step = WAYS[name](case)
    losses = [step(*batch).clone() for batch in case.batches]
    first = time.perf_counter() - started
    started = time.perf_counter()
    for batch in case.batches:
        step(*batch)
    again = time.perf_counter() - started
    result: dict[str, Any] = {"way": name, "seconds": first, "second_round_seconds": again}
    if reference is not None:
        result["equal"] = all(map(torch.equal, losses, reference))
    if isinstance(step, graphopt.TrainStep):
        serving = step._runner.serving
        result |= {"captures": len(serving.captures.all()), "programs": len(serving.everything())}
        peaks = [measured_peak(step, batch) for batch in case.batches]
        result |= {"peaks": peaks, "largest_peak": max(peaks)}
        if name.startswith("FitMemory"):
            result["within_budget"] = all(peak <= case.budget for peak in peaks)
    return result, losses


def measured_peak(step: graphopt.TrainStep, batch: Batch) -> int:
    """The peak of a step in bytes: what was there before, and what the allocator reports above it."""
    program = step.prepare(*batch).program
    sizes = dict.fromkeys(program.symbols, batch[0].shape[1])
    above = graphopt.measure_peak(lambda: step(*batch)).allocated_peak_bytes
    return program.memory(sizes=sizes).resident_bytes + above


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="which to run, eager first")
    options.add_argument("--share", type=float, default=0.6, help="budget, as a share of the plain peak at the largest")
    given = options.parse_args(argv)
    torch.set_num_threads(given.threads)
    count, most = (5, 64) if given.quick else (32, 512)
    lengths = random.Random(0).sample(range(17, most + 1), count)
    case = Case(lengths, given.quick, given.share)
    results: list[dict[str, Any]] = []
    reference: list[torch.Tensor] | None = None
    for name in dict.fromkeys(["eager PyTorch", *given.ways]):
        result, losses = measure(name, case, reference)
        reference = losses if reference is None else reference
        results.append(result)
    rows = [
        (
            row["way"],
            f"{row['seconds']:.1f} s",
            f"{row['second_round_seconds']:.1f} s",
            str(row.get("captures", "")),
            str(row.get("programs", "")),
            f"{row['largest_peak'] / 1e6:.2f} MB" if "largest_peak" in row else "",
            {True: "yes", False: "no", None: ""}[row.get("equal")],
        )
        for row in results
    ]
    headings = ("way", "in all", "a round more", "captures", "programs", "largest peak", "eager's bits")
    table = make_table(
        f"{count} lengths between 17 and {most}, budget {case.budget / 1e6:.2f} of {case.plain / 1e6:.2f} MB",
        headings,
        rows,
    )
    show({"lengths": lengths, "budget": case.budget, "plain": case.plain, "results": results}, [table],
         as_json=given.json)  # fmt: skip
    return 0 if all(row.get("within_budget", True) for row in results) else 1


if __name__ == "__main__":
    sys.exit(main())
