"""Which sizes a program serves whose inputs have sizes that vary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphopt import _torch
from graphopt.errors import GraphoptError
from graphopt.ir.node import value_of
from graphopt.ir.program import Program
from graphopt.ir.size_conditions import SizeCondition

__all__ = ["OpenInputs", "SizeRule", "SizeRules", "size_rules"]


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
