"""One step of a rank as predicted: its ops, what it exchanges and copies beside them, and what it waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import fx

from graphopt.analysis.costs.cost import DeviceProfile, costs_of, profile_of_cost
from graphopt.analysis.costs.isolated_call import call_key
from graphopt.analysis.costs.profiles import EFFICIENCY, PROFILES, SLOWEST
from graphopt.analysis.costs.roofline import call_precision, flops_of
from graphopt.ir.node import Phase, value_of
from graphopt.ir.program import Program
from graphopt.ir.words.written_units import format_bytes, format_seconds
from graphopt.rewriting.distributed.prediction.collective import is_exchange, moved, seconds_with_exchanges
from graphopt.rewriting.distributed.prediction.run_schedule import (
    AWAY,
    BACK,
    COMPUTE,
    NETWORK,
    copied,
    lane_of,
    schedule,
)

__all__ = ["PredictedStep", "mean_step", "predicted_step", "update_of_calls"]


@dataclass(frozen=True, slots=True)
class PredictedStep:
    """A step of one of several ranks that do the same; times are seconds.

    Attributes:
        ranks: how many there are.
        peak_bytes: the most bytes alive on a rank at once.
        seconds: of the step, waiting included.
        at_most: seconds that it may take: by data sheets, programs are slower than predicted (``SLOWEST``); the same as
            ``seconds`` where ops, or what the device can do, were measured.
        compute: of its ops.
        exchanges: of what it exchanges with other ranks, beside the ops.
        sent_bytes: that a rank sends.
        copies: of its copies to and from the host.
        waited: for which its ops wait for exchanges and copies.
        arithmetic: that matrix products of forward and backward would take at the device's published peak; 0 where
            that is not known.
        items: tokens, or rows, in the batch of a rank.
        unit: what ``items`` counts: ``tokens`` or ``rows``.
        kinds: of how many programs that alternate it is the mean, with the highest of their peaks.
    """

    ranks: int
    peak_bytes: int
    seconds: float
    at_most: float
    compute: float
    exchanges: float
    sent_bytes: int
    copies: float
    waited: float
    arithmetic: float
    items: int
    unit: str
    kinds: int = 1

    @property
    def rate(self) -> float:
        """Tokens or rows of one rank in a second."""
        return self.items / self.seconds

    @property
    def utilization(self) -> float:
        """The share of the device's published peak that goes into forward and backward (MFU); 0 if it is not known.

        What is recomputed does not count: Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022
        (arXiv 2204.02311).
        """
        return self.arithmetic / self.seconds

    def lines(self) -> list[str]:
        """What is said of it, for people."""
        several = self.ranks > 1
        parts = [f"ops {format_seconds(self.compute)}"]
        if several:
            parts.append(f"exchanges {format_seconds(self.exchanges)} ({format_bytes(self.sent_bytes)} sent)")
        if self.copies:
            parts.append(f"copies to the host and back {format_seconds(self.copies)}")
        if len(parts) > 1:
            parts.append(f"{format_seconds(self.waited)} of waiting for them")
        head, each = (f"step of {self.ranks} ranks", " on each") if several else ("step", "")
        taken = f"{head:21}{format_seconds(self.seconds)}, {format_bytes(self.peak_bytes)}{each}: {', '.join(parts)}"
        rates = f"{self._rates(1)} {self.unit} a second"
        if several:
            rates += f" on each rank, {self._rates(self.ranks)} on all"
        lines = [taken, f"{'throughput':21}{rates}"]
        if self.kinds > 1:
            lines.append(f"{'':21}the mean of a long run, in which {self.kinds} programs alternate; the highest peak")
        if self.at_most > self.seconds:
            lines.append(f"{'':21}the range is that of published runs beside predictions by data sheets")
        return lines

    def _rates(self, ranks: int) -> str:
        """Tokens or rows of some ranks in a second, from the least to the most."""
        least, most = (f"{self.items * ranks / seconds:,.0f}" for seconds in (self.at_most, self.seconds))
        return most if least == most else f"{least} to {most}"

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            **asdict(self),
            f"{self.unit}_per_second_and_rank": self.rate,
            f"{self.unit}_per_second_and_rank_at_least": self.items / self.at_most,
            "utilization": self.utilization,
        }  # fmt: skip


def predicted_step(program: Program, cost: str, ranks: int) -> PredictedStep:
    """How a program runs on each of several ranks.

    Args:
        program: with its exchanges, for a device whose profile says what joins ranks.
        cost: where the seconds of its ops come from.
        ranks: how many there are.

    Raises:
        GraphoptError: where nothing is known of what joins them.
    """
    memory = program.memory()
    seconds = seconds_with_exchanges(program, memory.nodes, costs_of(memory, cost).seconds)
    profile = profile_of_cost(cost, program.context.device)
    if profile is not None:
        copies = {node: _copy_seconds(node, profile) for node in memory.nodes if lane_of(node) in (AWAY, BACK)}
        seconds = [copies.get(node, own) for node, own in zip(memory.nodes, seconds, strict=True)]
    run = list(schedule(memory, seconds))
    beside = [part for part in run if part.lane != COMPUTE]
    exchanges = sum(part.seconds for part in beside if part.lane == NETWORK)
    waited = sum(part.waits for part in run)
    items, unit = _items(program)
    end = max(part.end for part in run)
    by_data_sheet = profile is not None and profile.name in PROFILES
    return PredictedStep(
        ranks=ranks,
        peak_bytes=memory.peak_bytes,
        seconds=end,
        at_most=end * (SLOWEST if by_data_sheet else 1.0),
        compute=sum(part.seconds - part.waits for part in run if part.lane == COMPUTE),
        exchanges=exchanges,
        sent_bytes=int(sum(moved(node).sent for node in memory.nodes if is_exchange(node))),
        copies=sum(part.seconds for part in beside) - exchanges,
        waited=waited,
        arithmetic=0.0 if profile is None else _arithmetic(program, profile),
        items=items,
        unit=unit,
    )


def mean_step(steps: Sequence[tuple[PredictedStep, int]]) -> PredictedStep:
    """The mean of steps that alternate, with the highest of their peaks.

    Args:
        steps: each with how often it comes.
    """
    total = sum(count for _, count in steps)

    def mean(name: str) -> float:
        return float(sum(getattr(step, name) * count for step, count in steps) / total)

    return replace(
        steps[0][0],
        kinds=len(steps),
        peak_bytes=max(step.peak_bytes for step, _ in steps),
        seconds=mean("seconds"),
        at_most=mean("at_most"),
        compute=mean("compute"),
        exchanges=mean("exchanges"),
        sent_bytes=round(mean("sent_bytes")),
        copies=mean("copies"),
        waited=mean("waited"),
    )


def update_of_calls(last: PredictedStep, others: PredictedStep, calls: int) -> PredictedStep:
    """An update for which the gradients of several calls are added up: all of them together, the highest peak.

    Args:
        last: the call that updates.
        others: each of those before.
        calls: how many there are, the last one among them.
    """
    names = ("seconds", "at_most", "compute", "exchanges", "sent_bytes", "copies", "waited", "arithmetic", "items")
    sums = {name: getattr(last, name) + (calls - 1) * getattr(others, name) for name in names}
    return replace(last, peak_bytes=max(last.peak_bytes, others.peak_bytes), **sums)


def _arithmetic(program: Program, profile: DeviceProfile) -> float:
    share = EFFICIENCY if profile.name in PROFILES else 1.0  # of the published peak that a profile of these holds
    known: dict[str, float] = {}
    total = 0.0
    for node in program.phase_nodes(Phase.FORWARD, Phase.BACKWARD):
        key = call_key(node) or node.name
        if key not in known:
            known[key] = flops_of(node) / profile.peak_flops(call_precision(node))
        total += known[key]
    return share * total


def _copy_seconds(node: fx.Node, profile: DeviceProfile) -> float:
    size, tier = copied(node)
    disk = profile.disk_bandwidth if tier == "disk" else 0.0
    return size / (disk or profile.host_bandwidth)


def _items(program: Program) -> tuple[int, str]:
    """How much the batch holds: tokens where whole numbers come in rows, else rows."""
    given = [value for node, _ in program.inputs_of("input") if isinstance(value := value_of(node), torch.Tensor)]
    tokens = [value for value in given if value.dim() == 2 and not value.is_floating_point()]
    if tokens:
        return int(tokens[0].numel()), "tokens"
    return max((int(value.shape[0]) for value in given if value.dim()), default=1), "rows"
