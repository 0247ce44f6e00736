"""What a way to exchange gradients costs on a network: bytes, seconds of the exchange and of the step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphopt.errors import GraphoptError, did_you_mean
from graphopt.ir.program import Program
from graphopt.rewriting.distributed.prediction.compressed import LowRank, Sparse
from graphopt.rewriting.distributed.prediction.link import Link, parse_bandwidth, parse_latency
from graphopt.rewriting.distributed.prediction.step_timeline import simulate
from graphopt.rewriting.distributed.prediction.strategies import (
    Dense,
    Local,
    Messages,
    Outer,
    Sharded,
    ShardedParameters,
    Strategy,
)
from graphopt.rewriting.distributed.prediction.volume import Gradient
from graphopt.rewriting.distributed.prediction.workload import Workload, workload_of

__all__ = ["STRATEGIES", "Prediction", "check_ranks", "find_strategy", "on_link", "predict", "predict_workload"]

STRATEGIES: dict[str, Strategy] = {
    "per-tensor": Dense(bucket_mb=0, first_bucket_mb=0),
    "fused": Dense(),
    "bf16": Dense(wire=torch.bfloat16),
    "powersgd": LowRank(),
    "sparse": Sparse(),
    "sharded": Sharded(),
    "sharded-parameters": ShardedParameters(),
    "staying-parameters": ShardedParameters(stay=True),
    "local": Local(),
    "diloco": Outer(),
}
"""Ways by name, as the passes have them by default."""


def find_strategy(name: str) -> Strategy:
    """The way of a name in ``STRATEGIES``.

    Raises:
        GraphoptError: for another one, with the nearest names.
    """
    if name not in STRATEGIES:
        hint = did_you_mean(name, STRATEGIES) or f"the ways are {', '.join(STRATEGIES)}"
        raise GraphoptError(f"there is no way {name!r} to exchange gradients; {hint}")
    return STRATEGIES[name]


@dataclass(frozen=True, slots=True)
class Prediction:
    """What one step costs one rank; of a way that does not exchange at every step, the mean over its period.

    Attributes:
        strategy: how gradients are exchanged.
        messages: collectives.
        payload: bytes that the rank puts into them.
        sent: bytes that leave the rank, those of others that it passes on included.
        received: bytes that come to it.
        alone: seconds that the exchange takes with nothing else running.
        exposed: seconds for which computation waits for it.
        work: seconds of computation around it: copies, casts, selection, sums.
        compute: seconds of the step's own computation.
        step: seconds of the step.
        kept_dense: the gradients that a compressing way exchanges as they are.
    """

    strategy: Strategy
    messages: float
    payload: float
    sent: float
    received: float
    alone: float
    exposed: float
    work: float
    compute: float
    step: float
    kept_dense: tuple[Gradient, ...] = ()

    @property
    def slowdown(self) -> float:
        """The step's seconds over those of its computation alone."""
        return self.step / self.compute if self.compute else float("inf")


def predict(
    program: Program,
    world_size: int,
    bandwidth: float | str,
    latency: float | str = 0.0,
    strategy: Strategy | str = "fused",
    *,
    cost: str = "measured",
) -> Prediction:
    """What a step of a program costs on so many ranks; nothing runs but the calls that are measured.

    Every rank is taken to have a batch of its own like the program's (weak scaling), the same speed, and a link of its
    own to a network that carries what all links carry.

    Args:
        program: of stage joint or step, whose gradients are not exchanged yet.
        world_size: ranks, 2 or more.
        bandwidth: bytes per second of a rank's link in each direction, or text (``parse_bandwidth``): ``"1Gbit"``.
        latency: seconds of each round of a collective, or text (``parse_latency``): ``"50us"``.
        strategy: how gradients are exchanged, or the name of one of ``STRATEGIES``.
        cost: where the seconds of calls come from: one of ``graphopt.analysis.costs.cost.COSTS``.

    Raises:
        GraphoptError: for a wrong number, an unknown name, and a program that has nothing to exchange.
    """
    chosen = find_strategy(strategy) if isinstance(strategy, str) else strategy
    link = Link(
        parse_bandwidth(bandwidth) if isinstance(bandwidth, str) else bandwidth,
        parse_latency(latency) if isinstance(latency, str) else latency,
    )
    check_ranks(world_size)
    return predict_workload(workload_of(program, cost), world_size, link, chosen)


def check_ranks(ranks: int) -> None:
    """Refuse a number of ranks that exchange nothing.

    Raises:
        GraphoptError: below 2.
    """
    if ranks < 2:
        raise GraphoptError(f"gradients are exchanged between 2 ranks or more, got {ranks}")


def predict_workload(workload: Workload, ranks: int, link: Link, strategy: Strategy) -> Prediction:
    """The same of a workload that is known, on a link."""
    return on_link(workload, ranks, link, strategy, strategy.messages(workload, ranks))


def on_link(workload: Workload, ranks: int, link: Link, strategy: Strategy, messages: Messages) -> Prediction:
    """The same of messages that are known, which no link changes.

    Args:
        workload: what a step computes.
        ranks: that take part.
        link: of each.
        strategy: whose messages they are.
        messages: from ``strategy.messages(workload, ranks)``.
    """
    update = workload.update * messages.update
    line = simulate(messages, link, ranks, backward=workload.backward, update=update)
    volume, period = messages.volume, messages.period
    return Prediction(
        strategy,
        messages=volume.messages / period,
        payload=volume.payload / period,
        sent=volume.sent / period,
        received=volume.received / period,
        alone=line.alone / period,
        exposed=line.exposed / period,
        work=line.work / period,
        compute=workload.compute,
        step=line.step if period == 1 else workload.compute + (line.step - workload.compute) / period,
        kept_dense=messages.kept_dense,
    )
