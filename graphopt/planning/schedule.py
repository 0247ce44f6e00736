"""From decisions to steps: values are dropped at given moments, and made again when something needs them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from graphopt.planning.edited_bytes import EditedBytes, RunTables
from graphopt.planning.problem import Plan, Problem, Simulated, repeated_seconds
from graphopt.planning.step_bytes import ArrayBytes, ListBytes
from graphopt.planning.step_trace import Derived, StepTrace
from graphopt.planning.stops import Decision, Drops, Stops

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]

__all__ = ["Candidate", "Decision", "Drops", "Scheduler"]

_FEW = 60
"""Up to how many operations everything is found anew, with lists: that is fast enough."""

_MANY, _MUCH = 20, 50
"""From so many changed runs on, and one more for so many runs of the plan, the bytes of all are found anew."""


class Candidate:
    """Decisions, and what the plan that follows from them takes: what searches judge by.

    Attributes:
        drops: the decisions.
        bytes: alive at each step; a list for small problems.
        peak: the most of them.
        again: seconds of the steps that run again.
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
        """The operations in front of which others run again, in order, and these."""
        return self._run.again() if isinstance(self._run, Derived) else list(_stops(self._run))


def _stops(steps: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """The operations in front of which others run again in a plan, and these."""
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


class _Seconds:
    """Sums of seconds without rounding, so that they do not depend on the order in which they are built."""

    def __init__(self, seconds: Sequence[float]) -> None:
        ratios = [float(each).as_integer_ratio() for each in seconds]
        self._unit = max((unit for _, unit in ratios), default=1)
        self.ticks = [count * (self._unit // unit) for count, unit in ratios]

    def of(self, ticks: int) -> float:
        """The seconds of a sum of ticks, rounded once."""
        return ticks / self._unit


class _Near:
    """Candidates that differ in little from decisions whose run is known."""

    def __init__(self, trace: StepTrace, arrays: ArrayBytes, tables: RunTables, seconds: _Seconds) -> None:
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


class Scheduler:
    """Turns drops into steps and bytes, fast: the inner loop of every search.

    At each operation of the program, what it reads and is not there is made again first, from what is there. What was
    made again stays until its next drop, or its last use.

    Attributes:
        touches: what each operation reads, makes, and makes again, of the values that can be dropped.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.makers = problem.makers
        self.reads = [operation.reads for operation in problem.operations]
        self.makes = [operation.makes for operation in problem.operations]
        self.seconds = [operation.seconds for operation in problem.operations]
        self.scratch = [operation.scratch for operation in problem.operations]
        self.remakes = [operation.made_again for operation in problem.operations]
        self.droppable = problem.droppable()
        self.touches = tuple(
            [self._of_droppable(values) for values in of] for of in (self.reads, self.makes, self.remakes)
        )
        self._base = problem.seconds
        self._readers = problem.readers
        self._stops = Stops(problem)
        self._near: _Near | None = None
        self._bytes: ListBytes | ArrayBytes = ListBytes(problem) if len(self.reads) <= _FEW else ArrayBytes(problem)

    def _of_droppable(self, values: Iterable[int]) -> tuple[int, ...]:
        """Those of some values that can be dropped."""
        return tuple(value for value in values if self.droppable[value])

    @cached_property
    def _tables(self) -> RunTables:
        return RunTables(self.problem)

    @cached_property
    def _exact_seconds(self) -> _Seconds:
        return _Seconds(self.seconds)

    def readers(self, value: int) -> list[int]:
        """The operations that read a value in the program as it is, in order."""
        return self._readers[value]

    def last_read(self, value: int) -> int:
        """The last operation that reads a value in the program as it is (its maker, where none does)."""
        return self._readers[value][-1] if self._readers[value] else self.makers[value]

    def stay_near(self, drops: Drops) -> None:
        """Derive candidates from now on from the plan of these decisions, where they differ in little."""
        if isinstance(self._bytes, ArrayBytes) and (self._near is None or self._near.drops != drops):
            self._near = _Near(StepTrace(self._stops, drops), self._bytes, self._tables, self._exact_seconds)

    def candidate(self, drops: Drops) -> Candidate:
        """What follows from decisions, for searches: fast where they differ in little from those to stay near."""
        if self._near is not None:
            found = self._near.candidate(drops)
            if found is not None:
                return found
        simulated = self.evaluate(drops)
        return Candidate(drops, simulated.plan.steps, simulated.bytes, simulated.peak, simulated.again)

    def evaluate(self, drops: Iterable[Decision]) -> Simulated:
        """Steps, bytes and seconds of these drops; the same as ``simulate`` gives for the steps.

        Drops of what may not run again are left out.
        """
        steps = self._stops.steps(drops)
        alive = self._bytes(steps)
        again = repeated_seconds(steps, self.seconds)
        return Simulated(
            Plan(tuple(steps)), alive, max(alive, default=self.problem.resident), self._base + again, again
        )
