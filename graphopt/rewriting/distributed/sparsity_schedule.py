"""The warm-up of sparse exchange: which sparsity at which step. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Rampup"]


@dataclass(frozen=True, slots=True)
class Rampup:
    """Dense exchange first, then each sparsity for an equal part of the warm-up, the last one from there on.

    Attributes:
        sparsity: shares of the elements that are not exchanged, ascending.
        begin: number of the first step with the first sparsity.
        steps: length of the warm-up.
    """

    sparsity: tuple[float, ...]
    begin: int
    steps: int

    def at(self, step: int) -> float | None:
        """The sparsity of a step, counted from 0; None before ``begin``."""
        if step < self.begin:
            return None
        index = (step - self.begin) * len(self.sparsity) // self.steps
        return self.sparsity[min(index, len(self.sparsity) - 1)]

    def starts(self) -> list[tuple[int, float]]:
        """When each sparsity that is used begins: step and sparsity."""
        found: list[tuple[int, float]] = []
        for index, sparsity in enumerate(self.sparsity):
            start = self.begin + -(-index * self.steps // len(self.sparsity))
            if self.at(start) == sparsity:
                found.append((start, sparsity))
        return found
