"""Roles: which values and operations of a program do the same in another of its identical blocks.

Two operations play the same role where they look the same from near: the same seconds and bytes, and so do what they
read, what reads their results, and so on for a few steps. A decision that is good in one block is then tried in all
blocks at once, so that the search takes as many trials for a deep program as for a shallow one.

Source of the refinement: Weisfeiler and Leman's colouring of graphs, stopped after a few rounds, so that blocks in the
middle of a deep program differ from those at its ends only near the ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from graphopt.planning.problem import Operation, Problem

__all__ = ["Roles", "find_roles"]

_ROUNDS = 3
"""How many operations away a difference is still seen."""

_DIGITS = 3
"""Significant digits of the seconds that are compared: measured times of equal operations differ a little."""


@dataclass(frozen=True, slots=True)
class Roles:
    """Numbers that are equal for what plays the same role.

    Attributes:
        values: the role of each value.
        operations: the role of each operation.
        repeats: how many identical blocks there are: how often an operation's role occurs (the median over the
            operations).
    """

    values: tuple[int, ...]
    operations: tuple[int, ...]
    repeats: int


def find_roles(problem: Problem) -> Roles:
    """The roles of a problem's values and operations."""
    makers, readers = problem.makers, problem.readers
    places = {v: place for operation in problem.operations for place, v in enumerate(operation.makes)}
    operations = _numbered(_from_near(problem, operation) for operation in problem.operations)
    values: list[int] = []
    for _ in range(_ROUNDS):
        values = _numbered(
            (operations[makers[value]], places[value], _of(operations, readers[value]))
            for value in range(len(problem.sizes))
        )
        operations = _numbered(
            (role, _of(values, operation.reads), _of(values, operation.makes))
            for role, operation in zip(operations, problem.operations, strict=True)
        )
    return Roles(tuple(values), tuple(operations), _repeats(operations))


def _from_near(problem: Problem, operation: Operation) -> Hashable:
    """What an operation looks like by itself."""
    sizes = problem.sizes
    return (
        f"{operation.seconds:.{_DIGITS}g}",
        operation.scratch,
        operation.memo,
        operation.repeatable,
        len(operation.overwrites),
        _of(sizes, operation.reads),
        _of(sizes, operation.makes),
    )


def _of(numbers: Sequence[int], values: Iterable[int]) -> tuple[int, ...]:
    """The numbers that belong to some values."""
    return tuple([numbers[value] for value in values])


def _numbered(labels: Iterable[Hashable]) -> list[int]:
    """Equal labels get equal numbers, in the order in which they appear."""
    known: dict[Hashable, int] = {}
    return [known.setdefault(label, len(known)) for label in labels]


def _repeats(operations: Sequence[int]) -> int:
    """How often the role of the operation in the middle occurs, when operations are sorted by that."""
    counts = Counter(operations)
    often = sorted(counts[role] for role in operations)
    return often[len(often) // 2] if often else 0
