"""Optimal plans of small problems, by mixed-integer linear programming.

The formulation follows Checkmate (Jain et al., MLSys 2020, arXiv 1910.02653): between two first runs anything that ran
before may run again. Checkmate's hazards with their products are replaced by one variable for each value and each run
that touches it, "alive until then", which the solver may leave fractional: only runs are integer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from graphopt.planning.problem import Plan, Problem, simulate

__all__ = ["OptimumUnknownError", "optimum", "smallest_peak"]


class OptimumUnknownError(RuntimeError):
    """The solver was stopped by its time limit before it had an answer that is proved."""


@dataclass(frozen=True, slots=True)
class _Slot:
    """A place where an operation may run: the first run of ``operation``, or one more run of it before that of another."""

    operation: int
    again: bool


def _repeatable(problem: Problem) -> list[bool]:
    return [
        operation.repeatable and not any(value in problem.held for value in operation.made_again)
        for operation in problem.operations
    ]


def _slots(problem: Problem, sweeps: int) -> list[_Slot]:
    """All places where something may run, in order; those where nothing could use the result are left out."""
    operations = problem.operations
    makers = problem.makers
    may = _repeatable(problem)
    found: list[_Slot] = []
    for stage, first in enumerate(operations):
        # what the rest of the program can use, directly or to run something again
        useful: set[int] = set()
        pending = [v for operation in operations[stage:] for v in operation.reads if makers[v] < stage]
        while pending:
            value = pending.pop()
            maker = makers[value]
            if value in useful:
                continue
            useful.add(value)
            if may[maker]:
                pending += operations[maker].reads
        again = [
            index for index in range(stage) if may[index] and any(v in useful for v in operations[index].made_again)
        ]
        found += [_Slot(index, True) for _ in range(sweeps) for index in again]
        found.append(_Slot(stage, False))
        del first
    return found


class _Model:
    """Rows and columns of the program."""

    def __init__(self, problem: Problem, sweeps: int, unit: int) -> None:
        self.problem = problem
        self.unit = unit
        self.slots = _slots(problem, sweeps)
        self.costs: list[float] = []
        self.lower: list[float] = []
        self.integer: list[int] = []
        self._rows: list[int] = []
        self._columns: list[int] = []
        self._entries: list[float] = []
        self._bounds: list[tuple[float, float]] = []
        self.runs = [
            self.variable(problem.operations[slot.operation].seconds, integer=True) if slot.again else -1
            for slot in self.slots
        ]
        self.alive: list[dict[int, float]] = [{} for _ in self.slots]
        self.fixed = [float(problem.resident)] * len(self.slots)
        self._first = {slot.operation: place for place, slot in enumerate(self.slots) if not slot.again}
        for value in range(len(problem.sizes)):
            self._value(value)
        for operation in range(len(problem.operations)):
            self._extras(operation)

    def variable(self, cost: float = 0.0, *, integer: bool = False, lower: float = 0.0) -> int:
        self.costs.append(cost)
        self.lower.append(lower)
        self.integer.append(int(integer))
        return len(self.costs) - 1

    def row(self, entries: dict[int, float], low: float, high: float) -> None:
        number = len(self._bounds)
        for column, entry in entries.items():
            self._rows.append(number)
            self._columns.append(column)
            self._entries.append(entry)
        self._bounds.append((low, high))

    def at_least_run(self, column: int, place: int) -> None:
        """A value is alive where something that touches it runs."""
        if self.runs[place] < 0:
            self.lower[column] = 1.0
        else:
            self.row({column: 1.0, self.runs[place]: -1.0}, 0.0, np.inf)

    def _value(self, value: int) -> None:
        problem = self.problem
        size = problem.sizes[value] / self.unit
        born = self._first[problem.makers[value]]
        until = problem.held.get(value)
        end = -1 if until is None else self._first.get(until, len(self.slots) - 1)
        self.fixed[born] += size * self.unit
        previous: int | None = None  # the variable that says whether it was alive at the event before; None: it was
        waiting = born + 1  # the first slot that the next event's variable covers
        for place in range(born + 1, len(self.slots)):
            slot = self.slots[place]
            operation = problem.operations[slot.operation]
            reads = value in operation.reads
            makes = slot.again and value in operation.made_again
            if not (reads or makes or place == end):
                continue
            kept = self.variable(lower=1.0 if place <= end else 0.0)
            if previous is not None:
                self.row({kept: 1.0, previous: -1.0}, -np.inf, 0.0)
            for covered in range(waiting, place):
                self.alive[covered][kept] = size
            if makes:
                # alive after the run, because it ran or because it was kept
                after = self.variable()
                self.row({after: 1.0, kept: -1.0, self.runs[place]: -1.0}, -np.inf, 0.0)
                self.at_least_run(after, place)
                self.alive[place][after] = size
                previous = after
            else:
                if reads:
                    self.at_least_run(kept, place)
                self.alive[place][kept] = size
                previous = kept
            waiting = place + 1

    def _extras(self, index: int) -> None:
        """Scratch, and what the first run leaves behind for later ones."""
        operation = self.problem.operations[index]
        born = self._first[index]
        self.fixed[born] += operation.scratch
        again = [place for place, slot in enumerate(self.slots) if slot.again and slot.operation == index]
        for place in again:
            if operation.scratch + operation.memo:
                self.alive[place][self.runs[place]] = (operation.scratch + operation.memo) / self.unit
        if not operation.memo:
            return
        previous, start = None, born
        for place in again:
            kept = self.variable()
            if previous is not None:
                self.row({kept: 1.0, previous: -1.0}, -np.inf, 0.0)
            self.at_least_run(kept, place)
            for covered in range(start, place + 1):
                self.alive[covered][kept] = operation.memo / self.unit
            previous, start = kept, place + 1

    def solve(self, budget: int | None, time_limit: float) -> Plan | None:
        """The best plan within a budget; with None, one with the lowest peak."""
        peak = -1 if budget is not None else self.variable()
        if budget is None:
            self.costs = [0.0] * peak + [1.0]
        for place, entries in enumerate(self.alive):
            room = (0 if budget is None else budget) - self.fixed[place]
            if budget is None:
                entries = {**entries, peak: -1.0}
            elif not entries:
                if room < 0:
                    return None
                continue
            self.row(entries, -np.inf, room / self.unit)
        matrix = coo_array(
            (self._entries, (self._rows, self._columns)), shape=(len(self._bounds), len(self.costs))
        ).tocsr()
        lows, highs = np.array(self._bounds).T
        upper = np.ones(len(self.costs))
        if budget is None:
            upper[peak] = np.inf
        result = milp(
            np.array(self.costs),
            integrality=np.array(self.integer),
            bounds=Bounds(np.array(self.lower), upper),
            constraints=LinearConstraint(matrix, lows, highs),
            options={"time_limit": time_limit, "mip_rel_gap": 0.0},
        )
        if result.status == 2:
            return None
        if result.status != 0:
            raise OptimumUnknownError(f"stopped after {time_limit} s: {result.message}")
        chosen = result.x > 0.5
        return Plan(
            tuple(slot.operation for slot, run in zip(self.slots, self.runs, strict=True) if run < 0 or chosen[run])
        )


def optimum(problem: Problem, budget: int, *, time_limit: float = 60.0, sweeps: int = 1) -> Plan | None:
    model = _Model(problem, sweeps, 1)
    return model.solve(budget, time_limit)


def smallest_peak(problem: Problem, *, time_limit: float = 60.0, sweeps: int = 1) -> Plan:
    plan = _Model(problem, sweeps, 1).solve(None, time_limit)
    assert plan is not None
    return plan
