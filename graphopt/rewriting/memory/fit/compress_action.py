"""Compressed activations as an action of the planner: how many values, weighed against running calls again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from graphopt.ir.program import Program
from graphopt.ir.words.written_units import format_seconds
from graphopt.rewriting.memory.compress.compressible_values import KeptValue, kept_values
from graphopt.rewriting.memory.compress.compression import Compression, waiting
from graphopt.rewriting.memory.fit.budget import BudgetError

__all__ = ["CompressAction", "choose_values", "values_of", "worthwhile"]

_LEAST = 65_536
"""Bytes below which a value stays as it is: a call takes longer than its bytes are worth."""

_SHARES = (0.0, 0.5, 1.0)
"""How much of the bytes that could be compressed are, from nothing to all of them."""


@dataclass(frozen=True, slots=True)
class CompressAction:
    """Values that are to be stored in a few bits.

    Attributes:
        names: of the calls that make them, in their program.
        seconds: that the step is expected to take so.
        plain_seconds: the same with values as they are; None where no plan fits so.
    """

    names: tuple[str, ...]
    seconds: float
    plain_seconds: float | None

    @property
    def line(self) -> str:
        """What was gained, for people."""
        plain = self.plain_seconds
        instead = "no plan fits" if plain is None else f"it takes {format_seconds(plain)}"
        return f"the step takes {format_seconds(self.seconds)} with it (expected); with values as they are {instead}"


def worthwhile(program: Program, compression: Compression) -> list[KeptValue]:
    """The values of a program that may be compressed and become smaller, the largest first."""
    everything = list(kept_values(program, compression.bits))
    found = [
        value
        for value in waiting(program, everything)
        if not value.obstacle and value.bytes >= _LEAST and compression.bytes(value) < value.bytes
    ]
    return sorted(found, key=lambda value: -value.bytes)


def values_of(program: Program, compression: Compression, names: Sequence[str]) -> list[KeptValue]:
    """The values that an action means, in a program of the same capture."""
    return [value for value in worthwhile(program, compression) if value.node.name in names]


def choose_values(program: Program, compression: Compression, seconds_of: Callable[[Program], float]) -> CompressAction:
    """How many values to compress, so that the step is the fastest within its budget.

    Args:
        program: is only read.
        compression: how values are stored.
        seconds_of: how long a rewritten program takes within the budget.

    Raises:
        BudgetError: where none of them fits, the one with the smallest peak.
    """
    values = worthwhile(program, compression)
    total = sum(value.bytes for value in values)
    found: dict[tuple[str, ...], float] = {}
    failed: list[BudgetError] = []
    for chosen in dict.fromkeys(_largest(values, share * total) for share in _SHARES):
        trial = program.copy()
        if chosen:
            compression.apply(trial, values_of(trial, compression, chosen))
        try:
            found[chosen] = seconds_of(trial)
        except BudgetError as error:
            failed.append(error)
    if not found:
        raise min(failed, key=lambda error: error.smallest_bytes)
    best = min(found, key=found.__getitem__)
    return CompressAction(best, found[best], found.get(()))


def _largest(values: Sequence[KeptValue], least: float) -> tuple[str, ...]:
    """As many of the first as have so many bytes together."""
    names: list[str] = []
    count = 0
    for value in values:
        if count >= least:
            break
        names.append(value.node.name)
        count += value.bytes
    return tuple(names)
