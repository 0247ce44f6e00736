"""The programs of one capture whose sizes vary, each planned for some sizes within a number of bytes.

A plan for large sizes runs more again than small ones need, and one for small sizes takes too much at large ones. So a
capture has a small set of programs: at sizes that are new, one that fits is taken where little of it runs again, or
where it was planned for sizes near by; otherwise the capture is planned once more, without running the model's code.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

from graphopt.analysis.costs.cost import op_seconds
from graphopt.capture import CaptureSession
from graphopt.ir.node import Phase, info
from graphopt.ir.program import Program
from graphopt.rewriting.pass_ import Pass
from graphopt.runtime.rewrite import Rewritten
from graphopt.runtime.size_rules import SizeRules

__all__ = ["Planned", "SizePlans", "Target", "targets"]

_WASTE = 0.05
"""The share of a program's time, spent on running calls again, up to which it serves any smaller sizes too."""

_STEPS = 2
"""Steps in which sizes are planned for, from one power of two to the next."""


class Planned(Protocol):
    """A program with its passes, and the programs that are made of it for single calls."""

    rewritten: Rewritten

    def programs(self) -> list[Program]:
        """Everything that runs."""
        ...


P = TypeVar("P", bound=Planned)


@dataclass(frozen=True, slots=True)
class Target:
    """What a capture is planned for (``Context.sizes``, ``Context.largest``), with the plans that it has so far."""

    sizes: Mapping[str, int]
    largest: Mapping[str, int]
    plans: dict[Hashable, Any] = field(default_factory=dict)


def targets(rules: SizeRules, values: Mapping[str, int], target: Target) -> list[Target]:
    """Which sizes to plan for, at some: first the next step above them, then these themselves.

    Args:
        rules: of the capture; its bounds are not exceeded.
        values: of its symbols.
        target: what was planned for before, with the plans that there are.
    """
    highest = {str(rule.size): rule.high for rule in rules.axes}
    above = {name: _step_above(value, highest.get(name)) for name, value in values.items()}
    wanted = [above, dict(values)] if above != dict(values) and not rules.broken(above) else [dict(values)]
    return [replace(target, sizes=sizes) for sizes in wanted]


def _step_above(size: int, highest: int | None) -> int:
    """The largest size of the step that a size is in, which is what is planned for."""
    above = math.floor(2 ** (_step(size) / _STEPS))
    return max(size, above if highest is None else min(above, highest))


def _step(size: int) -> int:
    """The number of the step that a size is in: some of them from one power of two to the next."""
    return math.ceil(_STEPS * math.log2(size)) if size > 1 else 0


class SizePlans(Generic[P]):
    """The programs of one capture.

    Args:
        first: the first of them.
        limited: the passes that keep programs within a number of bytes.
        largest: the largest values of symbols so far.

    Attributes:
        programs: all of them.
        session: that further ones are made of, where the first was read and not made; None until one is needed.
    """

    def __init__(self, first: P, limited: Iterable[Pass], largest: Mapping[str, int]) -> None:
        self.programs = [first]
        self.session: CaptureSession | None = None
        self._limited = list(limited)
        self._largest = dict(largest)
        self._served: dict[tuple[tuple[str, int], ...], P] = {}
        self._shares: dict[int, float] = {}

    def note(self, values: Mapping[str, int]) -> None:
        """Note the sizes of a call."""
        for name, value in values.items():
            self._largest[name] = max(value, self._largest.get(name, 0))

    def target(self, values: Mapping[str, int]) -> Target:
        """What is to be planned for at some sizes."""
        context = self.programs[0].rewritten.program.context
        return Target(dict(values), dict(self._largest), {} if context.plans is None else context.plans)

    def find(self, values: Mapping[str, int], *, near: bool = True) -> P | None:
        """The program that serves some sizes; None where the capture has to be planned for them.

        Args:
            values: of the capture's symbols.
            near: whether one that runs much again serves only what it was planned for, or a little less.
        """
        key = tuple(sorted(values.items()))
        found = self._served.get(key)
        if found is None:
            found = self._choose(values, near)
            if found is not None:
                self._served[key] = found
        return found

    def add(self, values: Mapping[str, int], planned: P) -> P:
        """Keep a program that was planned for some sizes."""
        self.programs.append(planned)
        self._served[tuple(sorted(values.items()))] = planned
        return planned

    def _choose(self, values: Mapping[str, int], near: bool) -> P | None:
        limit = self._limit()
        for planned in sorted(self.programs, key=self._share):
            sizes = planned.rewritten.program.context.sizes
            little = self._share(planned) <= _WASTE
            covers = all(values[name] <= size for name, size in sizes.items())
            if near and not little and not (covers and _near(values, sizes)):
                continue
            wanted = values if covers else {name: max(values[name], size) for name, size in sizes.items()}
            if all(program.memory(sizes=wanted).peak_bytes <= limit for program in planned.programs()):
                if not covers:
                    _plan_for(planned, wanted)
                return planned
        return None

    def _limit(self) -> int:
        """The bytes that every program is to stay within."""
        plain = self.programs[0].rewritten.unlimited(self._limited).memory(sizes=self._largest)
        limits = [current.limit(plain) for current in self._limited]
        return min(limit for limit in limits if limit is not None)

    def _share(self, planned: P) -> float:
        """The share of a program's time that goes into running calls again, on the device's roofline."""
        key = id(planned)
        if key not in self._shares:
            program = planned.rewritten.program
            calls = [node for node in program.graph.nodes if node.op == "call_function"]
            again = (Phase.RECOMPUTE, Phase.TRANSFER)
            if not any(info(node).phase in again for node in calls):
                return self._shares.setdefault(key, 0.0)
            seconds = op_seconds(calls, method="roofline")
            spent = sum(time for node, time in zip(calls, seconds, strict=True) if info(node).phase in again)
            self._shares[key] = spent / max(sum(seconds) - spent, 1e-12)
        return self._shares[key]


def _near(values: Mapping[str, int], sizes: Mapping[str, int]) -> bool:
    """Whether sizes are in the same steps as those that were planned for."""
    return all(_step(size) == _step(values[name]) for name, size in sizes.items())


def _plan_for(planned: Planned, sizes: Mapping[str, int]) -> None:
    """Let what is planned hold for larger sizes, at which it has been found to fit."""
    for program in (*planned.rewritten.stages.values(), *planned.programs()):
        program.context = replace(program.context, sizes=dict(sizes))
