"""Measured seconds of the calls of a program: looked up, or measured now; what is doubtful is measured again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import fx

from graphopt.analysis.costs.calibration import profile_of
from graphopt.analysis.costs.figures import Figure, Figures, figures_of
from graphopt.analysis.costs.isolated_call import LARGEST_CALL, call_bytes, call_key, call_tensors, refusal
from graphopt.analysis.costs.plausibility import is_large, outliers, shortest_possible
from graphopt.analysis.costs.profiles import DeviceProfile
from graphopt.analysis.costs.roofline import call_device
from graphopt.analysis.costs.timing import measured_seconds
from graphopt.errors import quoted
from graphopt.ir.ops import schema
from graphopt.ir.ops.values import cuda_indices, format_bytes, format_seconds

__all__ = ["Measurements"]

logger = logging.getLogger("graphopt")

_REPEATS = 2
"""How often doubtful figures are measured again once all others are there."""


class Measurements:
    """Seconds of calls that can be run, looked up or measured.

    Attributes:
        seconds: of each call whose time is known.
        new: the calls whose time was measured now.
        runs: how many distinct calls were measured now.
        reasons: why ops were not measured.
        doubtful: how many distinct calls have a time that was taken while the machine had other work.
    """

    def __init__(self, cache: bool) -> None:
        self.seconds: dict[fx.Node, float] = {}
        self.new: set[fx.Node] = set()
        self.runs = 0
        self.reasons: dict[str, str] = {}
        self.doubtful = 0
        self._cache = cache
        self._figures: dict[torch.device, Figures] = {}
        self._least: dict[fx.Node, float] = {}
        self._profiles: dict[torch.device, DeviceProfile] = {}

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
        try:
            devices = cuda_indices(tensor for node in missing.values() for tensor in call_tensors(node))
            with torch.no_grad(), torch.random.fork_rng(devices=devices):
                measured = self._measure_all(missing, progress)
                for _ in range(_REPEATS):
                    self._repeat({key: missing[key] for key in self._suspects(missing, measured)}, measured)
        finally:
            for figures in self._figures.values():
                figures.save()
        self._take(alike, measured)

    def _is_known(self, key: str, node: fx.Node) -> bool:
        """Whether there is a figure that can be."""
        found = self._figures_of(node).get("seconds", key)
        return found is not None and not self._is_too_short(node, found)

    def _measure_all(
        self, missing: Mapping[str, fx.Node], progress: Callable[[int, int], None] | None
    ) -> dict[str, Figure]:
        """Measure calls one after the other; those that raise are left out, with the reason."""
        measured: dict[str, Figure] = {}
        for done, (key, node) in enumerate(missing.items(), 1):
            figure = self._measure(node)
            if figure is not None:
                measured[key] = figure
                self._keep(key, node, figure)
            if progress is not None:
                progress(done, len(missing))
        return measured

    def _measure(self, node: fx.Node) -> Figure | None:
        """Measure one call; None where it raises."""
        try:
            return measured_seconds(node, call_device(node))
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
        slow = outliers(large, [self._profile_of(node) for node in large])
        return [
            key
            for key, figure in measured.items()
            if figure.doubtful or nodes[key] in slow or self._is_too_short(nodes[key], figure)
        ]

    def _repeat(self, nodes: Mapping[str, fx.Node], measured: dict[str, Figure]) -> None:
        """Measure calls again, some time after the first measurement; the shorter time counts, if it can be."""
        for key, node in nodes.items():
            before, again = measured[key], self._measure(node)
            if again is None:
                continue
            shorter = again.value < before.value or self._is_too_short(node, before)
            measured[key] = Figure((again if shorter else before).value, before.doubtful and again.doubtful)
            self._keep(key, node, measured[key])

    def _take(self, alike: Mapping[str, list[fx.Node]], measured: Mapping[str, Figure]) -> None:
        """Give every call the figure of those that are like it."""
        for key, nodes in alike.items():
            found = measured.get(key) or self._figures_of(nodes[0]).get("seconds", key)
            if found is None:
                continue
            if self._is_too_short(nodes[0], found):
                self._refuse(nodes[0], f"{format_seconds(found.value)} is less than this device can take")
                continue
            self.seconds.update(dict.fromkeys(nodes, found.value))
            self.doubtful += found.doubtful
            if key in measured:
                self.new.update(nodes)
                self.runs += 1

    def _is_too_short(self, node: fx.Node, figure: Figure) -> bool:
        return figure.value < self._least_of(node)

    def _least_of(self, node: fx.Node) -> float:
        """Seconds that a call cannot take less of; 0 for small calls, and where nothing is known."""
        if node not in self._least:
            self._least[node] = shortest_possible(node, self._profile_of(node)) if is_large(node) else 0.0
        return self._least[node]

    def _refuse(self, node: fx.Node, reason: str) -> None:
        op = schema.op_name(node)
        if op not in self.reasons:
            logger.info("the time of %s is estimated, not measured: %s", op, reason)
            self.reasons[op] = reason

    def _profile_of(self, node: fx.Node) -> DeviceProfile:
        device = call_device(node)
        if device not in self._profiles:
            self._profiles[device] = profile_of(device, cache=self._cache)
        return self._profiles[device]

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
