"""Which sizes a program serves whose inputs have sizes that vary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from graphopt import _torch
from graphopt.errors import GraphoptError
from graphopt.ir.node import value_of
from graphopt.ir.program import Program

__all__ = ["SizeRule", "SizeRules", "size_rules"]


@dataclass(frozen=True, slots=True)
class SizeRule:
    """What one dimension of one input must be: a fixed size, or that of an expression of symbols within bounds."""

    input: int
    dim: int
    size: int | torch.SymInt
    low: int = 0
    high: int | None = None
    name: str = ""

    @property
    def place(self) -> str:
        """Which dimension it is, for people."""
        return f"dimension {self.dim} of {self.name}"


class SizeRules:
    """What the sizes of a call have to be for a program; ``bool`` of it is whether any of them may vary.

    Args:
        program: whose inputs count; the sizes that vary are symbols there.
        declared: whether a user has said which sizes vary, so that sizes outside of their bounds are errors. Otherwise
            such sizes belong to another program.

    Attributes:
        rules: one for each dimension of each input; none where all sizes are fixed.
        mode: in which the program was traced, and which knows the conditions under which it is the same program.
    """

    def __init__(self, program: Program, *, declared: bool) -> None:
        self._declared = declared
        self.mode = program.fake_mode
        self._inputs = [value_of(node) for node, _ in program.inputs_of("input")]
        self.rules: list[SizeRule] = []
        for index, (node, spec) in enumerate(program.inputs_of("input")):
            for dim, size in enumerate(value_of(node).shape):
                low, high = _torch.size_range(size) if isinstance(size, torch.SymInt) else (int(size), int(size))
                self.rules.append(SizeRule(index, dim, size, low, high, spec.target))
        self._varying = [rule for rule in self.rules if isinstance(rule.size, torch.SymInt)]
        if not self._varying:
            self.rules = []

    def __bool__(self) -> bool:
        return bool(self.rules)

    @property
    def axes(self) -> list[SizeRule]:
        """The dimensions that vary."""
        return self._varying

    def describe(self, values: Mapping[str, int]) -> str:
        """The dimensions that vary with their sizes for values of the symbols, for people."""
        sizes = [(rule, _torch.evaluate_number(rule.size, values)) for rule in self._varying]
        return ", ".join(f"{rule.place} = {size}" for rule, size in sizes)

    def broken(self, values: Mapping[str, int]) -> str:
        """The condition under which the program was traced that does not hold for values; empty where all hold."""
        return _torch.broken_guard(self.mode, values)

    def match(self, tensors: Sequence[torch.Tensor]) -> dict[str, int] | None:
        """The values of the program's symbols for a call; None where the program does not serve it.

        Raises:
            GraphoptError: where a declared size is out of its range, or two that must agree do not.
        """
        values = self.match_shapes(tuple(tensor.shape for tensor in tensors))
        return values if values is not None and self._strides_agree(tensors, values) else None

    def match_shapes(self, shapes: Sequence[torch.Size]) -> dict[str, int] | None:
        """The same for the shapes of a call's tensors, however they lie in memory."""
        values = self._values(shapes)
        if values is None or not self._agree(shapes, values) or _torch.broken_guard(self.mode, values):
            return None
        return values

    def _values(self, shapes: Sequence[torch.Size]) -> dict[str, int] | None:
        """The values of symbols that are a dimension by themselves, where all sizes are within their bounds."""
        values: dict[str, int] = {}
        for rule in self.rules:
            size = shapes[rule.input][rule.dim]
            if size < rule.low or (rule.high is not None and size > rule.high):
                if isinstance(rule.size, torch.SymInt) and self._declared:
                    high = rule.high if rule.high is not None else "unlimited"
                    raise GraphoptError(f"{rule.place} is {size}, and dynamic_shapes allows {rule.low} to {high}")
                return None
            if isinstance(rule.size, torch.SymInt) and _torch.size_symbols(rule.size) == [str(rule.size)]:
                values.setdefault(str(rule.size), size)
        return values

    def _agree(self, shapes: Sequence[torch.Size], values: Mapping[str, int]) -> bool:
        """Whether all sizes are what their expressions are for the values."""
        for rule in self._varying:
            size, wanted = shapes[rule.input][rule.dim], _torch.evaluate_number(rule.size, values)
            if size == wanted:
                continue
            if self._declared and wanted is not None:
                raise GraphoptError(
                    f"{rule.place} is {size}, and it must equal {wanted}, the other size that dynamic_shapes calls "
                    f"{rule.size}"
                )
            return False
        return True

    def _strides_agree(self, tensors: Sequence[torch.Tensor], values: Mapping[str, int]) -> bool:
        """Whether tensors lie in memory as the program's inputs do; with declared sizes the signature says so."""
        if self._declared:
            return True
        for tensor, known in zip(tensors, self._inputs, strict=True):
            if tensor.layout is torch.strided and any(
                size > 1 and stride != _torch.evaluate_number(wanted, values)
                for size, stride, wanted in zip(tensor.shape, tensor.stride(), known.stride(), strict=True)
            ):
                return False
        return True


def size_rules(program: Program, *, declared: bool = True) -> SizeRules:
    """The rules for every dimension of every input of a program; none for one whose sizes are fixed."""
    return SizeRules(program, declared=declared)
