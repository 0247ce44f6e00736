"""BERT-Large under a limit of memory, by simulation: the largest batch as it is, with recomputation, with offloading.

Only shapes are computed with, peaks are the memory model's, and times are the roofline's of a device that need not be
here (matrix products and memory traffic at the data sheet's figures times 0.75): no batch runs. The setting is that of
PaddlePaddle's published figures (FleetX, "recomputation": one V100 with 32 GB, 18 × 512 tokens as it is, 180 with
recomputation at 0.744 of its speed, 258 with offloading at 0.868 of that): 24 layers, width 1024, 16 heads, 512 tokens,
dropout 0.1, predictions at 80 masked positions, Adam, mixed precision: ``MixedPrecision("float16")``, with autocast's
rules for the CPU on which the program is captured. ``--precision float32`` does without.

Adam's two moments are counted as resident bytes, and its update as one pass over the memory that it reads and writes.
Offloading goes by the profile's link to the host, in both directions at once.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from unittest import mock

import torch
import transformers
from harness import make_table
from rich.console import Console
from rich.progress import Progress
from torch import fx, nn

from graphopt import Pipeline, Program
from graphopt.analysis import workspace as temporaries
from graphopt.analysis.costs.cost import PROFILES, DeviceProfile, cost_report
from graphopt.capture import CaptureSession
from graphopt.ir.words.written_units import format_bytes, parse_bytes
from graphopt.passes import MixedPrecision
from graphopt.planning.transfers.offloading import Lanes
from graphopt.rewriting.memory.fit.fitting import Fitting, FittingOptions
from graphopt.rewriting.memory.recompute.planning_problem import PlanningProblem
from graphopt.rewriting.memory.transfers.transfer_insertion import host_lanes
from graphopt.runtime.programs.rewrite import rewrite

VOCABULARY, WIDTH, HEADS, TOKENS, MASKED = 30522, 1024, 16, 512, 80
MOMENTS = 8
"""Bytes of Adam's state for each parameter."""
UPDATE = 28
"""Bytes that the update reads (parameter, gradient, both moments) and writes (all but the gradient)."""
PROBES = (2, 4)
"""Batches at which the plain program is captured to learn how its bytes grow."""
TRIALS = 6
"""Batches at most that are planned in search of the largest one."""
MORE_WITH_RECOMPUTE, MORE_WITH_OFFLOAD = 10.0, 1.43
"""How much larger the published batches are: with recomputation than plain, with offloading than with recomputation."""


@dataclass(frozen=True)
class Planned:
    """One batch size with one way to fit it.

    Attributes:
        way: ``as it is``, ``recompute`` or ``recompute, offload``.
        batch: sequences.
        peak_bytes: everything alive at once, Adam's moments included; the smallest one found where no plan fits.
        seconds: of a step: forward, backward, recomputation, waiting for copies, the update; None where no plan fits.
        again_seconds: what is recomputed.
        host_bytes: what is on the host, added up over a step.
    """

    way: str
    batch: int
    peak_bytes: int
    seconds: float | None
    again_seconds: float = 0.0
    host_bytes: int = 0

    @property
    def rate(self) -> float | None:
        """Sequences per second."""
        return None if self.seconds is None else self.batch / self.seconds


