"""Measured seconds of the calls of a program: looked up, or measured now, within a bound on the time that takes.

Calls are measured in the order of their shares of the program's time, so that the bound leaves out what matters least.
What it leaves out, and what was only measured while the machine had other work, is estimated: seconds by the roofline,
as many times as calls of the same op take that were measured.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from statistics import median

import torch
from torch import fx

from graphopt.analysis.costs.calibration import ProfilesHere
from graphopt.analysis.costs.figures import Figure, Figures, figures_of
from graphopt.analysis.costs.isolated_call import LARGEST_CALL, call_bytes, call_key, call_tensors, refusal
from graphopt.analysis.costs.plausibility import is_large, outliers, shortest_possible
from graphopt.analysis.costs.roofline import call_device, roofline_seconds
from graphopt.analysis.costs.timing import measured_seconds
from graphopt.errors import quoted
from graphopt.ir.ops import schema
from graphopt.ir.ops.values import cuda_indices
from graphopt.ir.words.written_units import format_bytes, format_seconds

__all__ = ["Measurements"]

logger = logging.getLogger("graphopt")

_REPEATS = 2
"""How often doubtful figures are measured again once all others are there."""

LEAST, SHARE = 0.5, 0.05
"""What measuring may take: so many seconds, and this share of those that the calls take."""


class _Allowance:
    """How long measuring may go on: by the clock on the wall or by that of the process, whichever has gone further.

    Each call gets as much of the time that is left as its share of the seconds of all calls that are left.

    Args:
        expected: seconds of each distinct call by the roofline.
        counts: how many calls each stands for.
        missing: those that are to be measured.
    """

    def __init__(self, expected: Mapping[str, float], counts: Mapping[str, int], missing: Iterable[str]) -> None:
        self._shares = {key: seconds * counts[key] for key, seconds in expected.items()}
        self.seconds = LEAST + SHARE * sum(self._shares.values())
        self.order = sorted(missing, key=lambda key: -self._shares[key])
        self._expected = expected
        self._waiting = sum(self._shares[key] for key in self.order)
        self._began = time.perf_counter(), time.process_time()
        self._pace = 1.0

    @property
    def left(self) -> float:
        return self.seconds - max(time.perf_counter() - self._began[0], time.process_time() - self._began[1])

    def take(self, key: str, measure: Callable[[float], Figure | None]) -> Figure | None:
        """What ``measure`` gives in the seconds that it is told; None where there are none left for a run."""
        expected, left = self._expected[key], self.left
        part = left * self._shares[key] / max(self._waiting, self._shares[key])
        self._waiting -= self._shares[key]
        if expected * self._pace >= left:
            return None
        found = measure(part)
        if expected > _LONG:  # where the machine has other work, the next calls take longer than expected as well
            self._pace = max(self._pace, (left - self.left) / max(part, expected))
        return found


_LONG = 1e-3
"""Calls from so many seconds on say how much slower the machine is than expected."""


class Measurements:
    """Seconds of calls that can be run, looked up or measured.

    Attributes:
        seconds: of each call whose time is known.
        new: the calls whose time was measured now.
        runs: how many distinct calls were measured now.
        reasons: why ops were not measured.
        doubtful: how many distinct calls have been measured only while the machine had other work.
        late: how many distinct calls were left out, since measuring would have taken longer than allowed.
        left_out: the calls of these two.
    """

    def __init__(self, cache: bool) -> None:
        self.seconds: dict[fx.Node, float] = {}
        self.new: set[fx.Node] = set()
        self.runs = 0
        self.reasons: dict[str, str] = {}
        self.doubtful = 0
        self.late = 0
        self.left_out: list[fx.Node] = []
        self._cache = cache
        self._figures: dict[torch.device, Figures] = {}
        self._least: dict[fx.Node, float] = {}
        self._here = ProfilesHere(cache)
        self._ratios: dict[tuple[str, bool], list[float]] = {}

    def run(self, calls: Iterable[fx.Node], progress: Callable[[int, int], None] | None) -> None:
        """Look up every call, and measure those that are not known."""
        alike: dict[str, list[fx.Node]] = {}
        for node in calls:
            reason = _refusal(node)
            if reason:
                self._refuse(node, reason)
            else:
                alike.setdefault(call_key(node), []).append(node)
        missing = {key: nodes[0] for key, nodes in alike.items() if not self._is_known(key, nodes[0])}
        measured: dict[str, Figure] = {}
        if missing:
            expected = {key: self._expected(nodes[0]) for key, nodes in alike.items()}
            counts = {key: len(nodes) for key, nodes in alike.items()}
            allowance = _Allowance(expected, counts, missing)
            measured = self._measured({key: missing[key] for key in allowance.order}, allowance, progress)
        self._take(alike, measured)

    def _measured(
        self,
        missing: Mapping[str, fx.Node],
        allowance: _Allowance,
        progress: Callable[[int, int], None] | None,
    ) -> dict[str, Figure]:
        """Measure as many of these calls as there is time for, and those again that are doubtful."""
        try:
            devices = cuda_indices(tensor for node in missing.values() for tensor in call_tensors(node))
            with torch.no_grad(), torch.random.fork_rng(devices=devices):
                measured = self._measure_all(missing, allowance, progress)
                for _ in range(_REPEATS):
                    again = {key: missing[key] for key in self._suspects(missing, measured)}
                    self._repeat(again, allowance, measured)
        finally:
            for figures in self._figures.values():
                figures.save()
        return measured

    def _expected(self, node: fx.Node) -> float:
        """Seconds of a call by the roofline of its device."""
        return roofline_seconds(node, self._here.of(node))

    def _is_known(self, key: str, node: fx.Node) -> bool:
        """Whether there is a figure that can be, or this process has had no time for it already."""
        if key in self._figures_of(node).late:
            return True
        found = self._figures_of(node).get("seconds", key)
        return found is not None and not self._is_too_short(node, found)

    def _measure_all(
        self,
        missing: Mapping[str, fx.Node],
        allowance: _Allowance,
        progress: Callable[[int, int], None] | None,
    ) -> dict[str, Figure]:
        """Measure calls one after the other; those that raise are left out, with the reason."""
        measured: dict[str, Figure] = {}
        for done, (key, node) in enumerate(missing.items(), 1):
            figure = allowance.take(key, functools.partial(self._measure, node))
            if figure is not None:
                measured[key] = figure
                self._keep(key, node, figure)
            elif schema.op_name(node) not in self.reasons:
                self._figures_of(node).late.add(key)
            if progress is not None:
                progress(done, len(missing))
        return measured

    def _measure(self, node: fx.Node, longest: float) -> Figure | None:
        """Measure one call, for so many seconds; None where it raises."""
        try:
            return measured_seconds(node, call_device(node), longest)
        except Exception as error:  # checks of values refuse made-up data; the device may be full
            self._refuse(node, quoted(error).splitlines()[0])
            return None

    def _keep(self, key: str, node: fx.Node, figure: Figure) -> None:
        """Remember a figure; one that cannot be is not."""
        if not self._is_too_short(node, figure):
            self._figures_of(node).put("seconds", key, figure)

    def _suspects(self, nodes: Mapping[str, fx.Node], measured: Mapping[str, Figure]) -> list[str]:
        """The calls that are worth another measurement: disturbed, too fast to be, or far slower than their like."""
        large = {nodes[key]: figure.value for key, figure in measured.items() if self._least_of(nodes[key])}
        slow = outliers(large, [self._here.of(node) for node in large])
        return [
            key
            for key, figure in measured.items()
            if figure.doubtful or nodes[key] in slow or self._is_too_short(nodes[key], figure)
        ]

    def _repeat(self, nodes: Mapping[str, fx.Node], allowance: _Allowance, measured: dict[str, Figure]) -> None:
        """Measure calls again, some time after the first measurement; the shorter time counts, if it can be."""
        for key, node in nodes.items():
            before = measured[key]
            again = allowance.take(key, functools.partial(self._measure, node))
            if again is None:
                continue
            shorter = again.value < before.value or self._is_too_short(node, before)
            measured[key] = Figure((again if shorter else before).value, before.doubtful and again.doubtful)
            self._keep(key, node, measured[key])

    def _take(self, alike: Mapping[str, list[fx.Node]], measured: Mapping[str, Figure]) -> None:
        """Give every call the figure of those that are like it."""
        believed: dict[fx.Node, float] = {}
        for key, nodes in alike.items():
            found = measured.get(key) or self._figures_of(nodes[0]).get("seconds", key)
            if found is not None and self._is_too_short(nodes[0], found):
                self._refuse(nodes[0], f"{format_seconds(found.value)} is less than this device can take")
            elif found is not None and not found.doubtful:
                believed[nodes[0]] = found.value
                self.seconds.update(dict.fromkeys(nodes, found.value))
                if key in measured:
                    self.new.update(nodes)
                    self.runs += 1
            elif found is not None or schema.op_name(nodes[0]) not in self.reasons:
                self.doubtful += found is not None
                self.late += found is None
                self.left_out += nodes
        if self.left_out:
            for node, seconds in believed.items():
                ratio = seconds / self._expected(node)
                self._ratios.setdefault((schema.op_name(node), is_large(node)), []).append(ratio)

    def ratio(self, node: fx.Node) -> float:
        """How many times longer than by the roofline a call that was left out takes, as far as is known.

        The median of calls of its op, as large or as small as it is; where none was measured, of all such calls.
        """
        own = self._ratios.get((schema.op_name(node), is_large(node)))
        others = [ratio for (_, large), found in self._ratios.items() if large == is_large(node) for ratio in found]
        return median(own or others or [1.0])

    def _is_too_short(self, node: fx.Node, figure: Figure) -> bool:
        return figure.value < self._least_of(node)

    def _least_of(self, node: fx.Node) -> float:
        """Seconds that a call cannot take less of; 0 for small calls, and where nothing is known."""
        if node not in self._least:
            self._least[node] = shortest_possible(node, self._here.of(node)) if is_large(node) else 0.0
        return self._least[node]

    def _refuse(self, node: fx.Node, reason: str) -> None:
        op = schema.op_name(node)
        if op not in self.reasons:
            logger.info("the time of %s is estimated, not measured: %s", op, reason)
            self.reasons[op] = reason

    def _figures_of(self, node: fx.Node) -> Figures:
        device = call_device(node)
        if device not in self._figures:
            self._figures[device] = figures_of(device, cache=self._cache)
        return self._figures[device]


def _refusal(node: fx.Node) -> str:
    """Why a call is not measured; empty where it is."""
    reason = refusal(node)
    if reason:
        return reason
    for kind in {tensor.device.type for tensor in call_tensors(node)} - {"cpu"}:
        if kind != "cuda" or not torch.cuda.is_available():
            return f"there is no {kind} device here"
    size = call_bytes(node)
    return f"the call takes {format_bytes(size)}" if size > LARGEST_CALL else ""
