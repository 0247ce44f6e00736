"""Captured programs by call signature, and the check that a dynamic program's sizes fit a call."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import torch

from graphopt import _torch
from graphopt.errors import GraphoptError
from graphopt.ir.node import value_of
from graphopt.ir.program import Program

__all__ = ["Captures", "HasRules", "SizeRule", "size_rules"]

logger = logging.getLogger(__name__)
_MANY = 8


class HasRules(Protocol):
    """What is kept per signature."""

    rules: list[SizeRule]


E = TypeVar("E", bound=HasRules)


@dataclass(frozen=True, slots=True)
class SizeRule:
    """What one dimension of one input must be: a fixed size, or a symbol's value within bounds."""

    input: int
    dim: int
    size: int | None
    symbol: str = ""
    low: int = 0
    high: int | None = None
    name: str = ""


def size_rules(program: Program) -> list[SizeRule]:
    """The rules for every dimension of every input of a program with varying sizes; none for a fixed program."""
    rules: list[SizeRule] = []
    dynamic = False
    for index, (node, spec) in enumerate(program.inputs_of("input")):
        for dim, size in enumerate(value_of(node).shape):
            if isinstance(size, torch.SymInt):
                dynamic = True
                low, high = _torch.size_range(size)
                rules.append(SizeRule(index, dim, None, str(size), low, high, spec.target))
            else:
                rules.append(SizeRule(index, dim, int(size), name=spec.target))
    return rules if dynamic else []


def _fits(rules: list[SizeRule], tensors: list[torch.Tensor]) -> bool:
    """Whether the sizes of a call obey the rules.

    Raises:
        GraphoptError: where a size that may vary is out of its range, or two that must agree do not.
    """
    values: dict[str, int] = {}
    for rule in rules:
        size = tensors[rule.input].shape[rule.dim]
        if rule.size is not None:
            if size != rule.size:
                return False
            continue
        if size < rule.low or (rule.high is not None and size > rule.high):
            high = rule.high if rule.high is not None else "unlimited"
            raise GraphoptError(
                f"dimension {rule.dim} of {rule.name} is {size}, and dynamic_shapes allows {rule.low} to {high}"
            )
        if values.setdefault(rule.symbol, size) != size:
            raise GraphoptError(
                f"dimension {rule.dim} of {rule.name} is {size}, and it must equal {values[rule.symbol]}, the other "
                f"size that dynamic_shapes calls {rule.symbol}"
            )
    return True


@dataclass
class Captures(Generic[E]):
    """Keeps one capture per signature, and says when captures pile up."""

    _found: dict[Hashable, list[E]] = field(default_factory=dict)
    latest: E | None = None
    _told: int = 0

    def find(self, key: Hashable, tensors: list[torch.Tensor]) -> E | None:
        """The capture that serves a call; None where there is none yet."""
        for capture in self._found.get(key, ()):
            if not capture.rules or _fits(capture.rules, tensors):
                self.latest = capture
                return capture
        return None

    def add(self, key: Hashable, capture: E) -> E:
        """Keep a capture for calls of a signature; one can serve several."""
        self._found.setdefault(key, []).append(capture)
        self.latest = capture
        count = len(self.all())
        if count % _MANY == 0 and count != self._told:
            self._told = count
            logger.warning(
                "captured %d programs for different calls; sizes or Python arguments that change from call to call "
                "each need one: pad the batch, pass numbers as tensors, or give dynamic_shapes=",
                count,
            )
        return capture

    def all(self) -> list[E]:
        """Every capture, once."""
        return list({id(capture): capture for captures in self._found.values() for capture in captures}.values())

    def clear(self) -> None:
        """Forget every entry."""
        self._found.clear()
        self.latest = None
