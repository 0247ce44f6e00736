"""The planner: a search that fills a frontier, from which every budget takes its best plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cached_property

from graphopt.errors import GraphoptError, check_type, public, wrong_argument
from graphopt.planning.frontier import Frontier
from graphopt.planning.planner_arguments import check_budget_bytes, check_seconds
from graphopt.planning.problem import Problem, Simulated, simulate
from graphopt.planning.search.aiming import Aim
from graphopt.planning.search.ladder import NOTHING, SMALL, Ladder
from graphopt.planning.search.milp import optimum
from graphopt.planning.search.refinement import Refinement
from graphopt.planning.simulation.schedule import Scheduler

__all__ = ["InfeasibleError", "find_frontier", "plan"]

_EXACT = 30
_PROOF_SECONDS = 10.0
"""Up to how many operations ``plan`` asks the integer program too, and for how long."""

_AIMED = 1_600_000
_AIMED_EACH = 1_000
"""Steps that are simulated to find a plan for one budget, at most: so many, or so many for each operation."""

_FAR, _ALL, _ALL_EACH = 0.05, 600_000, 9_000
"""How far from the bound every method is tried too, as a share of the problem's seconds, and the steps simulated then:
so many, or so many for each operation.
"""

_RANGE, _SWEEP, _EACH = 6, 20, 300_000
"""At how many budgets a search for all of them aims at last, a thorough one too, and the steps simulated for each."""


class InfeasibleError(GraphoptError, ValueError):
    """No plan was found within a budget; ``smallest`` is the plan with the lowest peak that was found.

    Example:
        >>> planning.plan(problem, 1)
        Traceback (most recent call last):
            ...
        graphopt.planning.planner.InfeasibleError: ...
    """

    def __init__(self, budget: int, smallest: Simulated) -> None:
        super().__init__(f"no plan fits into {budget} bytes; the smallest one found takes {smallest.peak} bytes")
        self.budget = budget
        self.smallest = smallest


@public
def find_frontier(
    problem: Problem,
    *,
    budget: int | Sequence[int] | None = None,
    thorough: bool = True,
    time_limit: float | None = None,
    progress: Callable[[float, Frontier], None] | None = None,
    interruptible: bool = False,
) -> Frontier:
    """The trade between peak bytes and seconds.

    What is found without ``budget`` does not depend on one, so a larger budget never gets a slower plan.

    Args:
        problem: what to plan.
        budget: bytes, or several budgets; plans for them are looked for, and others are found by the way: in about a
            second for one, where all take many. Near the lowest peak there may be plans that only a search for all
            finds. A larger budget gets a slower plan only where a plan is not proved to be within half a per cent of
            ``problem.seconds`` of the best one.
        thorough: without a budget: aim at more of all budgets at last.
        time_limit: seconds after which no further work is begun; None works until the planned effort is spent.
        progress: called with the share of the work that is done and the frontier so far; an exception that it raises
            ends the search.
        interruptible: take an interruption from the keyboard as the end of the search, and return what it has found;
            otherwise it is raised, as it is before the unmodified program has been simulated.

    Returns:
        the frontier; its ``cut_short`` says whether the search was ended before its planned effort was spent.

    Raises:
        ArgumentError: for what is no problem, no number of bytes or of seconds, or no function.

    Example:
        >>> for point in planning.find_frontier(problem):
        ...     print(point.peak, "bytes,", point.again, "seconds recomputed")
        180 bytes, 1.0 seconds recomputed
        200 bytes, 0.0 seconds recomputed
    """
    check_type("find_frontier's problem", problem, Problem, "a planning.Problem")
    given = budget if isinstance(budget, (list, tuple)) else () if budget is None else (budget,)
    budgets = [check_budget_bytes("find_frontier's budget", each) for each in given]
    if time_limit is not None:
        check_seconds("find_frontier's time_limit", time_limit)
    if progress is not None and not callable(progress):
        raise wrong_argument("find_frontier's progress", progress, "a function, progress(share, frontier)")
    search = _Search(problem, time_limit, progress)
    try:
        search.run(budgets, thorough=thorough)
    except KeyboardInterrupt:
        if not interruptible or not len(search.frontier):
            raise
        search.frontier.cut_short = "interrupted"
    return search.frontier


class _Search:
    """One search for the frontier of a problem, as long as there is time."""

    def __init__(
        self, problem: Problem, time_limit: float | None, progress: Callable[[float, Frontier], None] | None
    ) -> None:
        self.problem = problem
        self.scheduler = Scheduler(problem)
        self._progress = progress
        self._deadline = None if time_limit is None else time.monotonic() + time_limit
        self._climbed = False
        self._near = self._ladder(None)
        self.frontier = self._near.frontier

    def _ladder(self, most: int | None) -> Ladder:
        return Ladder(self.scheduler, self.late, self._report, most)

    def late(self) -> bool:
        """Whether the time is over; the frontier then says that it was cut short."""
        if self._deadline is not None and time.monotonic() > self._deadline:
            self.frontier.cut_short = "time limit"
            return True
        return False

    def _report(self, share: float, frontier: Frontier) -> None:
        if self._progress is not None:
            self._progress(share, frontier)

    def run(self, budgets: Sequence[int], *, thorough: bool) -> None:
        """Fill the frontier: around some budgets, or without any all of it."""
        near = self._near
        droppable = self.scheduler.droppable
        tight = [budget for budget in budgets if budget < near.highest]
        if (budgets and not tight) or not any(droppable[value] for value in near.network.needed):
            return
        count = len(self.problem.operations)
        if count <= SMALL:
            near.climb()
        elif tight:
            for budget in tight:
                self._aim_at(budget, max(_AIMED, _AIMED_EACH * count))
                if self.late():
                    break
        else:
            near.climb()
            self._aim_all_over(_SWEEP if thorough else _RANGE)
        near.report(1.0)

    @cached_property
    def _aim(self) -> Aim:
        near = self._near
        return Aim(near.explorer, near.network, self.scheduler.evaluate(NOTHING), near.effort.width, self.late)

    def _aim_at(self, budget: int, work: int) -> None:
        """Aim at a budget; where what is found is far from the bound, after every method was tried."""
        if self._aim.at(budget, work) <= _FAR * self.problem.seconds or self._climbed or self.late():
            return
        self._climbed = True  # which looks for plans for all budgets
        most = max(_ALL, _ALL_EACH * len(self.problem.operations))
        other = self._ladder(most)  # as if nothing had been found, so that it is not worse for that
        try:
            other.climb()
        finally:
            for point in other.frontier:
                self.frontier.offer(point.drops, point)
        self._aim.at(budget, work)

    def _aim_all_over(self, count: int) -> None:
        """Aim at budgets that are evenly spread over the range, from many bytes to few."""
        highest, lowest = self._near.highest, self.frontier.lowest.peak
        for number in reversed(range(count)):
            if self.late():
                return
            self._aim.at(lowest + (highest - lowest) * number // count, _EACH)
            self._near.report(max(0.65, 1 - number / count))


@public
def plan(problem: Problem, budget: int, *, time_limit: float | None = None) -> Simulated:
    """The fastest plan found whose peak is at most ``budget`` bytes.

    For problems of at most 30 operations, none of which overwrites a value, that is an optimal one, by the integer
    program.

    Raises:
        ArgumentError: for what is no problem, and for a budget or a limit that is no such number.
        InfeasibleError: where none is found; it holds the plan with the lowest peak.

    Example:
        >>> fitted = planning.plan(problem, budget=200)
        >>> fitted.peak <= 200
        True
    """
    check_type("plan's problem", problem, Problem, "a planning.Problem")
    budget = check_budget_bytes("plan's budget", budget)
    if time_limit is not None:
        check_seconds("plan's time_limit", time_limit)
    scheduler = Scheduler(problem)
    plain = scheduler.evaluate(NOTHING)
    if plain.peak <= budget:
        return plain
    frontier = find_frontier(problem, budget=budget, time_limit=time_limit)
    if frontier.within(budget) is None and not frontier.cut_short:
        frontier = find_frontier(problem, time_limit=time_limit)
    point = min(
        (point for point in (*frontier, *Refinement(scheduler, frontier).around(budget)) if point.peak <= budget),
        key=lambda point: point.again,
        default=None,
    )
    found = None if point is None else scheduler.evaluate(point.drops)
    exact = _optimal(problem, budget, time_limit)
    if exact is not None and (found is None or exact.seconds < found.seconds):
        return exact
    if found is None:
        raise InfeasibleError(budget, scheduler.evaluate(frontier.lowest.drops))
    return found


def _optimal(problem: Problem, budget: int, time_limit: float | None) -> Simulated | None:
    """An optimal plan of a small problem; None where there is none, or nothing was proved in time."""
    if len(problem.operations) > _EXACT:
        return None
    try:
        found = optimum(problem, budget, time_limit=min(time_limit or _PROOF_SECONDS, _PROOF_SECONDS))
    except TimeoutError:
        return None
    return None if found is None else simulate(problem, found)
