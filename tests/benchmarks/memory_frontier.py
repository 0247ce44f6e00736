"""Peak memory against time: FitMemory beside everything PyTorch has for the same purpose, model by model in one run.

Peaks are exact, in bytes above persistent memory before a step (on a CPU from the allocator's own events); times are
ratios to eager PyTorch, paired round by round. All ways share one set of parameters and one batch, and compute the loss
and all gradients; the last column says whether these equal eager PyTorch's to the last bit, from the same seed, and
otherwise how far the worst of them is off, relative to its size. FitMemory is given the peaks that the other ways
reach, some more, and the smallest one that it can meet. With ``--inductor``, torch.compile's budgets meet FitMemory
with the same compiler, at the peaks that they reach and somewhat above: the compiler fuses ops and takes less than what
FitMemory promises, and measured peaks are compared. Results are equal within rounding then.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from chart import Panel, Series, draw
from frontier_models import WORKLOADS
from frontier_ways import (
    OURS,
    QUICK_BUDGETS,
    TORCH_BUDGETS,
    Maker,
    Setting,
    Way,
    fitted,
    peers,
    resident_bytes,
    smallest_budget,
    unfitted,
)
from harness import machine, make_table, paired_ratio, paired_seconds, show
from rich.console import Console
from rich.table import Table

import graphopt

SEED = 3
BESIDE = 64
"""Bytes that the program does not hold: the loss and its gradient, which the caller and autograd keep to the end."""
COMPILED_DIFFERENCE = 1e-4
"""How far gradients may be off under inductor, which rounds differently: relative, in the Euclidean norm."""
FUSED = 1.1
"""How far above the peaks of torch.compile budgets are tried too, since inductor takes less than what is promised."""
NEAR = 1.01
"""Budgets that are closer to each other than this ratio are tried once, at the lower one."""


@dataclass
class Row:
    """What is known of one way.

    Attributes:
        way: its label.
        series: the line of the chart that it belongs to.
        budget_bytes: the peak that was asked for, above persistent memory.
        peak_bytes: the measured peak, above persistent memory.
        predicted_peak_bytes: what the memory model says of it.
        median_seconds: of all rounds.
        time_ratio: to eager PyTorch; the median of the ratios of the rounds.
        difference: the largest relative difference of the loss or a gradient to eager's; 0 where all are equal to the
            last bit, None where one is missing or not a number.
        buffers_equal: whether the model's buffers (BatchNorm's statistics) equal eager's after one step.
        fits: False for a budget below the smallest peak that FitMemory finds.
        note: what to know about the figures.
        error: why there are no figures.
    """

    way: str
    series: str
    budget_bytes: int | None = None
    peak_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    median_seconds: float | None = None
    time_ratio: float | None = None
    difference: float | None = None
    buffers_equal: bool = True
    fits: bool = True
    note: str = ""
    error: str = ""


@dataclass(frozen=True)
class Outcome:
    """Loss and gradients by name, and the buffers behind them."""

    values: dict[str, torch.Tensor | None]
    buffers: list[torch.Tensor]

    @classmethod
    def of(cls, way: Way, setting: Setting) -> Outcome:
        """One step from the same seed as every other way's."""
        torch.manual_seed(SEED)
        values: dict[str, torch.Tensor | None] = {"loss": way.run(setting)}
        values |= {name: parameter.grad for name, parameter in setting.model.named_parameters()}
        setting.clear()
        return cls(values, [buffer.clone() for buffer in way.module.buffers()])

    def difference(self, reference: Outcome) -> float | None:
        """The largest relative difference, in the Euclidean norm; None where values are missing or not numbers."""
        largest = 0.0
        for name, expected in reference.values.items():
            found = self.values[name]
            if (found is None) != (expected is None):
                return None
            if found is None or expected is None or torch.equal(found, expected):
                continue
            off = (found.double() - expected.double()).norm() / expected.double().norm()
            if not torch.isfinite(off):
                return None
            largest = max(largest, off.item(), torch.finfo(torch.float64).tiny)
        return largest

    def same_buffers(self, reference: Outcome) -> bool:
        return all(torch.equal(a, b) for a, b in zip(self.buffers, reference.buffers, strict=True))


