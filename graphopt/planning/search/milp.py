"""Optimal plans of small problems, by mixed-integer linear programming.

The formulation is that of Checkmate (Jain et al., MLSys 2020, arXiv 1910.02653): between two first runs, what ran
before may be recomputed. In place of Checkmate's products of variables there is one variable for every value and every
place that touches it, "alive until there", which follows from the runs; so only runs have to be integers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from graphopt.planning.problem import Plan, Problem, simulate

if TYPE_CHECKING:
    from scipy.sparse import csr_array

__all__ = ["optimum", "smallest_peak"]

Array = npt.NDArray[Any]

_FINEST = 1e-6
"""The smallest part of the largest value that the solver can tell apart: its tolerance."""


def optimum(problem: Problem, budget: int, *, time_limit: float = 60.0, sweeps: int = 1) -> Plan | None:
    """The plan that runs for the fewest seconds among those whose peak is at most a budget.

    Plans keep the order of first runs. Between two first runs, what is made again runs in the program's order, each
    operation at most ``sweeps`` times; with more sweeps other orders are possible as well, such as one branch after the
    other, which now and then takes a little less memory, and solving takes several times as long.

    That results may take the place of what they overwrite is left out: where operations do (``overwrites``), plans may
    take less than is counted here, and one that just fits may be missed.

    Problems of 25 operations take well under a second as a rule, those of 50 some seconds; 60 are too many.

    Args:
        problem: what to plan.
        budget: bytes, resident bytes included. Where sizes differ by more than a factor of a million, plans within one
            millionth of the largest size below the budget may be missed.
        time_limit: seconds.
        sweeps: how often everything may be recomputed between two first runs; at least 1.

    Returns:
        The plan, or None where no plan has such a peak.

    Raises:
        TimeoutError: where nothing is proved within the time limit.
    """
    model = _Model(problem, sweeps)
    limit = budget
    while True:
        plan = model.solve(limit, time_limit)
        if plan is None:
            return None
        excess = simulate(problem, plan).peak - budget
        if excess <= 0:
            return plan
        limit -= excess


def smallest_peak(problem: Problem, *, time_limit: float = 60.0, sweeps: int = 1) -> int:
    """The fewest bytes that any plan takes at its peak, resident bytes included; see ``optimum`` for which plans.

    Raises:
        TimeoutError: where nothing is proved within the time limit.
    """
    plan = _Model(problem, sweeps).solve(None, time_limit)
    assert plan is not None, "the unmodified program fits into some number of bytes"
    return simulate(problem, plan).peak


@dataclass(frozen=True, slots=True)
class _Slot:
    """A place where an operation runs for the first time, or may be recomputed."""

    operation: int
    again: bool


def _slots(problem: Problem, sweeps: int) -> list[_Slot]:
    """All places where something may run, in order, without those that nothing could use the result of."""
    operations = problem.operations
    repeatable = [problem.may_repeat(index) for index in range(len(operations))]
    found: list[_Slot] = []
    for stage in range(len(operations)):
        useful = _useful(problem, repeatable, stage)
        again = [
            _Slot(index, again=True)
            for index in range(stage)
            if repeatable[index] and not useful.isdisjoint(operations[index].made_again)
        ]
        found += again * sweeps
        found.append(_Slot(stage, again=False))
    return found


def _useful(problem: Problem, repeatable: list[bool], stage: int) -> set[int]:
    """The values made before an operation that it or a later one reads, and those that they can be made from again."""
    operations, makers = problem.operations, problem.makers
    found: set[int] = set()
    pending = [v for operation in operations[stage:] for v in operation.reads if makers[v] < stage]
    while pending:
        value = pending.pop()
        if value not in found:
            found.add(value)
            if repeatable[makers[value]]:
                pending += operations[makers[value]].reads
    return found


def _unit(problem: Problem) -> float:
    """The bytes to count in: the largest that divides everything, or a millionth of the largest value."""
    extras = [count for operation in problem.operations for count in (operation.scratch, operation.memo)]
    counts = [count for count in (*problem.sizes, *extras) if count]
    return max(math.gcd(*counts), max(counts) * _FINEST) if counts else 1.0


class _Model:
    """The integer program without its budget: columns are variables between 0 and 1, rows are constraints.

    Slots are numbered in order; ``run[p]`` is 1 where the operation of slot p runs, and always for first runs. A value
    of ``size`` bytes is made by a first run, and touched by later slots p1 < p2 < … that read it or may make it again:

    * ``kept[i]`` is 1 where it stays in memory from p(i-1) to p(i), so that ``kept[i] <= alive[i-1]``, with
      ``alive[0] = 1`` behind its first run. Where it is held until a slot, ``kept[i] = 1`` up to there.
    * ``alive[i]`` is 1 where it is in memory while p(i) runs: ``alive[i] = kept[i]`` where p(i) reads it, and
      ``alive[i] <= kept[i] + run[p(i)]`` where p(i) makes it.
    * Whoever touches it needs it: ``run[p(i)] <= alive[i]``.
    * It counts ``size * kept[i]`` in each slot between p(i-1) and p(i), and ``size * alive[i]`` in p(i).

    In each slot the bytes of all values together are at most the budget, and the seconds of recomputation are the
    fewest. Only ``run`` has to be whole: the smallest ``kept`` and ``alive`` are, then.

    ``alive`` has, for each slot, the variables that stand for bytes which are there while it runs, with their sizes in
    units; ``fixed`` has the bytes that are there in any case.
    """

    def __init__(self, problem: Problem, sweeps: int) -> None:
        self.problem = problem
        self.unit = _unit(problem)
        self.slots = _slots(problem, sweeps)
        self._costs: list[float] = []
        self._lower: list[float] = []
        self._integer: list[bool] = []
        self._entries: list[tuple[int, int, float]] = []
        self._high: list[float] = []
        self.alive: list[dict[int, float]] = [{} for _ in self.slots]
        self.fixed = [problem.resident] * len(self.slots)
        self._first = {slot.operation: place for place, slot in enumerate(self.slots) if not slot.again}
        self._runs = [self._run(slot) for slot in self.slots]
        for value in range(len(problem.sizes)):
            self._live(value)
        for index in range(len(problem.operations)):
            self._extras(index)

    def _run(self, slot: _Slot) -> int | None:
        """The variable that says whether the operation of a slot runs; None for a first run, which always does."""
        return self._variable(self.problem.operations[slot.operation].seconds, integer=True) if slot.again else None

    def _variable(self, cost: float = 0.0, *, integer: bool = False, lower: float = 0.0) -> int:
        self._costs.append(cost)
        self._lower.append(lower)
        self._integer.append(integer)
        return len(self._costs) - 1

    def _at_most(self, high: float, entries: dict[int, float]) -> None:
        """A row: the sum of variables times numbers is at most ``high``."""
        row = len(self._high)
        self._entries += [(row, column, entry) for column, entry in entries.items()]
        self._high.append(high)

    def _where_run(self, column: int, place: int) -> None:
        """A variable is 1 where the operation of a slot runs."""
        run = self._runs[place]
        if run is None:
            self._lower[column] = 1.0
        else:
            self._at_most(0.0, {run: 1.0, column: -1.0})

    def _live(self, value: int) -> None:
        """The variables and rows of a value, as the class states them."""
        size = self.problem.sizes[value] / self.unit
        made = self._first[self.problem.makers[value]]
        self.fixed[made] += self.problem.sizes[value]
        end = self._held_until(value)
        alive: int | None = None  # that of the slot before; none behind the first run, where it is 1
        since = made + 1
        for place in range(since, len(self.slots)):
            operation = self.problem.operations[self.slots[place].operation]
            again = self._runs[place] if value in operation.made_again else None
            touched = again is not None or value in operation.reads
            if not touched and place != end:
                continue
            kept = self._variable(lower=1.0 if place <= end else 0.0)
            self._follow(kept, alive)
            alive = kept if again is None else self._made_or_kept(kept, again)
            if touched:
                self._where_run(alive, place)
            for between in range(since, place):
                self.alive[between][kept] = size
            self.alive[place][alive] = size
            since = place + 1

    def _held_until(self, value: int) -> int:
        """The slot that a value is held for; -1 where it is not held."""
        until = self.problem.held.get(value)
        return -1 if until is None else self._first.get(until, len(self.slots) - 1)

    def _follow(self, kept: int, previous: int | None) -> None:
        """A value can be kept up to a slot only where it was alive at the slot before."""
        if previous is not None:
            self._at_most(0.0, {kept: 1.0, previous: -1.0})

    def _made_or_kept(self, kept: int, run: int) -> int:
        """A variable that can be 1 only where a value is kept, or its maker runs."""
        alive = self._variable()
        self._at_most(0.0, {alive: 1.0, kept: -1.0, run: -1.0})
        return alive

    def _extras(self, index: int) -> None:
        """Scratch, and what the first run leaves behind until the last one."""
        operation = self.problem.operations[index]
        since = self._first[index]
        self.fixed[since] += operation.scratch
        previous: int | None = None
        for place, (slot, run) in enumerate(zip(self.slots, self._runs, strict=True)):
            if run is None or slot.operation != index:
                continue
            self.alive[place][run] = (operation.scratch + operation.memo) / self.unit
            if operation.memo:
                kept = self._variable()
                self._follow(kept, previous)
                self._where_run(kept, place)
                for covered in range(since, place + 1):
                    self.alive[covered][kept] = operation.memo / self.unit
                previous, since = kept, place + 1

    def solve(self, budget: int | None, time_limit: float) -> Plan | None:
        """The fastest plan within a budget, None where there is none; or, without one, a plan with the lowest peak."""
        from scipy.optimize import milp  # half a second, for those who search

        if not self._costs:
            fits = budget is None or max(self.fixed, default=0) <= budget
            return self._plan(()) if fits else None
        matrix, high = self._constraints(budget or 0)
        costs, upper = np.array([*self._costs, 0.0]), np.ones(len(self._costs) + 1)
        if budget is None:
            costs[:-1], costs[-1], upper[-1] = 0.0, 1.0, np.inf
        else:
            upper[-1] = 0.0
        result = milp(
            costs,
            integrality=np.array([*self._integer, False], dtype=np.int64),
            bounds=(np.array([*self._lower, 0.0]), upper),
            constraints=(matrix, -np.inf, high),
            options={"time_limit": time_limit, "mip_rel_gap": 0.0},
        )
        if result.status == 2:
            return None
        if result.status != 0:
            raise TimeoutError(
                f"no proof within {time_limit} s for {len(self.problem.operations)} operations ({result.message}); "
                "give more time, or use plan(), which needs no proof"
            )
        return self._plan(result.x)

    def _constraints(self, budget: int) -> tuple[csr_array, Array]:
        """All rows with their upper bounds; the last column is the peak beyond the budget, in units."""
        from scipy.sparse import coo_array

        excess = len(self._costs)
        entries, high = list(self._entries), list(self._high)
        for alive, fixed in zip(self.alive, self.fixed, strict=True):
            row = {**alive, excess: -1.0}
            entries += [(len(high), column, size) for column, size in row.items()]
            high.append((budget - fixed) / self.unit)
        rows, columns, numbers = zip(*entries, strict=True)
        matrix = coo_array((numbers, (rows, columns)), shape=(len(high), excess + 1)).tocsr()
        return matrix, np.array(high)

    def _plan(self, solution: Sequence[float]) -> Plan:
        """The slots whose operations run: for the first time, or as a solution says."""
        chosen = zip(self.slots, self._runs, strict=True)
        return Plan(tuple(slot.operation for slot, run in chosen if run is None or solution[run] > 0.5))