def masked_loss(model: nn.Module, tokens: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy at the masked positions."""
    hidden = model.get_submodule("bert")(input_ids=tokens).last_hidden_state
    masked = hidden.gather(1, positions.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))
    logits = model.get_submodule("cls")(masked)
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Simulator:
    """Plans for one model on one device.

    Args:
        layers: how many of BERT-Large's 24.
        profile: the device.
        limit: bytes that may be alive on it.
        host: bytes that may be on the host.
        precision: ``float32``, or the dtype of mixed precision.
    """

    def __init__(self, layers: int, profile: DeviceProfile, limit: int, host: int, precision: str) -> None:
        config = transformers.BertConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=layers, num_attention_heads=HEADS,
            intermediate_size=4 * WIDTH, max_position_embeddings=TOKENS, attn_implementation="eager",
        )  # fmt: skip
        with torch.device("meta"):
            self.model = transformers.BertForMaskedLM(config).train()
        self.model.to_empty(device="cpu").tie_weights()  # nothing reads its values
        self.pipeline = Pipeline([] if precision == "float32" else [MixedPrecision(precision)])
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.profile, self.limit, self.host = profile, limit, host
        self.moments = MOMENTS * self.parameters
        self.update = UPDATE * self.parameters / profile.memory_bandwidth + profile.overhead
        self.program = cache(self._program)
        self.fitting = cache(self._fitting)

    def _program(self, batch: int) -> Program:
        tokens = torch.zeros(batch, TOKENS, dtype=torch.long)
        positions = torch.zeros(batch, MASKED, dtype=torch.long)
        session = CaptureSession(self.model, (tokens, positions, positions.clone()), {}, loss=masked_loss)
        return rewrite(session, self.pipeline, until="joint").program

    def _fitting(self, batch: int, offload: bool) -> Fitting:
        program = self.program(batch)
        memory = program.memory()
        seconds = cost_report(memory.nodes, method="roofline", profile=self.profile).seconds
        rate = self.profile.host_bandwidth

        def lanes(planning: PlanningProblem) -> Lanes:
            return replace(host_lanes(planning, 0), out=rate, back=rate, room=self.host)

        return Fitting(program, memory, seconds, FittingOptions(lanes=lanes if offload else None))

    def plain(self, batch: int) -> Planned:
        """The program as it is, whether it fits or not."""
        memory = self.program(batch).memory()
        seconds = sum(cost_report(memory.nodes, method="roofline", profile=self.profile).seconds)
        return Planned("as it is", batch, memory.peak_bytes + self.moments, seconds + self.update)

    def largest_plain(self) -> int:
        """The largest batch that fits as it is: the bytes alive at each call grow by the same with every sequence."""
        one, two = (self.program(batch).memory().bytes for batch in PROBES)
        room = self.limit - self.moments
        growth = [((b - a) / (PROBES[1] - PROBES[0]), a) for a, b in zip(one, two, strict=True)]
        return min(PROBES[0] + int((room - bytes_) / slope) for slope, bytes_ in growth if slope > 0)

    def within(self, batch: int, *, offload: bool) -> Planned:
        """The fastest plan within the limit; where there is none, the one with the smallest peak, without a time."""
        fitting = self.fitting(batch, offload)
        fitted = fitting.within(self.limit - self.moments)
        if fitted is None:
            return Planned(_way(offload), batch, fitting.smallest().peak_bytes + self.moments, None)
        return Planned(
            _way(offload), batch, fitted.peak_bytes + self.moments, fitting.seconds + fitted.seconds + self.update,
            fitted.simulated.again, sum(item.copy.bytes for item in fitted.away),
        )  # fmt: skip

    def largest_fitted(self, batch: int, *, offload: bool) -> Planned:
        """A plan for about the largest batch whose smallest peak fits, by secants from ``batch`` and half of it."""
        peaks: dict[int, int] = {}
        trials = [max(1, batch // 2), batch]
        while trials[-1] not in peaks and len(peaks) < TRIALS:
            for trial in trials:
                peaks.setdefault(trial, self.fitting(trial, offload).smallest().peak_bytes + self.moments)
            low, high = sorted(peaks, key=lambda known: abs(peaks[known] - self.limit))[:2]
            slope = (peaks[high] - peaks[low]) / (high - low)
            trials = [max(1, low + math.floor((self.limit - peaks[low]) / slope))]
        fitting = [trial for trial, peak in peaks.items() if peak <= self.limit]
        return self.within(max(fitting, default=min(peaks)), offload=offload)


def _way(offload: bool) -> str:
    return "recompute, offload" if offload else "recompute"


def plans(simulator: Simulator, options: argparse.Namespace, progress: Progress) -> Iterator[Planned]:
    """The rows of the table: plain, and each way at the published ratio of batches and at its largest batch."""
    task = progress.add_task("as it is", total=5)

    def next_is(what: str) -> None:
        progress.update(task, advance=1, description=what)

    base = simulator.largest_plain()
    yield simulator.plain(base)
    batch = math.ceil(MORE_WITH_RECOMPUTE * base)
    for offload in (False, True):
        batch = math.ceil(MORE_WITH_OFFLOAD * batch) if offload else batch
        next_is(f"{_way(offload)}, {batch} sequences")
        yield simulator.within(batch, offload=offload)
        next_is(f"{_way(offload)}, the largest batch")
        if options.largest:
            yield simulator.largest_fitted(batch, offload=offload)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", choices=list(PROFILES), default="v100-32gb", help="default: v100-32gb")
    made.add_argument("--memory", default="32GB", help="what may be alive on the device (default: 32GB)")
    made.add_argument("--host", default="256GB", help="what may be on the host (default: 256GB)")
    made.add_argument("--precision", choices=("float16", "float32"), default="float16", help="default: float16, mixed")
    made.add_argument("--layers", type=int, default=24, help="default: 24")
    made.add_argument("--largest", action="store_true", help="also search the largest batches (takes far longer)")
    made.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    return made.parse_args(argv)


def _takes_nothing(missing: dict[str, fx.Node]) -> None:
    """Note that calls allocate nothing for themselves."""
    temporaries._measured.update(dict.fromkeys(missing, temporaries.Usage()))


def main(argv: Sequence[str] | None = None) -> int:
    """Plan, and print the table."""
    options = parse(argv)
    simulator = Simulator(
        options.layers, PROFILES[options.device], parse_bytes(options.memory), parse_bytes(options.host),
        options.precision,
    )  # fmt: skip
    # what this CPU's kernels allocate is not asked
    on_the_device = mock.patch.object(temporaries, "_measure", _takes_nothing)
    with Progress(console=Console(stderr=True), transient=True) as progress, on_the_device:
        found = list(plans(simulator, options, progress))
    base = found[0]
    rows = [
        (
            plan.way,
            str(plan.batch),
            f"×{plan.batch / base.batch:.2f}",
            format_bytes(plan.peak_bytes),
            format_bytes(plan.host_bytes) if plan.host_bytes else "–",
            f"{plan.rate:.2f}" if plan.rate else "does not fit",
            f"×{plan.rate / base.rate:.3f}" if plan.rate and base.rate else "–",
        )
        for plan in found
    ]
    title = (
        f"BERT-Large with {options.layers} layers, {simulator.parameters / 1e6:.0f} M parameters, "
        f"{options.precision}, Adam, {TOKENS} tokens; {options.memory} of {options.device}; simulated"
    )
    headings = ("", "batch", "", "peak", "on the host", "sequences/s", "")
    Console(width=None if sys.stdout.isatty() else 110).print(make_table(title, headings, rows))
    if options.json:
        text = json.dumps({"title": title, "plans": [{**asdict(plan), "rate": plan.rate} for plan in found]}, indent=2)
        options.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
