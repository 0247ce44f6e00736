"""One step of a rank as predicted: its ops, what it exchanges and copies beside them, and what it waits for."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import fx

from graphopt.analysis.costs.cost import DeviceProfile, costs_of, profile_of_cost
from graphopt.ir.node import value_of
from graphopt.ir.program import Program
from graphopt.ir.words.written_units import format_bytes, format_seconds
from graphopt.report.formats.run_schedule import AWAY, BACK, COMPUTE, NETWORK, copied, lane_of, schedule
from graphopt.rewriting.distributed.prediction.collective import is_exchange, moved, seconds_with_exchanges

__all__ = ["PredictedStep", "predicted_step"]


@dataclass(frozen=True, slots=True)
class PredictedStep:
    """A step of one of several ranks that do the same; times are seconds.

    Attributes:
        ranks: how many there are.
        peak_bytes: the most bytes alive on a rank at once.
        seconds: of the step, waiting included.
        compute: of its ops.
        exchanges: of what it exchanges with other ranks, beside the ops.
        sent_bytes: that a rank sends.
        copies: of its copies to and from the host.
        waited: for which its ops wait for exchanges and copies.
        items: tokens, or rows, in the batch of a rank.
        unit: what ``items`` counts: ``tokens`` or ``rows``.
    """

    ranks: int
    peak_bytes: int
    seconds: float
    compute: float
    exchanges: float
    sent_bytes: int
    copies: float
    waited: float
    items: int
    unit: str

    @property
    def rate(self) -> float:
        """Tokens or rows of one rank in a second."""
        return self.items / self.seconds

    def lines(self) -> list[str]:
        """What is said of it, for people."""
        copies = f"copies to the host and back {format_seconds(self.copies)}, " if self.copies else ""
        head = f"step of {self.ranks} ranks"
        taken = (
            f"{head:21}{format_seconds(self.seconds)}, {format_bytes(self.peak_bytes)} on each: "
            f"ops {format_seconds(self.compute)}, exchanges {format_seconds(self.exchanges)} "
            f"({format_bytes(self.sent_bytes)} sent), {copies}{format_seconds(self.waited)} of waiting for them"
        )
        rates = f"{self.rate:,.0f} {self.unit} a second on each rank, {self.rate * self.ranks:,.0f} on all"
        return [taken, f"{'throughput':21}{rates}"]

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return {**asdict(self), f"{self.unit}_per_second_and_rank": self.rate}


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
    return PredictedStep(
        ranks=ranks,
        peak_bytes=memory.peak_bytes,
        seconds=max(part.end for part in run),
        compute=sum(part.seconds - part.waits for part in run if part.lane == COMPUTE),
        exchanges=exchanges,
        sent_bytes=int(sum(moved(node).sent for node in memory.nodes if is_exchange(node))),
        copies=sum(part.seconds for part in beside) - exchanges,
        waited=waited,
        items=items,
        unit=unit,
    )


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
