"""Inside of torch.compile: its backend "graphopt" beside graphopt.optimize, and our partitioner beside torch's budget.

Peaks are bytes above persistent memory, from the allocator's events, and exact; times are ratios, paired by rounds.
The first table has the GPT of memory_frontier.py with the same passes in both ways. The others have stock inductor:
torch's activation_memory_budget at nine values, and for each peak that it reaches, our partitioner at a budget a little
below it, since inductor decides itself what it fuses and predictions are not exact there.
"""

from __future__ import annotations

import argparse
import copy
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from frontier_models import WORKLOADS, WithLoss
from harness import make_table, paired_ratio, paired_seconds, parser, show
from torch import nn
from torch._functorch import config

import graphopt

PASSES = ("", "fit-memory{budget=80%}", "fit-memory{budget=60%}", "fit-memory{budget=40%}")
TORCH_BUDGETS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
MODELS = ("gpt", "bert", "vit")
BELOW = 0.97
"""Of a peak that torch reaches, the budget that our partitioner gets."""


@dataclass
class Row:
    """One way to run forward and backward.

    Attributes:
        way: what it is.
        peak_bytes: above persistent memory; None where it failed.
        ratio: its time by that of the first way.
        gradients: whether they are those of the first way (``equal``, ``close``), or how far away.
        note: why it failed.
    """

    way: str
    peak_bytes: int | None = None
    ratio: float | None = None
    gradients: str = ""
    note: str = ""


class Comparison:
    """Ways to run one model, the first of which is what others are compared with."""

    def __init__(self, name: str, quick: bool) -> None:
        torch.manual_seed(0)
        workload = WORKLOADS[name]
        made, self.batch = workload.make(quick)
        self.base = WithLoss(made, workload.loss)
        self.title = ("small version of " if quick else "") + workload.title
        self.rows: list[Row] = []
        self._runs: list[Callable[[], Any]] = []
        self._expected: list[torch.Tensor] = []

    @property
    def resident(self) -> int:
        """Bytes of parameters, buffers and the batch."""
        return sum(t.nbytes for t in (*self.base.parameters(), *self.base.buffers(), *self.batch))

    def add(self, way: str, prepare: Callable[[nn.Module], Callable[..., torch.Tensor]]) -> Row:
        """Run a way, and note its peak and its gradients."""
        torch._dynamo.reset()
        model = copy.deepcopy(self.base)
        row = Row(way)
        self.rows.append(row)

        def run() -> None:
            model.zero_grad()
            call(*self.batch).backward()

        try:
            call = prepare(model)
            for _ in range(3):  # graphs that are planned together are so at the second call
                torch.manual_seed(1)
                run()
            row.peak_bytes = graphopt.measure_peak(run).allocated_peak_bytes
        except Exception as error:
            row.note = str(error).strip().splitlines()[0][:60]
            print(f"{way}: {row.note}", file=sys.stderr, flush=True)
            return row
        torch.manual_seed(1)
        run()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        self._expected = self._expected or gradients
        row.gradients = closeness(gradients, self._expected)
        self._runs.append(run)
        print(f"{way}: {row.peak_bytes / 1e6:.1f} MB, gradients {row.gradients}", file=sys.stderr, flush=True)
        return row

    def time(self, rounds: int) -> None:
        """Time all ways that ran."""
        seconds = paired_seconds(self._runs, rounds, warm_up=1)
        ran = [row for row in self.rows if row.peak_bytes is not None]
        for row, mine in zip(ran, seconds, strict=True):
            row.ratio = paired_ratio(mine, seconds[0])


