"""Whether a measured time can be: against what the device can do, and against other calls of the same op."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median

import torch
from torch import fx

from graphopt import _torch
from graphopt.analysis.costs.isolated_call import real_call
from graphopt.analysis.costs.profiles import DeviceProfile
from graphopt.analysis.costs.roofline import call_precision, flops_of, moved_bytes, roofline_seconds
from graphopt.ir.ops import schema

__all__ = ["is_large", "outliers", "shortest_possible"]

_LARGE_FLOPS, _LARGE_BYTES = 10**7, 10**6
"""From how much work on a call is checked: the time of less is the price of a call."""

_FLOPS_MARGIN = 16.0
"""How many times faster than the calibrating product arithmetic may be: larger products run better, on more units."""

_BYTES_MARGIN = 64.0
"""How many times faster than main memory bytes may move: what fits into a cache does."""

_OUTLIER = 8.0
"""How many times slower than calls of its op a call may be, each by its own roofline."""

_CLASS = 3
"""How many calls of an op make a class."""


def is_large(node: fx.Node) -> bool:
    """Whether a call does so much work that its time can be checked."""
    return moved_bytes(node) >= _LARGE_BYTES or flops_of(node) >= _LARGE_FLOPS


def shortest_possible(node: fx.Node, profile: DeviceProfile) -> float:
    """Seconds that a call cannot take less of, by far; 0 where nothing is known.

    The bytes count where an op is known to touch each of them: pointwise ones. A look-up in a table reads few of its
    rows, and a new tensor may not be touched at all.
    """
    arithmetic = flops_of(node) / (_FLOPS_MARGIN * profile.peak_flops(call_precision(node)))
    target, _, _ = real_call(node)
    pointwise = isinstance(target, _torch.OpOverload) and torch.Tag.pointwise in target.tags
    traffic = moved_bytes(node) / (_BYTES_MARGIN * profile.memory_bandwidth) if pointwise else 0.0
    return max(arithmetic, traffic)


def outliers(seconds: Mapping[fx.Node, float], profiles: Iterable[DeviceProfile]) -> set[fx.Node]:
    """The calls that are far slower than others of the same op, each next to what the roofline gives it.

    Args:
        seconds: of each call.
        profiles: of the calls' devices, in their order.
    """
    ratios = {
        node: taken / roofline_seconds(node, profile)
        for (node, taken), profile in zip(seconds.items(), profiles, strict=True)
    }
    by_op: dict[str, list[float]] = {}
    for node, ratio in ratios.items():
        by_op.setdefault(schema.op_name(node), []).append(ratio)
    usual = {op: median(found) for op, found in by_op.items() if len(found) >= _CLASS}
    return {node for node, ratio in ratios.items() if ratio > _OUTLIER * usual.get(schema.op_name(node), ratio)}
