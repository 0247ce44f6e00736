"""From decisions to steps: values are dropped at given moments, and made again when something needs them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from graphopt.planning.problem import Plan, Problem, Simulated, repeated_seconds
from graphopt.planning.simulation.candidates import Candidate, ExactSeconds, NearCandidates
from graphopt.planning.simulation.edited_bytes import RunTables
from graphopt.planning.simulation.step_bytes import ArrayBytes, ListBytes
from graphopt.planning.simulation.step_trace import StepTrace
from graphopt.planning.simulation.stops import Decision, Drops, Stops

__all__ = ["Decision", "Drops", "Scheduler"]

_FEW = 60
"""Up to how many operations everything is found anew, with lists: that is fast enough."""


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
        self._near: NearCandidates | None = None
        self._bytes: ListBytes | ArrayBytes = ListBytes(problem) if len(self.reads) <= _FEW else ArrayBytes(problem)

    def _of_droppable(self, values: Iterable[int]) -> tuple[int, ...]:
        """Those of some values that can be dropped."""
        return tuple(value for value in values if self.droppable[value])

    @cached_property
    def _tables(self) -> RunTables:
        return RunTables(self.problem)

    @cached_property
    def _exact_seconds(self) -> ExactSeconds:
        return ExactSeconds(self.seconds)

    def readers(self, value: int) -> list[int]:
        """The operations that read a value in the unmodified program, in order."""
        return self._readers[value]

    def last_read(self, value: int) -> int:
        """The last operation that reads a value in the unmodified program (its maker, where none does)."""
        return self._readers[value][-1] if self._readers[value] else self.makers[value]

    def stay_near(self, drops: Drops) -> None:
        """Derive candidates from now on from the plan of these decisions, where they differ in little."""
        if isinstance(self._bytes, ArrayBytes) and (self._near is None or self._near.drops != drops):
            self._near = NearCandidates(StepTrace(self._stops, drops), self._bytes, self._tables, self._exact_seconds)

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

        Drops of what may not be recomputed are left out.
        """
        steps = self._stops.steps(drops)
        alive = self._bytes(steps)
        again = repeated_seconds(steps, self.seconds)
        return Simulated(
            Plan(tuple(steps)), alive, max(alive, default=self.problem.resident), self._base + again, again
        )