@dataclass
class Comparison:
    """All ways for one model: what ran, and what did not."""

    setting: Setting
    say: Callable[[str], None]
    rows: list[Row] = field(default_factory=list)
    ran: list[tuple[Way, Row]] = field(default_factory=list)
    reference: Outcome | None = None

    def add(self, label: str, series: str, make: Callable[[Setting], Way], *, budget: int | None = None) -> Row:
        """Make a way, compare one step of it with eager's, and measure its peak; a failure becomes a row too."""
        self.say(label)
        row = Row(label, series, budget)
        self.rows.append(row)
        try:
            way = make(self.setting)
            outcome = Outcome.of(way, self.setting)
            peak = graphopt.measure_peak(lambda: way.run(self.setting), device=self.setting.device)
        except Exception as error:  # whatever a peer raises belongs into the table
            row.error = f"{type(error).__name__}: {str(error).strip() or 'no message'}"
            self.setting.clear()
            return row
        self.setting.clear()
        if self.reference is None:
            self.reference = outcome
        row.way, row.note = way.label, way.note
        row.peak_bytes, row.predicted_peak_bytes = peak.allocated_peak_bytes, way.predicted
        row.difference = outcome.difference(self.reference)
        row.buffers_equal = outcome.same_buffers(self.reference)
        self.ran.append((way, row))
        return row

    def add_fitted(self, targets: Sequence[int], compiled: Sequence[int]) -> None:
        """``optimize`` as it is, at every budget below the plain peak, and at the smallest one that can be met.

        With the inductor backend the same at the budgets in ``compiled``, the plain peak among them.
        """
        plain = self.add("optimize", "graphopt", unfitted)
        if plain.peak_bytes is None:
            return
        resident = resident_bytes(self.ran[-1][0])
        lowest = self._smallest(resident)
        for budget in _apart([target for target in targets if target < plain.peak_bytes]):
            self._fit(budget, resident, fits=lowest is None or budget >= lowest)
        if lowest is not None:
            self._fit(lowest, resident, label=f"FitMemory, {lowest / 1e6:.4g} MB (smallest)")
        for budget in _apart(compiled):
            self._fit(budget, resident, "inductor", fits=lowest is None or budget >= lowest)

    def _fit(
        self, budget: int, resident: int, backend: Literal["eager", "inductor"] = "eager", *,
        label: str = "", fits: bool = True,
    ) -> None:  # fmt: skip
        named = label or f"FitMemory, {budget / 1e6:.4g} MB" + (", inductor" if backend == "inductor" else "")
        if fits:
            self.add(named, OURS[backend], lambda s: fitted(s, budget, resident, named, backend), budget=budget)
        else:
            self.rows.append(Row(named, OURS[backend], budget, fits=False))

    def _smallest(self, resident: int) -> int | None:
        self.say("smallest budget of FitMemory")
        try:
            return smallest_budget(self.setting, resident)
        except Exception as error:  # a failure of ours belongs into the table as well
            self.rows.append(Row("FitMemory (smallest)", "graphopt", error=f"{type(error).__name__}: {error}"))
            return None

    def time(self, rounds: int) -> None:
        """All ways in turn, ``rounds`` times."""
        self.say(f"timing {len(self.ran)} ways, {rounds} rounds")

        def action(way: Way) -> Callable[[], None]:
            def act() -> None:
                way.run(self.setting)
                self.setting.clear()

            return act

        seconds = paired_seconds([action(way) for way, _ in self.ran], rounds, warm_up=1)
        for (_, row), times in zip(self.ran, seconds, strict=True):
            row.median_seconds = median(times)
            row.time_ratio = paired_ratio(times, seconds[0])


def _apart(budgets: Sequence[int]) -> list[int]:
    """Budgets from large to small, without those that are nearly the next smaller one."""
    kept: list[int] = []
    for budget in sorted(set(budgets)):
        if not kept or budget > kept[-1] * NEAR:
            kept.append(budget)
    return kept[::-1]


