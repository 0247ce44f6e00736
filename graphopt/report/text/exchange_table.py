"""The dry run of gradient exchange as text and as data: every way, the one to use, and where one overtakes another."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from graphopt.ir.version import VERSION
from graphopt.ir.words.columns import aligned
from graphopt.ir.words.written_units import counted, format_bytes, format_seconds
from graphopt.rewriting.distributed.prediction.advice import MOST_RANKS, SHARE, ExchangePlan
from graphopt.rewriting.distributed.prediction.link import format_bandwidth
from graphopt.rewriting.distributed.prediction.predict import Prediction
from graphopt.rewriting.distributed.prediction.volume import SPARSE_NUMEL, Gradient

__all__ = ["SCHEMA_VERSION", "exchange_json", "exchange_text"]

SCHEMA_VERSION = 1
"""Of ``exchange_json``."""

_HEAD = (
    "way",
    "messages",
    "puts in",
    "moves",
    "alone",
    "exposed",
    "work",
    "step",
    "× compute",
    "beats fused dense",
)

_LEGEND = (
    "puts in: bytes that a rank gives to collectives; moves: bytes that its link sends, and as many that it receives",
    "alone: the exchange with nothing else running; exposed: what of it is waited for; work: copies, casts, selection",
)

_DROP_IN = "note         a drop-in program: all ways but dense exchange and that in 16 bits need a whole step"


def exchange_text(plan: ExchangePlan, passes: tuple[str, ...] = (), most: int = 8) -> str:
    """What a step computes, a row for every way, the one to use with its reasons, and the break-evens.

    Args:
        plan: to show.
        passes: that ran before.
        most: how many of the gradients that stay dense are named.

    Returns:
        lines of text; bytes in powers of ten, all figures per step and rank.
    """
    rows = [_row(plan, found) for found in plan.predictions]
    lines = [
        *_head(plan, passes),
        "",
        "per step and rank",
        *aligned([_HEAD, *rows], right=range(1, len(_HEAD))),
        *_LEGEND,
        "",
        f"==== use {plan.best.strategy.by}: {plan.best.strategy.label}",
        *plan.reasons,
        "",
        "==== where one overtakes the other",
        *_break_evens(plan),
        "",
        "==== what stays dense in sparse exchange",
        *_kept_dense(plan, most),
    ]
    return "\n".join(lines) + "\n"


def _head(plan: ExchangePlan, passes: tuple[str, ...]) -> list[str]:
    workload = plan.workload
    first, *more = workload.costs.splitlines() or [""]
    back = format_seconds(workload.backward - workload.forward)
    parts = f"forward {format_seconds(workload.forward)}, backward {back}, update {format_seconds(workload.update)}"
    size = format_bytes(workload.gradient_bytes)
    buffers = f", and buffers of {format_bytes(sum(workload.buffers))}" if workload.buffers else ""
    return [
        f"{workload.title or 'program'}, {workload.stage} stage; passes: {', '.join(passes) or 'none'}",
        f"network      {plan.ranks} ranks, {plan.link}",
        f"computation  {format_seconds(workload.compute)}: {parts}",
        f"             {first}",
        *(f"             {line}" for line in more),
        f"exchanged    {counted(len(workload.gradients), 'gradients')} of {size}{buffers}",
        *([_DROP_IN] if workload.stage == "joint" else []),
    ]


def _row(plan: ExchangePlan, found: Prediction) -> tuple[str, ...]:
    return (
        f"{found.strategy.label}{' <-' if found is plan.best else ''}",
        _count(found.messages),
        format_bytes(found.payload),
        format_bytes(found.received),
        *(format_seconds(seconds) for seconds in (found.alone, found.exposed, found.work, found.step)),
        f"{found.slowdown:.3g}",
        _where(plan, found),
    )


def _count(messages: float) -> str:
    return f"{messages:.0f}" if messages == int(messages) else f"{messages:.3g}"


def _where(plan: ExchangePlan, found: Prediction) -> str:
    if found.strategy not in plan.below:
        return ""
    if len(found.kept_dense) == len(plan.workload.gradients):
        return "as dense"
    below = plan.below[found.strategy]
    if below is None:
        return "nowhere"
    return "everywhere" if below == math.inf else f"below {format_bandwidth(below)}"


# --- break-evens -----------------------------------------------------------------------------------------------------


def _break_evens(plan: ExchangePlan) -> Iterator[str]:
    name = plan.sparse.strategy.label
    if plan.equal_bytes is None:
        yield f"{name}: no gradient is a matrix of {SPARSE_NUMEL} elements or more, so that all are exchanged densely"
    else:
        yield f"{name}, bandwidth: {_bandwidth_sentence(plan)}"
        yield f"{name}, ranks: {_ranks_sentence(plan, plan.equal_bytes)}"
    yield f"local SGD, interval: {_interval_sentence(plan)}"
    yield (
        "every rank is taken to have a batch like this one's, the same speed and a link of its own; messages run one "
        "after the other, beside backward"
    )


def _bandwidth_sentence(plan: ExchangePlan) -> str:
    below = plan.below[plan.sparse.strategy]
    if below is None or below == math.inf:
        return f"{'not' if below is None else 'always'} faster than fused dense exchange with {plan.ranks} ranks"
    return (
        f"faster than fused dense exchange below {format_bandwidth(below)} per rank; above it, the "
        f"{format_seconds(plan.sparse.work)} of selection and sums cost more than they save"
    )


def _ranks_sentence(plan: ExchangePlan, equal: int) -> str:
    received = (
        f"every rank receives what all others send, fewer bytes than dense exchange below {equal} ranks "
        "(ranks · density ~ 1 with float32)"
    )
    if plan.most_ranks is None:
        return f"{received}; with {plan.ranks} it is not faster on this link"
    more = " or more" if plan.most_ranks == MOST_RANKS else ""
    return f"{received}; on this link it is faster up to {plan.most_ranks}{more}"


def _interval_sentence(plan: ExchangePlan) -> str:
    enough = f"from k = {plan.enough_steps} on its exchange takes at most {SHARE:.0%} of the computation"
    if plan.overtaking_steps is None:
        return f"never faster than fused dense exchange, of which nothing is waited for; {enough}"
    return f"faster than fused dense exchange from k = {plan.overtaking_steps} on; {enough}"


# --- what stays dense ------------------------------------------------------------------------------------------------


def _kept_dense(plan: ExchangePlan, most: int) -> Iterator[str]:
    kept, everything = plan.sparse.kept_dense, plan.workload.gradients
    size, total = format_bytes(sum(gradient.bytes for gradient in kept)), format_bytes(plan.workload.gradient_bytes)
    yield (
        f"{len(kept)} of {len(everything)} gradients, {size} of {total}: vectors, fewer than {SPARSE_NUMEL} "
        f"elements, or no fewer bytes sparsely with {plan.ranks} ranks"
    )
    largest = sorted(kept, key=lambda gradient: -gradient.bytes)
    rows = [(f"  {gradient.name}", format_bytes(gradient.bytes), _why(gradient)) for gradient in largest[:most]]
    yield from aligned(rows, right=(1,))
    if len(kept) > most:
        yield f"  and {len(kept) - most} more of {format_bytes(sum(gradient.bytes for gradient in largest[most:]))}"


def _why(gradient: Gradient) -> str:
    if len(gradient.shape) < 2:
        return "one dimension"
    return f"{gradient.numel} elements" if gradient.numel < SPARSE_NUMEL else "ranks · density"


# --- data ------------------------------------------------------------------------------------------------------------


def exchange_json(plan: ExchangePlan, passes: tuple[str, ...] = ()) -> dict[str, Any]:
    """All of it as plain data: bytes, seconds, and bytes per second; figures are per step and rank.

    Args:
        plan: to show.
        passes: that ran before.
    """
    workload = plan.workload
    return {
        "schema": SCHEMA_VERSION,
        "versions": {"graphopt": VERSION, "torch": str(torch.__version__)},
        "title": workload.title,
        "stage": workload.stage,
        "passes": list(passes),
        "cost": workload.cost,
        "costs": workload.costs,
        "world_size": plan.ranks,
        "link": {
            "bandwidth": plan.link.bandwidth,
            "latency": plan.link.latency,
            "algorithm": plan.link.algorithm,
            "host": None if plan.link.host is None else asdict(plan.link.host),
        },
        "computation": {
            "seconds": workload.compute,
            "forward": workload.forward,
            "backward": workload.backward - workload.forward,
            "update": workload.update,
        },
        "gradients": [
            {"name": gradient.name, "bytes": gradient.bytes, "ready": gradient.ready} for gradient in workload.gradients
        ],
        "buffer_bytes": sum(workload.buffers),
        "ways": [_strategy_json(plan, found) for found in plan.predictions],
        "use": {"way": plan.best.strategy.label, "by": plan.best.strategy.by, "reasons": list(plan.reasons)},
        "sparse": {"equal_bytes_ranks": plan.equal_bytes, "faster_up_to_ranks": plan.most_ranks},
        "local_sgd": {"faster_from": plan.overtaking_steps, "hidden_from": plan.enough_steps},
        "kept_dense": [{"name": gradient.name, "bytes": gradient.bytes} for gradient in plan.sparse.kept_dense],
    }


def _strategy_json(plan: ExchangePlan, found: Prediction) -> dict[str, Any]:
    data: dict[str, Any] = {
        "way": found.strategy.label,
        "by": found.strategy.by,
        "messages": found.messages,
        "payload_bytes": found.payload,
        "sent_bytes": found.sent,
        "received_bytes": found.received,
        "alone": found.alone,
        "exposed": found.exposed,
        "work": found.work,
        "step": found.step,
        "slowdown": found.slowdown,
    }
    if found.strategy not in plan.below:
        return data
    below = plan.below[found.strategy]
    finite = below is not None and below < math.inf
    return {
        **data,
        "faster_than_dense": "never" if below is None else "below" if finite else "always",
        "faster_below_bandwidth": below if finite else None,
    }
