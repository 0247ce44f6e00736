"""Which way to exchange gradients: all of them predicted, where one overtakes another, and a choice with reasons."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from graphopt.ir.words.written_units import format_bytes, format_seconds
from graphopt.rewriting.distributed.prediction.compressed import WARM_UP, LowRank, Sparse
from graphopt.rewriting.distributed.prediction.link import Link
from graphopt.rewriting.distributed.prediction.predict import Prediction, check_ranks, on_link, predict_workload
from graphopt.rewriting.distributed.prediction.strategies import (
    Dense,
    Local,
    Outer,
    Sharded,
    ShardedParameters,
    Strategy,
)
from graphopt.rewriting.distributed.prediction.volume import pays_sparse
from graphopt.rewriting.distributed.prediction.workload import Workload

__all__ = ["CLOSE", "MOST_RANKS", "SHARE", "ExchangePlan", "faster_below", "faster_up_to", "plan_exchange"]

CLOSE = 1.05
"""A way is taken that changes training less than the fastest if its step takes at most so many times as long."""

SHARE = 0.05
"""The share of a step's computation that local SGD's exchange may take for its interval to be called long enough."""

_SLOWEST, _FASTEST, _PER_DECADE = 1e2, 1e14, 4
"""Bytes per second between which break-evens are looked for, and how many bandwidths of each decade are tried."""

MOST_RANKS = 2**20
"""Ranks up to which break-evens are looked for."""


@dataclass(frozen=True, slots=True)
class ExchangePlan:
    """All ways for one workload on one network.

    Attributes:
        workload: what a step computes and exchanges.
        ranks: that take part.
        link: of each.
        density: of sparse exchange, behind its warm-up.
        predictions: of all ways.
        best: the one to use.
        reasons: why, in sentences.
        below: bytes per second below which ways that send less are faster than fused dense exchange, as
            ``faster_below`` gives them.
        equal_bytes: the number of ranks from which on sparse exchange takes as many bytes as dense, or more; None where
            no gradient is large enough for it.
        most_ranks: up to how many ranks sparse exchange is faster than fused dense exchange on this link;
            ``MOST_RANKS`` for these or more, None where it is not faster with ``ranks``.
        enough_steps: the smallest interval at which local SGD's exchange takes at most ``SHARE`` of the computation.
        overtaking_steps: the smallest interval at which local SGD is faster than fused dense exchange; None where none
            is.
    """

    workload: Workload
    ranks: int
    link: Link
    density: float
    predictions: tuple[Prediction, ...]
    best: Prediction
    reasons: tuple[str, ...]
    below: Mapping[Strategy, float | None]
    equal_bytes: int | None
    most_ranks: int | None
    enough_steps: int
    overtaking_steps: int | None

    def of(self, strategy: Strategy) -> Prediction:
        """The prediction of one of the ways."""
        return next(found for found in self.predictions if found.strategy == strategy)

    @property
    def dense(self) -> Prediction:
        """Of fused dense exchange, which others are compared with."""
        return self.of(_FUSED)

    @property
    def sparse(self) -> Prediction:
        """Of sparse exchange behind its warm-up."""
        return self.of(Sparse(self.density))


_FUSED = Dense()


def plan_exchange(
    workload: Workload, ranks: int, link: Link, *, density: float = 0.001, k_steps: Sequence[int] = (4, 8, 16)
) -> ExchangePlan:
    """Predict all ways, and choose one.

    The choice goes from what changes training least to what changes it most: dense, bfloat16 on the wire, PowerSGD,
    sparse, local SGD from short intervals to long ones; for a drop-in program between the first two. The first is taken
    whose step takes at most ``CLOSE`` times as long as that of the fastest of them.

    Args:
        workload: of one rank.
        ranks: 2 or more; nothing is simulated rank by rank.
        link: of each.
        density: of sparse exchange; the larger ones of ``WARM_UP`` are predicted too.
        k_steps: intervals of local SGD.

    Raises:
        GraphoptError: for a wrong number of ranks, density or interval.
    """
    check_ranks(ranks)
    final = Sparse(density)
    choices = [_FUSED, Dense(wire=torch.bfloat16), LowRank(), final, *map(Local, sorted(set(k_steps)))]
    warm_up = [Sparse(stage) for stage in WARM_UP if stage > density]
    shown = [
        Dense(bucket_mb=0, first_bucket_mb=0),
        *choices[:3],
        Sharded(),
        ShardedParameters(),
        ShardedParameters(stay=True),
        *_in_hosts(ranks, link),
        *warm_up,
        *choices[3:],
        Outer(),
    ]
    predictions = {strategy: predict_workload(workload, ranks, link, strategy) for strategy in shown}
    candidates = [predictions[strategy] for strategy in choices if strategy.drop_in or workload.stage == "step"]
    best = _choose(candidates)
    once = predict_workload(workload, ranks, link, Local(1))
    extra, waited = once.step - once.compute, predictions[_FUSED].step - once.compute
    return ExchangePlan(
        workload=workload,
        ranks=ranks,
        link=link,
        density=density,
        predictions=tuple(predictions.values()),
        best=best,
        reasons=tuple(_reasons(candidates, best, predictions[_FUSED]) + _others(workload, predictions, best)),
        below={strategy: faster_below(workload, ranks, link, strategy) for strategy in (*choices[1:], *warm_up)},
        equal_bytes=_equal_bytes(workload, final),
        most_ranks=faster_up_to(workload, ranks, link, final),
        enough_steps=max(1, math.ceil(extra / (SHARE * once.compute))) if once.compute else 1,
        overtaking_steps=max(1, math.floor(extra / waited) + 1) if waited > 0 else None,
    )


def _in_hosts(ranks: int, link: Link) -> list[Strategy]:
    """The ways that share pieces inside of each host, where there are several."""
    if link.host is None or ranks <= link.host.ranks or ranks % link.host.ranks:
        return []
    return [kind(host_ranks=link.host.ranks) for kind in (Sharded, ShardedParameters)]


def _choose(candidates: Sequence[Prediction]) -> Prediction:
    fastest = min(found.step for found in candidates)
    return next(found for found in candidates if found.step <= CLOSE * fastest)


# --- where one overtakes the other -----------------------------------------------------------------------------------


def faster_below(workload: Workload, ranks: int, link: Link, strategy: Strategy) -> float | None:
    """The bandwidth in bytes per second below which a way is faster than fused dense exchange.

    It is faster at every bandwidth below that is tried: four in each decade from 100 B/s to 100 TB/s.

    Args:
        workload: of one rank.
        ranks: that take part.
        link: whose latency, algorithm and hosts hold for all bandwidths.
        strategy: another one.

    Returns:
        infinity where it is faster at all of them, None where it is not at the lowest.
    """
    ours, dense = strategy.messages(workload, ranks), _FUSED.messages(workload, ranks)

    def faster(bandwidth: float) -> bool:
        at = replace(link, bandwidth=bandwidth)
        return on_link(workload, ranks, at, strategy, ours).step < on_link(workload, ranks, at, _FUSED, dense).step

    count = round(math.log10(_FASTEST / _SLOWEST) * _PER_DECADE)
    tried = [_SLOWEST * 10 ** (number / _PER_DECADE) for number in range(count + 1)]
    first = next((number for number, bandwidth in enumerate(tried) if not faster(bandwidth)), None)
    if first is None:
        return math.inf
    if first == 0:
        return None
    low, high = tried[first - 1], tried[first]
    while high > low * 1.001:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if faster(middle) else (low, middle)
    return low


def faster_up_to(workload: Workload, ranks: int, link: Link, strategy: Strategy) -> int | None:
    """The number of ranks up to which a way is faster than fused dense exchange, looked for upwards from ``ranks``.

    Args:
        workload: of one rank; every further rank has one like it.
        ranks: to begin with.
        link: of each.
        strategy: another one.

    Returns:
        ``MOST_RANKS`` for these or more; None where it is not faster with ``ranks``.
    """

    def faster(count: int) -> bool:
        ours, dense = (predict_workload(workload, count, link, other).step for other in (strategy, _FUSED))
        return ours < dense

    if not faster(ranks):
        return None
    low, high = ranks, max(ranks, MOST_RANKS)
    while low < high and faster(min(low * 2, high)):
        low = min(low * 2, high)
    high = min(low * 2, high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if faster(middle) else (low, middle)
    return low


def _equal_bytes(workload: Workload, strategy: Sparse) -> int | None:
    """The number of ranks at which sparse exchange of the largest gradient takes the bytes of dense exchange."""
    able = [gradient for gradient in workload.gradients if pays_sparse(gradient, 0, 2)]
    largest = max(able, key=lambda gradient: gradient.numel, default=None)
    return None if largest is None else math.ceil(2 * largest.bytes / strategy.entry_bytes([largest]))


# --- in words --------------------------------------------------------------------------------------------------------


def _reasons(candidates: Sequence[Prediction], best: Prediction, dense: Prediction) -> list[str]:
    beside = f", and {format_seconds(best.work)} of work around it" if best.work else ""
    lines = [
        (
            f"its step takes {format_seconds(best.step)}, {best.slowdown:.3g} times the computation alone: "
            f"{_moves(best)}{beside}"
        ),
        best.strategy.effect,
    ]
    if best is not dense:
        lines.append(f"dense, fused: {dense.step / best.step:.3g} times its step; {_moves(dense)}")
    between = [found for found in candidates[1 : candidates.index(best)] if found is not best]
    if between:
        others = ", ".join(f"{found.strategy.label} (×{found.step / best.step:.3g})" for found in between)
        lines.append(f"what changes training less takes longer: {others}")
    fastest = min(candidates, key=lambda found: found.step)
    if isinstance(best.strategy, Local):
        every = min(
            (found for found in candidates if not isinstance(found.strategy, Local)), key=lambda found: found.step
        )
        lines.append(
            f"of the ways that exchange at every step, {every.strategy.label} is the fastest: "
            f"{format_seconds(every.step)}"
        )
    if best is not fastest:
        lines.append(
            f"{fastest.strategy.label} would be the fastest ({format_seconds(fastest.step)}), and changes training "
            f"more: it would be taken if it saved more than {1 - 1 / CLOSE:.0%} of the step"
        )
    return lines


def _others(workload: Workload, predictions: Mapping[Strategy, Prediction], best: Prediction) -> list[str]:
    """Faster ways among which no choice is made here: sharing the update, and what a drop-in program cannot have."""
    if workload.stage != "step":
        known = (found for found in predictions.values() if not isinstance(found.strategy, Outer))
        fastest = min(known, key=lambda found: found.step)
        faster = fastest.step < best.step and not fastest.strategy.drop_in
        return [f"in a whole step, {fastest.strategy.by} would take {format_seconds(fastest.step)}"] if faster else []
    shared = predictions[Sharded()]
    if shared.step >= best.step:
        return []
    taken = format_seconds(shared.step)
    return [
        f"{shared.strategy.by} would take {taken}, with dense exchange: each rank runs and holds a part of the update"
    ]


def _moves(found: Prediction) -> str:
    return (
        f"it moves {format_bytes(found.received)} per step and rank, {format_seconds(found.alone)} on this link, of "
        f"which {format_seconds(found.exposed)} are waited for"
    )
