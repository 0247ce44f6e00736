"""The planner: a ladder of methods that fill one frontier, from which every budget takes its best plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from graphopt.errors import GraphoptError, check_type, public, wrong_argument
from graphopt.planning.chain import chain_plans
from graphopt.planning.cuts import CutNetwork, priced_cuts
from graphopt.planning.frontier import Frontier, Point
from graphopt.planning.local_search import Explorer
from graphopt.planning.lowersets import lower_set_plans
from graphopt.planning.milp import optimum
from graphopt.planning.planner_arguments import check_budget_bytes, check_seconds
from graphopt.planning.problem import Problem, Simulated, simulate
from graphopt.planning.refinement import Refinement
from graphopt.planning.repeats import Roles, find_roles
from graphopt.planning.schedule import Drops, Scheduler
from graphopt.planning.segments import square_root_segments

__all__ = ["InfeasibleError", "find_frontier", "plan"]

NOTHING: Drops = frozenset()

_EXACT = 30
_PROOF_SECONDS = 10.0
"""Up to how many operations ``plan`` asks the integer program too, and for how long."""

_SMALL = 60
_WORK_SMALL, _WORK, _WORK_ALIKE = 300_000, 8_500_000, 1_800_000
"""Steps that are simulated for problems of up to 60 operations, of 61 to 2,000, and for those of identical blocks."""

_DEEP = 400
_BLOCKS = 4
_WORK_DEEP = 4_000
_AIMED_DEEP = 0.8
"""From how many operations, and how many identical blocks, on blocks are decided about together.

Then so many steps are simulated for each operation, and less of that is for aiming at budgets.
"""

_MANY_ALIKE, _MANY = 400, 1500
"""From how many operations on fewer values are tried at each peak: with identical blocks, and without."""

_CHAINS, _LOWER_SETS = 400, 120
"""Up to how many operations chains are planned for larger budgets too, and lower sets are compared.

