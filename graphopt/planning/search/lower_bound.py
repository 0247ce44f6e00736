"""What every plan within a budget recomputes at least: a bound from below, by linear and integer programming.

At a few moments of the program the bytes of what is alive are limited, and what is read later has to be alive or to be
made again. That values may be kept, and operations run, in part, and that nothing is asked between these moments, makes
it a relaxation of Checkmate's programme (Jain et al., MLSys 2020, arXiv 1910.02653): no plan runs less again. At the
two moments that ask for the most, values are also kept as a whole or not at all, by an integer program, which often
proves that a plan is the best one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from graphopt.planning.problem import Problem, Simulated

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["fewest_seconds_again", "quick_bound"]

_WORK = 12_000
_FEWEST, _MOST = 2, 32
"""At how many moments what is alive is looked at: so many operations in all, within these limits."""

_TOGETHER = 4
"""How many of the moments that ask for the most are looked at together."""

_WHOLE = 2
_NODES = 50
"""At how many of them values are kept as a whole, and at how many nodes the solver branches then, at most."""

_SOLVABLE = 400
"""Up to how many operations that is done."""

_SAFE = 1e-6
"""The share that is taken off what the solver says, for its tolerances."""

_INFEASIBLE = 2
"""What the solver calls a programme without a solution."""


def fewest_seconds_again(problem: Problem, plain: Simulated, budget: int) -> float:
    """Seconds that every plan whose peak is at most a budget recomputes, at least.

    Args:
        problem: that is planned.
        plain: the unmodified program, simulated.
        budget: bytes, resident ones included.

    Returns:
        the bound, 0.0 at least; ``inf`` where no plan has such a peak for sure.
    """
    most = min(_MOST, max(_FEWEST, _WORK // max(len(problem.operations), 1)))
    bounds = {moment: _Model(problem, [moment], budget).solve() for moment in _moments(plain.bytes, budget, most)}
    hardest = sorted(bounds, key=lambda moment: -bounds[moment])[:_TOGETHER]
    together = _Model(problem, sorted(hardest), budget).solve() if len(hardest) > 1 else 0.0
    found = max([together, *bounds.values(), 0.0])
    if hardest and found < float("inf") and len(problem.operations) <= _SOLVABLE:
        found = max(found, _Model(problem, sorted(hardest[:_WHOLE]), budget).solve(whole=True))
    return found


def quick_bound(problem: Problem, plain: Simulated, budget: int) -> float:
    """Such a bound from the moment alone at which the unmodified program takes the most.

    It is hardly lower than that of many moments, and takes milliseconds.

    Args:
        problem: that is planned.
        plain: the unmodified program, simulated.
        budget: bytes, resident ones included.
    """
    if plain.peak <= budget or not problem.operations:
        return 0.0
    return _Model(problem, [plain.bytes.index(plain.peak)], budget).solve()


def _moments(alive: Sequence[int], budget: int, most: int) -> list[int]:
    """Operations at which the unmodified program takes more than a budget, evenly apart, the peak's among them."""
    above = [place for place, count in enumerate(alive) if count > budget]
    if not above:
        return []
    spread = {above[(len(above) - 1) * number // (most - 1)] for number in range(most)}
    return sorted({*spread, alive.index(max(alive))})


class _Model:
    """The linear programme.

    Variables: for each moment and each value that is made before it and may be made again, how much of it is alive
    there (``alive``); for each operation, whether it is recomputed between a moment and the next one (``between``),
    whether it does so at or behind a moment (``behind``), and how often it is recomputed at all (``total``).
    """

    def __init__(self, problem: Problem, moments: Sequence[int], budget: int) -> None:
        self._problem, self._moments = problem, moments
        self._makers, self._readers = problem.makers, problem.readers
        self._droppable = problem.droppable()
        self._columns: dict[tuple[str, int, int], int] = {}
        self._rows: list[tuple[dict[int, float], float]] = []
        self._needed_here: set[int] = set()
        for number in range(len(moments)):
            self._limit(number, budget)
            self._made_again("behind", number, len(problem.operations))
            if number + 1 < len(moments):
                self._made_again("between", number, moments[number + 1])
                self._carried(number)
            self._counted(number)

    def _column(self, kind: str, number: int, index: int) -> int:
        return self._columns.setdefault((kind, number, index), len(self._columns))

    def _at_most(self, terms: dict[int, float], bound: float) -> None:
        self._rows.append((terms, bound))

    def _before(self, number: int) -> list[int]:
        """The values that are made before a moment and may be made again."""
        return [v for v, maker in enumerate(self._makers) if maker < self._moments[number] and self._droppable[v]]

    def _limit(self, number: int, budget: int) -> None:
        """What is alive at a moment fits into the budget, with what is there for sure."""
        problem, moment = self._problem, self._moments[number]
        here = problem.operations[moment]
        sure = problem.resident + here.scratch + (0 if here.overwrites else sum(problem.sizes[v] for v in here.makes))
        for value, maker in enumerate(self._makers):
            if maker < moment and not self._droppable[value] and self._is_needed(value, moment):
                sure += problem.sizes[value]
        self._at_most({self._column("alive", number, v): problem.sizes[v] for v in self._before(number)}, budget - sure)
        for value in here.reads:
            if self._droppable[value]:
                self._needed_here.add(self._column("alive", number, value))

    def _is_needed(self, value: int, moment: int) -> bool:
        """Whether a value that is made once is alive at a moment for sure."""
        readers = self._readers[value]
        return bool(readers and readers[-1] >= moment) or self._problem.held.get(value, -1) >= moment

    def _made_again(self, kind: str, number: int, end: int) -> None:
        """What first runs from a moment on read, and what is recomputed does, is alive at the moment or made again."""
        moment, operations = self._moments[number], self._problem.operations
        for value in {value for operation in operations[moment:end] for value in operation.reads}:
            if self._droppable[value] and self._makers[value] < moment:
                again = self._column(kind, number, self._makers[value])
                self._at_most({self._column("alive", number, value): -1.0, again: -1.0}, -1.0)
        for index in range(moment):
            if any(self._droppable[value] for value in operations[index].made_again):
                run = self._column(kind, number, index)
                for value in operations[index].reads:
                    if self._droppable[value]:
                        maker = self._column(kind, number, self._makers[value])
                        self._at_most({run: 1.0, self._column("alive", number, value): -1.0, maker: -1.0}, 0.0)

    def _carried(self, number: int) -> None:
        """What is alive at the next moment is so at this one, or made meanwhile."""
        for value in self._before(number):
            later, now = self._column("alive", number + 1, value), self._column("alive", number, value)
            self._at_most({later: 1.0, now: -1.0, self._column("between", number, self._makers[value]): -1.0}, 0.0)

    def _counted(self, number: int) -> None:
        """An operation runs at least as often as between earlier moments, and once more if it runs behind this one."""
        for index in range(self._moments[number]):
            if ("behind", number, index) in self._columns:
                terms = {self._column("behind", number, index): 1.0, self._column("total", 0, index): -1.0}
                for earlier in range(number):
                    if ("between", earlier, index) in self._columns:
                        terms[self._column("between", earlier, index)] = 1.0
                self._at_most(terms, 0.0)

    def solve(self, *, whole: bool = False) -> float:
        """The bound; see ``fewest_seconds_again``. What the solver cannot solve bounds nothing.

        Args:
            whole: what is alive at the moments is so as a whole or not at all.
        """
        from scipy.optimize import Bounds, LinearConstraint, milp  # half a second, for those who search
        from scipy.sparse import coo_array

        count = len(self._columns)
        if not count:
            return float("inf") if any(bound < 0 for _, bound in self._rows) else 0.0
        seconds, least, most_of_each = self._objective()
        rows = [row for row, (terms, _) in enumerate(self._rows) for _ in terms]
        entries = [entry for terms, _ in self._rows for entry in terms.items()]
        factors, columns = [factor for _, factor in entries], [column for column, _ in entries]
        matrix: Any = coo_array((factors, (rows, columns)), shape=(len(self._rows), count)).tocsr()
        most: Any = np.array([bound for _, bound in self._rows], dtype=float)
        scale = float(seconds.max()) or 1.0
        found = milp(
            seconds / scale,
            constraints=LinearConstraint(matrix, ub=most),
            bounds=Bounds(least, most_of_each),
            integrality=[int(whole and kind == "alive") for kind, _, _ in self._columns],
            options={"node_limit": _NODES},
        )
        if found.status == _INFEASIBLE:
            return float("inf")
        bound = found.mip_dual_bound if whole else found.fun
        return 0.0 if bound is None else max(0.0, float(bound) * scale * (1 - _SAFE))

    def _objective(self) -> tuple[NDArray[np.float64], Any, Any]:
        """The seconds that count for each variable, and what it is at least and at most."""
        operations, count = self._problem.operations, len(self._columns)
        seconds = np.zeros(count)
        most: Any = np.ones(count)
        least: Any = np.zeros(count)
        for (kind, _, index), column in self._columns.items():
            if kind == "total":
                seconds[column], most[column] = operations[index].seconds, np.inf
            elif kind != "alive" and not operations[index].repeatable:
                most[column] = 0.0
        least[list(self._needed_here)] = 1.0
        return seconds, least, most
