"""From decisions to steps: values are dropped at given moments, and made again when something needs them."""

from __future__ import annotations

from collections.abc import Iterable

from graphopt.planning.problem import Plan, Problem, Simulated, repeated_seconds
from graphopt.planning.step_bytes import step_bytes
from graphopt.planning.step_trace import StepTrace
from graphopt.planning.stops import Decision, Drops, Stops

__all__ = ["Decision", "Drops", "Scheduler"]

_FEW = 150
"""Up to how many operations all runs are found anew: that is fast enough."""


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
        self._bytes = step_bytes(problem)
        self._stops = Stops(problem)
        self._near: StepTrace | None = None

    def _of_droppable(self, values: Iterable[int]) -> tuple[int, ...]:
        """Those of some values that can be dropped."""
        return tuple(value for value in values if self.droppable[value])

    def readers(self, value: int) -> list[int]:
        """The operations that read a value in the program as it is, in order."""
        return self._readers[value]

    def last_read(self, value: int) -> int:
        """The last operation that reads a value in the program as it is (its maker, where none does)."""
        return self._readers[value][-1] if self._readers[value] else self.makers[value]

    def stay_near(self, drops: Drops) -> None:
        """Derive plans from now on from that of these decisions, where they differ in little; for large problems."""
        if len(self.reads) > _FEW and (self._near is None or self._near.drops != drops):
            self._near = StepTrace(self._stops, drops)

    def steps(self, drops: Iterable[Decision]) -> list[int]:
        """The runs that follow from these drops; drops of what may not run again are left out."""
        if self._near is not None and isinstance(drops, frozenset):
            found = self._near.steps_of(drops)
            if found is not None:
                return found
        return self._stops.steps(drops)

    def evaluate(self, drops: Iterable[Decision]) -> Simulated:
        """Steps, bytes and seconds of these drops; the same as ``simulate`` gives for the steps."""
        steps = self.steps(drops)
        alive = self._bytes(steps)
        again = repeated_seconds(steps, self.seconds)
        return Simulated(
            Plan(tuple(steps)), alive, max(alive, default=self.problem.resident), self._base + again, again
        )