For larger problems these take longer than their plans are worth.
"""

_NARROW = 0.8
_WIDEST = 4
"""The share of the work after which twice as many values are tried at each peak, and how many times as many at most."""

_SHAKES = 50
"""How many decisions at random that found nothing, one after the other, end the search of a small problem."""

_FIRST_PRICE = 10.0
"""The price that cuts begin with; see ``priced_cuts``."""


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


@dataclass(frozen=True, slots=True)
class Effort:
    """How much work the planner does; counts, not seconds, so that plans do not depend on the machine's load.

    Attributes:
        targets: budgets, spread from the lowest peak to the program's, that cuts and descents aim at.
        rounds: price adaptations for each.
        work: steps simulated in all.
        width: how many idle values are tried at a peak.
        everywhere: whether exploration tries to drop what is idle anywhere.
        grouped: whether identical blocks are decided about together.
        aimed: of the part of the work that may be for aiming at budgets, how much is; the rest explores and crosses.
    """

    targets: int
    rounds: int
    work: int
    width: int
    everywhere: bool
    grouped: bool = False
    aimed: float = 1.0


def _effort(problem: Problem, roles: Roles) -> Effort:
    """How much work a problem is worth, by its size."""
    count = len(problem.operations)
    if count <= _SMALL:
        return Effort(targets=8, rounds=16, work=_WORK_SMALL, width=12, everywhere=True)
    if count >= _DEEP and roles.repeats >= _BLOCKS:
        steps = _WORK_DEEP * count
        return Effort(12, rounds=8, work=steps, width=4, everywhere=False, grouped=True, aimed=_AIMED_DEEP)
    alike = roles.repeats >= _BLOCKS
    work = max(_WORK_ALIKE if alike else _WORK, 2.4 * count**2)
    width = 12 if count < (_MANY_ALIKE if alike else _MANY) else 5
    return Effort(targets=12, rounds=20, work=int(work), width=width, everywhere=False)


@public
def find_frontier(
    problem: Problem,
    *,
    time_limit: float | None = None,
    progress: Callable[[float, Frontier], None] | None = None,
    interruptible: bool = False,
) -> Frontier:
    """The trade between peak bytes and seconds.

    What is found does not depend on any budget, so a larger budget never gets a slower plan.

    Args:
        problem: what to plan.
        time_limit: seconds after which no further work is begun; None works until the planned effort is spent.
        progress: called with the share of the work that is done and the frontier so far; an exception that it raises
            ends the search.
        interruptible: take an interruption from the keyboard as the end of the search, and return what it has found;
            otherwise it is raised, as it is before the program as it is has been simulated.

    Returns:
        the frontier; its ``cut_short`` says whether the search was ended before its planned effort was spent.

    Raises:
        ArgumentError: for what is no problem, no number of seconds or no function.

    Example:
        >>> for point in planning.find_frontier(problem):
        ...     print(point.peak, "bytes,", point.again, "seconds run again")
        180 bytes, 1.0 seconds run again
        200 bytes, 0.0 seconds run again
    """
    check_type("find_frontier's problem", problem, Problem, "a planning.Problem")
    if time_limit is not None:
        check_seconds("find_frontier's time_limit", time_limit)
    if progress is not None and not callable(progress):
        raise wrong_argument("find_frontier's progress", progress, "a function, progress(share, frontier)")
    search = _Search(problem, time_limit, progress)
    try:
        search.run()
    except KeyboardInterrupt:
        if not interruptible or not len(search.frontier):
            raise
        search.frontier.cut_short = "interrupted"
    return search.frontier


class _Search:
    """One search for the frontier of a problem: methods one after the other, as long as there is time."""

    def __init__(
        self, problem: Problem, time_limit: float | None, progress: Callable[[float, Frontier], None] | None
    ) -> None:
        self.problem = problem
        self.scheduler = Scheduler(problem)
        self.frontier = Frontier()
        roles = find_roles(problem)
        self.effort = _effort(problem, roles)
        self.explorer = Explorer(
            self.scheduler,
            self.frontier,
            width=self.effort.width,
            everywhere=self.effort.everywhere,
            roles=roles if self.effort.grouped else None,
        )
        self._deadline = None if time_limit is None else time.monotonic() + time_limit
        self._progress = progress
        self._width, self._last = self.effort.width, 0
        self._crossed: set[tuple[Drops, Drops]] = set()

    def late(self) -> bool:
        """Whether the time is over; the frontier then says that it was cut short."""
        if self._deadline is not None and time.monotonic() > self._deadline:
            self.frontier.cut_short = "time limit"
            return True
        return False

    def report(self, share: float) -> None:
        """Report the share of the work that is done."""
        if self._progress is not None:
            self._progress(share, self.frontier)

    def run(self) -> Frontier:
        """Fill the frontier."""
        plain = self.explorer.offer(NOTHING)
        boundary = self.problem.boundary or plain.peak_place
        network = CutNetwork(self.scheduler, boundary)
        if not any(self.scheduler.droppable[value] for value in network.needed):
            return self.frontier
        self._cuts(network, plain.peak)
        self._descents(network, plain.peak)
        self._structured(plain.peak)
        self._explore()
        self.report(1.0)
        return self.frontier

    def _targets(self, highest: int) -> list[int]:
        """Budgets, spread from the program's own peak down to the lowest one found so far."""
        lowest, count = self.frontier.lowest.peak, self.effort.targets
        return [highest - (highest - lowest) * (i + 1) // count for i in range(count)]

    def _cuts(self, network: CutNetwork, highest: int) -> None:
        """Cuts at two budgets in the middle, and then all over the range that these have opened up."""
        low = max(self.problem.resident, 1)
        first = [low + (highest - low) * quarters // 4 for quarters in (1, 2)]
        if self._cuts_at(network, first) and self._cuts_at(network, self._targets(highest)):
            self.report(0.3)

    def _cuts_at(self, network: CutNetwork, goals: Iterable[int]) -> bool:
        """Offer cuts for some budgets; says whether there was time for all of them."""
        for goal in goals:
            for drops, simulated in priced_cuts(network, goal, start=_FIRST_PRICE, rounds=self.effort.rounds):
                self.frontier.offer(drops, simulated)
            if self.late():
                return False
        return True

    def _structured(self, highest: int) -> None:
        """Segments of about equal bytes, lower sets, and chains with nested repetition: what descents may miss."""
        starts: dict[Drops, int] = {}
        for method in self._methods(highest):
            for drops in method:
                simulated = self.scheduler.evaluate(drops)
                self.frontier.offer(drops, simulated)
                starts[drops] = simulated.peak
            if self.late():
                return
        limit = self.explorer.work + self._share(0.2 * self.effort.aimed)
        for goal in reversed(self._targets(highest)[-4:]):
            point = self._above(goal)
            if point is not None and not self.late():
                self.explorer.descend(point.drops, goal, limit)
        for drops in (*sorted(starts, key=starts.__getitem__)[:3], self.frontier.lowest.drops):
            self._push_from(drops, highest, limit)
        self.report(0.65)

    def _methods(self, highest: int) -> list[Iterable[Drops]]:
        """The methods that divide forward, with the budgets that they aim at."""
        low, count = self.problem.resident, len(self.problem.operations)
        tight, tighter, loose, looser = (low + (highest - low) * percent // 100 for percent in (15, 8, 25, 40))
        methods: list[Iterable[Drops]] = [square_root_segments(self.scheduler)]
        methods.append(chain_plans(self.scheduler, tight, tighter))
        if count <= _CHAINS:
            methods.append(chain_plans(self.scheduler, looser, loose))
        if count <= _LOWER_SETS:
            methods.append(lower_set_plans(self.scheduler, tight, objective="memory"))
        return methods

    def _descents(self, network: CutNetwork, highest: int) -> None:
        """Aim at budgets all over the range from the plan just above each, the lowest ones first."""
        limit = self._share(0.6 * self.effort.aimed)
        self._push(network, highest)
        for goal in reversed(self._targets(highest)):
            point = self._above(goal)
            if point is not None:
                self.explorer.descend(point.drops, goal, limit)
            if self.late():
                return
        self.report(0.6)

    def _push(self, network: CutNetwork, highest: int) -> None:
        """Lower the lowest peak as far as it goes, from different starts."""
        limit = self._share(0.4 * self.effort.aimed)
        for start in (self.frontier.lowest.drops, NOTHING, network.drops(set(network.needed))):
            self._push_from(start, highest, limit)

    def _push_from(self, drops: Drops, highest: int, limit: int) -> None:
        step = 32
        while step <= 256 and self.explorer.work < limit and not self.late():
            lowest = self.frontier.lowest.peak
            reached = self.explorer.descend(drops, lowest - max(1, (highest - lowest) // step), limit)
            drops = self.frontier.lowest.drops
            if not reached:
                step *= 4

    def _share(self, share: float) -> int:
        return int(self.effort.work * share)

    def _above(self, goal: int) -> Point | None:
        """The point of the frontier just above a goal."""
        return next((point for point in self.frontier if point.peak > goal), None)

    def _explore(self) -> None:
        """Explore the frontier and cross its neighbours, with as much work for the one as for the other."""
        exploring = crossing = 0
        while self.explorer.work < self.effort.work and not self.late():
            before = self.explorer.work
            if crossing <= exploring and self._cross_next():
                crossing += self.explorer.work - before
            elif self._explore_next():
                exploring += self.explorer.work - before
            elif not self._cross_next():
                self._shake()
                return
            self.report(max(0.65, min(1.0, self.explorer.work / self.effort.work)))

    def _explore_next(self) -> bool:
        """Explore a point, in turn up the frontier and again from its lower end, and last more widely.

        Returns:
            whether one was left.
        """
        if self.explorer.work > self._share(_NARROW):
            self._width = max(self._width, 2 * self.effort.width)
        open_points = [point for point in self.frontier if point.explored < self._width]
        if not open_points:
            if self._width >= _WIDEST * self.effort.width:
                return False
            self._width *= 2
            return True
        point = next((point for point in open_points if point.peak > self._last), open_points[0])
        self._last = point.peak + (open_points[-1].peak - open_points[0].peak) // (2 * self.effort.targets)
        self.explorer.explore(point, self._width)
        return True

    def _cross_next(self) -> bool:
        """Cross the two neighbours that are farthest apart in bytes and seconds, of those that are not crossed yet.

        Returns:
            whether some were left.
        """
        best, widest = None, 0.0
        for lower, upper in pairwise(self.frontier):
            apart = (upper.peak - lower.peak) * (lower.again - upper.again)
            if apart > widest and (lower.drops, upper.drops) not in self._crossed:
                best, widest = (lower, upper), apart
        if best is None:
            return False
        self._crossed.add((best[0].drops, best[1].drops))
        self.explorer.cross(*best)
        return True

    def _shake(self) -> None:
        """With nothing left to explore: decisions at random, the same ones every time, while they find something."""
        chance, idle = Random(0), 0
        while self.effort.everywhere and idle < _SHAKES and self.explorer.work < self.effort.work and not self.late():
            self.explorer.shake(chance.choice(list(self.frontier)), chance)
            found = [point for point in self.frontier if not point.explored]
            idle = 0 if found else idle + 1
            for point in found:
                if self.explorer.work < self.effort.work:
                    self.explorer.explore(point)


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
    budget = check_budget_bytes(budget)
    if time_limit is not None:
        check_seconds("plan's time_limit", time_limit)
    scheduler = Scheduler(problem)
    plain = scheduler.evaluate(NOTHING)
    if plain.peak <= budget:
        return plain
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