def _target(text: str, eager_peak: int) -> int:
    """A budget in bytes above persistent memory: ``96MB``, or ``60%`` of the eager peak."""
    if text.endswith("%"):
        return int(eager_peak * float(text[:-1]) / 100)
    return int(float(text.removesuffix("MB")) * 1e6)


def compare(name: str, options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Everything about one model, as plain data."""
    workload = WORKLOADS[name]
    setting = Setting.of(workload, torch.device(options.device), quick=options.quick)
    comparison = Comparison(setting, lambda what: say(f"{name}: {what}"))
    budgets = QUICK_BUDGETS if options.quick else TORCH_BUDGETS
    for label, series, make in chosen(peers(budgets, inductor=options.inductor), options.peers):
        comparison.add(label, series, make)
    eager = comparison.rows[0]
    if eager.peak_bytes is None:
        raise SystemExit(f"{name} does not run in eager PyTorch: {eager.error}")
    reached = [row.peak_bytes for row in comparison.rows if row.peak_bytes is not None and not row.note]
    given = [_target(text, eager.peak_bytes) for text in options.budgets or workload.budgets]
    compiled = [_present(row.peak_bytes) for row in comparison.rows if row.series == "inductor" and not row.error]
    above = [] if options.quick else [round(peak * FUSED) for peak in compiled]
    comparison.add_fitted([*reached, *given] if not options.quick else [eager.peak_bytes * 3 // 4], compiled + above)
    comparison.time(options.rounds)
    return {
        "model": name,
        "title": ("small version of " if options.quick else "") + workload.title,
        "parameters": sum(parameter.numel() for parameter in setting.model.parameters()),
        "rows": [asdict(row) for row in comparison.rows],
        "duels": duels(comparison.rows),
    }


def chosen(makers: Iterable[Maker], globs: Sequence[str] | None) -> list[Maker]:
    """Eager PyTorch, which is the reference, and the ways whose labels match one of the globs; all without globs."""
    reference, *others = makers
    if globs is None:
        return [reference, *others]
    for pattern in globs:
        if not any(fnmatch(label, pattern) for label, *_ in others):
            raise SystemExit(f"--peers: no way is called {pattern!r}: {'; '.join(label for label, *_ in others)}")
    return [reference, *(maker for maker in others if any(fnmatch(maker[0], pattern) for pattern in globs))]


def duels(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For each way of PyTorch's that saves memory, the fastest way of ours that fits into the same peak.

    What is compiled with inductor meets ours that are compiled with it too.
    """
    found = []
    for row in rows:
        if row.series in (*OURS.values(), "eager") or row.time_ratio is None or row.note:
            continue
        series = OURS["inductor" if row.series == "inductor" else "eager"]
        ours = [own for own in rows if own.series == series and own.time_ratio is not None]
        fit = [own for own in ours if _present(own.peak_bytes) <= _present(row.peak_bytes)]
        best = min(fit, key=lambda own: own.time_ratio or 0.0, default=None)
        found.append(
            {
                "way": row.way,
                "peak_bytes": row.peak_bytes,
                "time_ratio": row.time_ratio,
                "ours": best.way if best else None,
                "our_peak_bytes": best.peak_bytes if best else None,
                "our_time_ratio": best.time_ratio if best else None,
            }
        )
    return found


def _present(value: int | None) -> int:
    assert value is not None
    return value


def equality(row: dict[str, Any]) -> str:
    """How a way's results compare with eager PyTorch's, in few words."""
    if row["difference"] is None:
        return "not a number"
    text = "bitwise" if row["difference"] == 0 else f"off by {row['difference']:.0e}"
    return text if row["buffers_equal"] else f"{text}, buffers off"


def tables(result: dict[str, Any]) -> list[Table]:
    """The rows of one model, and its duels."""
    main = [
        (
            row["way"] + ("*" if row["note"] else ""),
            f"{row['peak_bytes']:,}" if row["peak_bytes"] is not None else "failed" if row["fits"] else "does not fit",
            f"{row['predicted_peak_bytes']:,}" if row["predicted_peak_bytes"] is not None else "–",
            f"{row['median_seconds'] * 1e3:.0f} ms" if row["median_seconds"] is not None else "–",
            f"×{row['time_ratio']:.3f}" if row["time_ratio"] is not None else "–",
            equality(row) if row["peak_bytes"] is not None else "–",
        )
        for row in result["rows"]
    ]
    against = [
        (
            duel["way"],
            f"{duel['peak_bytes']:,}",
            f"×{duel['time_ratio']:.3f}",
            duel["ours"] or "nothing fits",
            f"×{duel['our_time_ratio']:.3f}" if duel["ours"] else "–",
        )
        for duel in result["duels"]
    ]
    faster = sum(bool(duel["ours"]) and duel["our_time_ratio"] < duel["time_ratio"] for duel in result["duels"])
    headings = ("", "peak, bytes", "predicted", "median", "paired", "equals eager")
    first = make_table(result["title"], headings, main)
    notes = [f"* {row['note']}" for row in result["rows"] if row["note"]]
    notes += [f"{row['way']} failed: {row['error'].splitlines()[0]}" for row in result["rows"] if row["error"]]
    first.caption, first.caption_justify = "\n".join(notes) or None, "left"
    title = f"In the same peak: FitMemory is faster than {faster} of {len(against)}"
    return [first, make_table(title, ("", "peak, bytes", "paired", "ours that fits", "paired"), against)]


def chart(results: Sequence[dict[str, Any]]) -> str:
    """All models as SVG."""
    panels = []
    for result in results:
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in result["rows"]:
            if row["time_ratio"] is not None and not row["note"]:
                lines.setdefault(row["series"], []).append((row["peak_bytes"], row["time_ratio"]))
        panels.append(Panel(result["model"], [Series(name, points) for name, points in lines.items()]))
    return draw(panels)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--models", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS), help="default: all")
    made.add_argument("--rounds", type=int, help="rounds of each way (default: 9; 1 with --quick)")
    made.add_argument("--budgets", nargs="+", metavar="PEAK", help="peaks to try in place of each model's: 96MB, 60%%")
    made.add_argument(
        "--peers", nargs="+", metavar="GLOB", help="only these of PyTorch's ways: 'aot_eager, budget 0.4'"
    )
    made.add_argument(
        "--inductor", action="store_true", help="torch.compile and FitMemory with inductor too (needs a C++ compiler)"
    )
    made.add_argument("--quick", action="store_true", help="small sizes, few budgets, one round: whether it runs")
    made.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads that torch's kernels use")
    made.add_argument("--device", default="cpu", help="cpu (default), or a CUDA device")
    made.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    made.add_argument("--chart", type=Path, metavar="FILE", help="write a picture (SVG) to this file")
    options = made.parse_args(argv)
    options.rounds = options.rounds or (1 if options.quick else 9)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, print the tables, write the files; returns 1 where FitMemory missed a budget or changed a result."""
    options = parse(argv)
    torch.set_num_threads(options.threads)
    console, progress = Console(width=None if sys.stdout.isatty() else 100), Console(stderr=True)
    about = {**machine(), "device": options.device, "rounds": options.rounds}
    show({"machine": about}, [], as_json=False)
    results: list[dict[str, Any]] = []
    for name in options.models:
        results.append(compare(name, options, lambda what: progress.print(what, style="dim", highlight=False)))
        console.print(*tables(results[-1]))
        if options.json:
            options.json.write_text(json.dumps({"machine": about, "models": results}, indent=2) + "\n")
        if options.chart:
            options.chart.write_text(chart(results))
    return int(any(failed(row) for result in results for row in result["rows"]))


def failed(row: dict[str, Any]) -> bool:
    """Whether a way of ours failed, is above its budget, or differs from eager PyTorch by more than it may."""
    if row["series"] not in OURS.values() or not row["fits"]:
        return False
    if row["error"]:
        return True
    over = row["budget_bytes"] is not None and row["peak_bytes"] > row["budget_bytes"] + BESIDE
    compiled = row["series"] == OURS["inductor"]
    off = row["difference"] is None or row["difference"] > (COMPILED_DIFFERENCE if compiled else 0)
    return over or off or not (compiled or row["buffers_equal"])


if __name__ == "__main__":
    sys.exit(main())
