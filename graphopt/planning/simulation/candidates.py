"""Decisions, and what the plans that follow from them take: what searches compare, thousands of times.

A candidate that differs in little from decisions whose run is known costs what differs: its runs are derived (see
``step_trace``), and so are its bytes (``edited_bytes``) and its seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from graphopt.planning.simulation.edited_bytes import EditedBytes, RunTables
from graphopt.planning.simulation.step_bytes import ArrayBytes
from graphopt.planning.simulation.step_trace import Derived, StepTrace
from graphopt.planning.simulation.stops import Drops

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]

__all__ = ["Candidate", "ExactSeconds", "NearCandidates", "repeated_in_front"]

_MANY, _MUCH = 20, 50
"""From so many changed runs on, and one more for so many runs of the plan, the bytes of all are found anew."""


class Candidate:
    """Decisions, and what the plan that follows from them takes: what searches judge by.

    Attributes:
        drops: the decisions.
        bytes: alive at each step; a list for small problems.
        peak: the most of them.
        again: seconds of the steps that are recomputed.
    """

    __slots__ = ("_run", "again", "bytes", "drops", "peak")

    def __init__(
        self, drops: Drops, run: Sequence[int] | Derived, alive: list[int] | Integers, peak: int, again: float
    ) -> None:
        self.drops = drops
        self._run = run
        self.bytes = alive
        self.peak = peak
        self.again = again

    @property
    def steps(self) -> Sequence[int]:
        """The runs."""
        if isinstance(self._run, Derived):
            self._run = self._run.steps()
        return self._run

    @property
    def peak_place(self) -> int:
        """The first step at which the most bytes are alive."""
        return self.bytes.index(self.peak) if isinstance(self.bytes, list) else int(self.bytes.argmax())

    def above(self, target: int) -> int:
        """Bytes above a target, summed over the steps."""
        if isinstance(self.bytes, list):
            return sum([count - target for count in self.bytes if count > target])
        return int((np.maximum(self.bytes, target) - target).sum())

    def stops(self) -> Sequence[tuple[int, Sequence[int]]]:
        """The operations in front of which others are recomputed, in order, and these."""
        return self._run.again() if isinstance(self._run, Derived) else list(repeated_in_front(self._run))


def repeated_in_front(steps: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """The operations in front of which others are recomputed in a plan, and these."""
    upcoming = 0
    again: list[int] = []
    for step in steps:
        if step != upcoming:
            again.append(step)
            continue
        if again:
            yield upcoming, again
            again = []
        upcoming += 1


class ExactSeconds:
    """Sums of seconds without rounding, so that they do not depend on the order in which they are built."""

    def __init__(self, seconds: Sequence[float]) -> None:
        ratios = [float(each).as_integer_ratio() for each in seconds]
        self._unit = max((unit for _, unit in ratios), default=1)
        self.ticks = [count * (self._unit // unit) for count, unit in ratios]

    def of(self, ticks: int) -> float:
        """The seconds of a sum of ticks, rounded once."""
        return ticks / self._unit


class NearCandidates:
    """Candidates that differ in little from decisions whose run is known."""

    def __init__(self, trace: StepTrace, arrays: ArrayBytes, tables: RunTables, seconds: ExactSeconds) -> None:
        self.drops = trace.drops
        self.trace = trace
        self._arrays = arrays
        self._tables = tables
        self._seconds = seconds

    @cached_property
    def _bytes(self) -> EditedBytes:
        return EditedBytes(self._tables, self._arrays.lives(self.trace.steps))

    @cached_property
    def _ticks(self) -> int:
        return sum(self._seconds.ticks[step] for _, steps in self.trace.again() for step in steps)

    def candidate(self, drops: Drops) -> Candidate | None:
        """What follows from decisions; None where they differ in much."""
        derived = self.trace.derive(drops)
        if derived is None:
            return None
        known = self.trace.steps
        edits = [edit.trimmed(known) for edit in derived.edits]
        ticks, total, changed = self._seconds.ticks, self._ticks, 0
        for place, removed, steps in edits:
            total += sum([ticks[step] for step in steps])
            total -= sum([ticks[step] for step in known[place : place + removed]])
            changed += removed + len(steps)
        few = changed <= _MANY + len(known) // _MUCH
        alive = self._bytes.of(edits) if few else self._arrays.lives(derived.steps()).alive
        return Candidate(drops, derived, alive, int(alive.max()), self._seconds.of(total))