def closeness(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> str:
    """Whether gradients are equal, close, or something else."""
    if all(map(torch.equal, found, expected)):
        return "equal"
    largest = max(float(e.abs().max()) for e in expected)
    apart = max(float((f - e).abs().max()) for f, e in zip(found, expected, strict=True)) / largest
    return "close" if apart < 1e-4 else f"off by {apart:.0%}"


def backend_rows(quick: bool, rounds: int) -> Comparison:
    """The backend and the drop-in model, with the same passes."""
    found = Comparison("gpt", quick)
    found.add("eager PyTorch", lambda model: model)
    for passes in PASSES[:2] if quick else PASSES:
        found.add(f"graphopt.optimize {passes}", lambda model, p=passes: graphopt.optimize(model, p or ()))
        found.add(f"torch.compile     {passes}", lambda model, p=passes: compiled(model, p))
    found.time(rounds)
    return found


def compiled(model: nn.Module, passes: str) -> Any:
    return torch.compile(model, backend="graphopt", options={"passes": passes} if passes else None)


def partitioner_rows(name: str, quick: bool, rounds: int, budgets: Sequence[float]) -> Comparison:
    """Torch's budgets, and our partitioner at the peaks that they reach."""
    found = Comparison(name, quick)
    first = found.add("inductor", torch.compile)
    reached = []
    for budget in budgets:
        with config.patch(activation_memory_budget=budget):
            row = found.add(f"torch's budget {budget}", torch.compile)
        reached += [row.peak_bytes] if row.peak_bytes is not None else []
    for peak in sorted({min(peak, first.peak_bytes or peak) for peak in reached}, reverse=True):
        budget = f"{100 * (BELOW * peak + found.resident) / ((first.peak_bytes or peak) + found.resident):.1f}%"
        found.add(
            f"graphopt.partitioner({budget!r})",
            lambda model, b=budget: torch.compile(model, options={"custom_partitioner_fn": graphopt.partitioner(b)}),
        )
    found.time(rounds)
    return found


def outcome(found: Comparison) -> str:
    """At how many of torch's budgets one of our partitions takes no more of bytes and time, and less of one."""
    torchs = [row for row in found.rows if row.way.startswith("torch's budget") and row.peak_bytes is not None]
    ours = [row for row in found.rows if row.way.startswith("graphopt") and row.peak_bytes is not None]
    ahead = [
        row for row in torchs
        if any(o.peak_bytes <= row.peak_bytes and o.ratio <= row.ratio * 1.02 for o in ours)  # type: ignore[operator]
    ]  # fmt: skip
    wrong = sum(row.gradients.startswith("off") for row in torchs)
    ways = f"{len(ahead)} of {len(torchs)} budgets"
    return f"no more bytes in no more time (+ 2 %) at {ways}; torch's gradients are wrong at {wrong}"


def table(title: str, found: Comparison) -> Any:
    """The rows of a comparison."""
    rows = [
        [
            row.way,
            "" if row.peak_bytes is None else f"{row.peak_bytes / 1e6:.1f} MB",
            "" if row.ratio is None else f"×{row.ratio:.2f}",
            row.gradients or row.note,
        ]
        for row in found.rows
    ]
    return make_table(f"{title}: {found.title}", ["way", "peak", "time", "gradients"], rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparisons and print them."""
    options = arguments(argv)
    torch.set_num_threads(options.threads)
    logging.getLogger("graphopt").setLevel(logging.ERROR)
    tables, result = [], {}
    if options.part in ("backend", "all"):
        found = backend_rows(options.quick, options.rounds)
        tables.append(table("The backend", found))
        result["backend"] = [asdict(row) for row in found.rows]
    if options.part in ("partitioner", "all"):
        budgets = options.budgets or (TORCH_BUDGETS[4:5] if options.quick else TORCH_BUDGETS)
        for name in options.models:
            found = partitioner_rows(name, options.quick, options.rounds, budgets)
            tables.append(table(f"The partitioner, {outcome(found)}", found))
            result[name] = [asdict(row) for row in found.rows]
    show(result, tables, as_json=options.json)
    return 0


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    made = parser(__doc__.splitlines()[0] if __doc__ else None)
    made.add_argument("--part", choices=("backend", "partitioner", "all"), default="all", help="which comparison")
    made.add_argument("--models", nargs="+", default=list(MODELS), choices=sorted(WORKLOADS), help="of the partitioner")
    made.add_argument("--budgets", nargs="+", type=float, help="of torch's partitioner, in place of nine of them")
    made.add_argument("--rounds", type=int, default=7, help="of timing")
    return made.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
