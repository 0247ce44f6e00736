"""Which sizes a program serves whose inputs have sizes that vary.

The programs of one capture whose sizes vary, each planned for some sizes within a number of bytes.

A plan for large sizes runs more again than small ones need, and one for small sizes takes too much at large ones. So a
capture has a small set of programs: at sizes that are new, one that fits is taken where little of it is recomputed, or
where it was planned for sizes near by; otherwise the capture is planned once more, without running the model's code.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

import torch

from graphopt import _torch
from graphopt.analysis.costs.cost import op_seconds
from graphopt.capture import CaptureSession
from graphopt.errors import GraphoptError
from graphopt.ir.context import PlanStore
from graphopt.ir.files.size_expressions import SizeCondition
from graphopt.ir.node import Phase, info, value_of
from graphopt.ir.program import Program
from graphopt.rewriting.pass_ import Pass
from graphopt.runtime.programs.rewrite import Rewritten

__all__ = ["OpenInputs", "Planned", "SizePlans", "SizeRule", "SizeRules", "Target", "size_rules", "targets"]


@dataclass(frozen=True, slots=True)
class SizeRule:
    """What one dimension of one input must be: a fixed size, or that of an expression of symbols within bounds."""

    input: int
    dim: int
    size: int | torch.SymInt
    low: int = 0
    high: int | None = None
    name: str = ""

    def allows(self, size: int) -> bool:
        """Whether a size is within the bounds."""
        return self.low <= size and (self.high is None or size <= self.high)

    @property
    def bounds(self) -> str:
        """The bounds, for people."""
        if self.low == self.high:
            return str(self.low)
        return f"{self.low} to {'unlimited' if self.high is None else self.high}"

    @property
    def place(self) -> str:
        """Which dimension it is, for people."""
        return f"dimension {self.dim} of {self.name}"


@dataclass(frozen=True)
class OpenInputs:
    """What a program takes whose sizes may vary, and under which conditions it is the same program.

    Attributes:
        tensors: those of a call, without data, by name; sizes that vary are symbols there.
        mode: in which the program was traced, and which knows the conditions on its symbols.
        conditions: further ones, of a program that was traced in another process.
    """

    tensors: Sequence[tuple[str, torch.Tensor]]
    mode: _torch.FakeTensorMode
    conditions: Sequence[SizeCondition] = ()


class SizeRules:
    """What the sizes of a call have to be for a program; ``bool`` of it is whether any of them may vary.

    Args:
        inputs: of the program; None for one whose sizes are fixed.
        declared: whether a user has said which sizes vary, so that sizes outside of their bounds are errors. Otherwise
            such sizes belong to another program.

    Attributes:
        rules: one for each dimension of each input; none where all sizes are fixed.
        inputs: as given.
    """

    def __init__(self, inputs: OpenInputs | None = None, *, declared: bool = False) -> None:
        self._declared = declared
        self.inputs = inputs
        self.rules: list[SizeRule] = []
        for index, (name, tensor) in enumerate(() if inputs is None else inputs.tensors):
            sizes: list[Any] = list(tensor.shape)
            for dim, size in enumerate(sizes):
                fixed = not isinstance(size, torch.SymInt) or not _torch.size_symbols(size)
                low, high = (int(size), int(size)) if fixed else _torch.size_range(size)
                self.rules.append(SizeRule(index, dim, int(size) if fixed else size, low, high, name))
        self._varying = [rule for rule in self.rules if isinstance(rule.size, torch.SymInt)]
        if not self._varying:
            self.rules = []

    def __bool__(self) -> bool:
        return bool(self.rules)

    @property
    def axes(self) -> list[SizeRule]:
        """The dimensions that vary."""
        return self._varying

    @property
    def symbols(self) -> set[str]:
        """The names of the symbols that the sizes are made of; none where all are fixed."""
        return {name for rule in self._varying for name in _torch.size_symbols(rule.size)}  # type: ignore[arg-type]

    def describe(self, values: Mapping[str, int]) -> str:
        """The dimensions that vary with their sizes for values of the symbols, for people."""
        sizes = [(rule, _torch.evaluate_number(rule.size, values)) for rule in self._varying]
        return ", ".join(f"{rule.place} = {size}" for rule, size in sizes)

    def broken(self, values: Mapping[str, int]) -> str:
        """The condition under which the program was traced that does not hold for values; empty where all hold."""
        if self.inputs is None:
            return ""
        broken = (condition.text for condition in self.inputs.conditions if not condition.holds(values))
        return next(broken, "") or _torch.broken_guard(self.inputs.mode, values)

    def fixing(self, sizes: Sequence[int]) -> str:
        """The condition by which tracing has fixed one of these sizes, as text; empty where none is known."""
        mode = None if self.inputs is None else self.inputs.mode
        found = [] if mode is None else [_torch.fixed_size_guard(mode, size) for size in sizes]
        return next((guard for guard in found if guard), "")

    def match(self, tensors: Sequence[torch.Tensor]) -> dict[str, int] | None:
        """The values of the program's symbols for a call; None where the program does not serve it.

        Raises:
            GraphoptError: where a declared size is out of its range, or two that must agree do not.
        """
        values = self._values(tensors)
        return None if values is None or self._why_not(tensors, values) else values

    def why_not(self, tensors: Sequence[torch.Tensor]) -> str:
        """Why the program does not serve a call, for people; empty where it does."""
        values = self._values(tensors)
        if values is None:
            bounds = [(rule, tensors[rule.input].shape[rule.dim]) for rule in self.rules]
            rule, size = next((rule, size) for rule, size in bounds if not rule.allows(size))
            return f"{rule.place} is {size}, and was traced for {rule.bounds}"
        return self._why_not(tensors, values)

    def _why_not(self, tensors: Sequence[torch.Tensor], values: Mapping[str, int]) -> str:
        disagreeing = self._disagreeing(tensors, values)
        if disagreeing is not None:
            return f"{disagreeing.place} was traced as {disagreeing.size}"
        strides = self._with_strides(tensors, values)
        if strides is None:
            return "an argument lies in memory in another way"
        guard = self.broken(strides)
        return f"the model takes another path where {guard} does not hold" if guard else ""

    def _values(self, tensors: Sequence[torch.Tensor]) -> dict[str, int] | None:
        """The values of symbols that are a dimension by themselves, where all sizes are within their bounds."""
        values: dict[str, int] = {}
        for rule in self.rules:
            size = tensors[rule.input].shape[rule.dim]
            if not rule.allows(size):
                if isinstance(rule.size, torch.SymInt) and self._declared:
                    raise GraphoptError(f"{rule.place} is {size}, and dynamic_shapes allows {rule.bounds}")
                return None
            if isinstance(rule.size, torch.SymInt) and _torch.size_symbols(rule.size) == [str(rule.size)]:
                values.setdefault(str(rule.size), size)
        return values

    def _disagreeing(self, tensors: Sequence[torch.Tensor], values: Mapping[str, int]) -> SizeRule | None:
        """The first rule for which a size is not what its expression is for the values."""
        for rule in self._varying:
            size, wanted = tensors[rule.input].shape[rule.dim], _torch.evaluate_number(rule.size, values)
            if size == wanted:
                continue
            if self._declared and wanted is not None:
                raise GraphoptError(
                    f"{rule.place} is {size}, and it must equal {wanted}, the other size that dynamic_shapes calls "
                    f"{rule.size}"
                )
            return rule
        return None

    def _with_strides(self, tensors: Sequence[torch.Tensor], values: Mapping[str, int]) -> dict[str, int] | None:
        """The values with those of symbols in strides; None where tensors do not lie in memory as the inputs do.

        With declared sizes the signature says how tensors lie in memory.
        """
        found = dict(values)
        own = () if self.inputs is None else self.inputs.tensors
        for tensor, (_, known) in zip(tensors, own, strict=True):
            if tensor.layout is not torch.strided:
                continue
            strides: list[Any] = list(known.stride())
            for size, stride, wanted in zip(tensor.shape, tensor.stride(), strides, strict=True):
                if isinstance(wanted, torch.SymInt) and _torch.size_symbols(wanted) == [str(wanted)]:
                    found.setdefault(str(wanted), stride)
                if size > 1 and stride != _torch.evaluate_number(wanted, found) and not self._declared:
                    return None
        return found


def size_rules(program: Program, *, declared: bool = True) -> SizeRules:
    """The rules for every dimension of every input of a program; none for one whose sizes are fixed."""
    tensors = [(spec.target, value_of(node)) for node, spec in program.inputs_of("input")]
    return SizeRules(OpenInputs(tensors, program.fake_mode), declared=declared)


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
    """What a capture is planned for (``PlannedSizes``), with the plans that it has so far."""

    sizes: Mapping[str, int]
    largest: Mapping[str, int]
    plans: PlanStore = field(default_factory=PlanStore)


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
        return Target(dict(values), dict(self._largest), context.plans or PlanStore())

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
            sizes = planned.rewritten.program.context.sizes.planned
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
        program.context = replace(program.context, sizes=replace(program.context.sizes, planned=dict(sizes)))
