"""The cost model: seconds of every call of a program, measured on this machine or estimated by the roofline.

Planners weigh bytes against these seconds and against the bandwidth of the links to the host and to the disk. Each
distinct call (op, shapes, strides, dtypes, device, other arguments, number of threads) is run by itself a few times,
and the figures are kept in a file (see `cache_folder`): a second program of the same shapes costs nothing. All of it
takes half a second and 5 % of a step at most; what there is no time for, and what can only be measured beside other
work, is estimated by the roofline and by the ratio to it of calls that were measured, and measured by the next process.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import fx

from graphopt import _torch
from graphopt.analysis.costs.bandwidth import Tier, link_bandwidth
from graphopt.analysis.costs.calibration import ProfilesHere, profile_of
from graphopt.analysis.costs.device_names import COSTS, is_profile_file, near_devices
from graphopt.analysis.costs.figures import cache_folder, remeasure
from graphopt.analysis.costs.isolated_call import call_key, call_tensors
from graphopt.analysis.costs.measurements import Measurements
from graphopt.analysis.costs.profiles import EFFICIENCY, PROFILES, DeviceProfile, device_profile
from graphopt.analysis.costs.roofline import flops_of, moved_bytes, roofline_seconds
from graphopt.errors import GraphoptError, near_words, shown
from graphopt.ir.context import Device
from graphopt.ir.graphs.autocast import plain_precision
from graphopt.ir.memory.timeline import MemoryTimeline
from graphopt.ir.ops import schema

__all__ = [
    "COSTS",
    "EFFICIENCY",
    "PROFILES",
    "CostReport",
    "DeviceProfile",
    "Method",
    "Tier",
    "cache_folder",
    "check_cost",
    "cost_report",
    "costs_of",
    "device_profile",
    "flops_of",
    "link_bandwidth",
    "moved_bytes",
    "op_seconds",
    "profile_of",
    "profile_of_cost",
    "remeasure",
    "roofline_seconds",
]

logger = logging.getLogger(__name__)

Method = Literal["measured", "roofline"]

_WORTH_TELLING = 0.05
"""The share of all seconds below which nothing is said of the roofline, or of measured ops."""


@dataclass(frozen=True, slots=True)
class CostReport:
    """What calls cost, and how that is known. The first four counts add up to the number of calls.

    Attributes:
        seconds: of each call, in the order given.
        measured: how many of them were measured now (``runs`` distinct ones, each run a few times).
        cached: how many were measured before.
        estimated: how many the roofline stands for.
        free: how many take no time: inputs, outputs, views, elements of tuples, sizes.
        runs: distinct calls that were measured now.
        reasons: for each op that the roofline stands for although measuring was asked for, why.
        doubtful: distinct calls that could only be measured while the machine had other work; estimated.
        late: distinct calls that there was no time to measure; estimated.
        share: of all seconds, those of calls that are estimated for these two reasons.
    """

    seconds: tuple[float, ...]
    measured: int
    cached: int
    estimated: int
    free: int
    runs: int = 0
    reasons: Mapping[str, str] = field(default_factory=dict)
    doubtful: int = 0
    late: int = 0
    share: float = 0.0

    @property
    def basis(self) -> str:
        """What the seconds are made of; nothing here is the time of a whole step."""
        if not (self.measured or self.cached) or self.share > 1 - _WORTH_TELLING:
            return "the roofline"
        return (
            "measured ops" if self.share < _WORTH_TELLING else f"measured ops and, for {self.share:.0%}, the roofline"
        )

    @property
    def remark(self) -> str:
        """What a user should know about how the times were taken; empty where that is nothing."""
        reasons = []
        if self.doubtful:
            reasons.append(f"{self.doubtful} could only be measured while the machine had other work")
        if self.late:
            reasons.append(f"{self.late} would have taken longer to measure than there was time for")
        if not reasons:
            return ""
        count = self.doubtful + self.late
        times = "time of an op is" if count == 1 else f"times of {count} distinct ops are"
        return (
            f"the {times} estimated by the roofline, {self.share:.1%} of all seconds: {', '.join(reasons)}; the next "
            f"process measures {'it' if count == 1 else 'them'}"
        )

    def __str__(self) -> str:
        text = (
            f"{sum(self.seconds):.4g} s in {len(self.seconds)} calls: {self.measured} measured ({self.runs} distinct), "
            f"{self.cached} from the cache, {self.estimated} by the roofline, {self.free} free"
        )
        remarks = [self.remark] if self.remark else []
        return "\n".join([text, *remarks, *(f"by the roofline: {op}: {reason}" for op, reason in self.reasons.items())])


def op_seconds(
    calls: Iterable[fx.Node],
    *,
    method: Method = "measured",
    profile: DeviceProfile | None = None,
    progress: Callable[[int, int], None] | None = None,
    cache: bool = True,
) -> list[float]:
    """Seconds of each call of a program; ``cost_report`` gives the same with how it is known."""
    return list(cost_report(calls, method=method, profile=profile, progress=progress, cache=cache).seconds)


def cost_report(
    calls: Iterable[fx.Node],
    *,
    method: Method = "measured",
    profile: DeviceProfile | None = None,
    progress: Callable[[int, int], None] | None = None,
    cache: bool = True,
) -> CostReport:
    """Seconds of each call of a program, on its device with nothing else running, by itself.

    Inputs, views and elements of tuples take none. With ``measured``, the roofline stands for what cannot be run by
    itself: collectives, ops that write to their arguments, transfers, calls of more than 2 GiB, ops that refuse made-up
    data, devices that are not here. Each such op is logged, and is in the report. Random-number generators and
    autocast are as before, and no memory stays allocated.

    Args:
        calls: nodes of a program; symbolic sizes are taken by their example.
        method: ``measured``, or ``roofline``, which runs nothing of the program, and is taken for one without data.
        profile: what the device can do, for the roofline; by default that of the device here (``profile_of``), or of
            the one that a program without data is for.
        progress: called with (distinct calls measured, distinct calls to measure) after each of them.
        cache: use figures measured before, and keep new ones.

    Raises:
        GraphoptError: for an unknown method; for a device that is not here, without ``profile``.
    """
    if method not in ("measured", "roofline"):
        raise GraphoptError(f"there is no method {method!r} of costs: it is 'measured' or 'roofline'")
    nodes = list(calls)
    paid = [node for node in nodes if not _is_free(node)]
    others = (_torch.stand_in_of(tensor) for node in paid for tensor in call_tensors(node))
    other = next(filter(None, others), None)
    if other is not None:
        method, profile = "roofline", profile or _known_profile(other.device)
    estimate = _Roofline(profile, cache)
    found = Measurements(cache)
    if method == "measured":
        with plain_precision():
            found.run(dict.fromkeys(paid), progress)
    seconds = {node: found.seconds[node] if node in found.seconds else estimate(node) for node in paid}
    seconds |= {node: seconds[node] * found.ratio(node) for node in found.left_out}
    left_out = sum(seconds[node] for node in found.left_out)
    measured = sum(node in found.new for node in paid)
    known = sum(node in found.seconds for node in paid)
    by_call = tuple(seconds.get(node, 0.0) for node in nodes)
    counts = (measured, known - measured, len(paid) - known, len(nodes) - len(paid))
    return CostReport(
        by_call,
        *counts,
        runs=found.runs,
        reasons=found.reasons,
        doubtful=found.doubtful,
        late=found.late,
        share=left_out / sum(by_call) if left_out else 0.0,
    )


def _is_free(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target is operator.getitem or schema.hands_on(node):
        return True
    return not call_tensors(node)


class _Roofline:
    """Estimates of calls; those of equal calls are made once."""

    def __init__(self, profile: DeviceProfile | None, cache: bool) -> None:
        self._profile = profile
        self._here = ProfilesHere(cache)
        self._known: dict[str, float] = {}

    def __call__(self, node: fx.Node) -> float:
        key = call_key(node)
        if not key:
            return roofline_seconds(node, self._profile or self._here.of(node))
        if key not in self._known:
            self._known[key] = roofline_seconds(node, self._profile or self._here.of(node))
        return self._known[key]


def check_cost(cost: str) -> None:
    """Refuse what is neither a name in ``COSTS`` nor a file with a profile.

    Raises:
        GraphoptError: with the near names, and what to write for a device that is not among them; for a file that is
            no profile, with the place in it.
    """
    if isinstance(cost, str) and is_profile_file(cost):
        device_profile(cost)
        return
    if isinstance(cost, str) and cost in COSTS:
        return
    what = "cost is where seconds come from"
    if not isinstance(cost, str):
        raise GraphoptError(f"{what}, one of {', '.join(map(repr, COSTS))}, got {shown(cost)}")
    near = _near_costs(cost)
    if near:
        raise GraphoptError(f"there is no cost model {cost!r}: {what}; did you mean {', '.join(map(repr, near))}?")
    raise GraphoptError(
        f"there is no cost model {cost!r}: {what}; write 'measured' or 'roofline' for the device that is here, one "
        f"of {', '.join(map(repr, PROFILES))}, or a .toml file with a profile"
    )


def profile_of_cost(cost: str, device: Device | None = None) -> DeviceProfile | None:
    """The device whose roofline a cost model is; None for ``measured`` and ``roofline`` of the one that is here.

    Args:
        cost: of ``COSTS``, or a file with a profile.
        device: the one that a program without data is for: ``measured`` and ``roofline`` mean its roofline.

    Raises:
        GraphoptError: for a file that is no profile.
    """
    if cost in PROFILES or is_profile_file(cost):
        return device_profile(cost)
    return None if device is None else _known_profile(device)


def _near_costs(cost: str) -> list[str]:
    """What was probably meant: a device by words of its name, or the device that is here."""
    if cost.lower() in ("cpu", "cuda", "gpu", "auto", "here", "local"):
        return ["measured", "roofline"]
    return near_devices(cost) or near_words(cost, COSTS)


def _known_profile(device: Device) -> DeviceProfile:
    """The figures of the device that a program without data is for."""
    if isinstance(device, DeviceProfile):
        return device
    if device.name not in PROFILES:
        raise GraphoptError(
            f"this program was captured without data for {device.name!r}, whose figures are not known here: name a "
            f"cost model, one of {', '.join(map(repr, PROFILES))}"
        )
    return PROFILES[device.name]


def costs_of(memory: MemoryTimeline, cost: str, *, progress: Callable[[int, int], None] | None = None) -> CostReport:
    """Seconds of every call of a program, by one of ``COSTS`` or by a file with a profile.

    Args:
        memory: the program's timeline; seconds are in the order of its ``nodes``.
        cost: how to find them.
        progress: called with (distinct calls measured, distinct calls to measure) after each of them.

    Raises:
        GraphoptError: for a name that is not in ``COSTS``, and for a file that is no profile.
    """
    check_cost(cost)
    method: Method = "measured" if cost == "measured" else "roofline"
    return cost_report(memory.nodes, method=method, profile=profile_of_cost(cost), progress=progress)
