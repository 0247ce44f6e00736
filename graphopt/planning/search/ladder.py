"""Every method that finds plans for all budgets, one after the other: the most effort, and the best of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random

from graphopt.planning.frontier import Frontier, Point
from graphopt.planning.problem import Problem
from graphopt.planning.search.aiming import FIRST_PRICE, WIDEST
from graphopt.planning.search.chain import chain_plans
from graphopt.planning.search.cuts import CutNetwork, priced_cuts
from graphopt.planning.search.local_search import Explorer
from graphopt.planning.search.lowersets import lower_set_plans
from graphopt.planning.search.segments import square_root_segments
from graphopt.planning.simulation.edits import Roles, find_roles
from graphopt.planning.simulation.schedule import Drops, Scheduler

__all__ = ["NOTHING", "SMALL", "Ladder"]

NOTHING: Drops = frozenset()

SMALL = 60
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
"""The share of the work after which twice as many values are tried at each peak."""

_SHAKES = 50
"""How many decisions at random that found nothing, one after the other, end the search of a small problem."""


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
    if count <= SMALL:
        return Effort(targets=8, rounds=16, work=_WORK_SMALL, width=12, everywhere=True)
    if count >= _DEEP and roles.repeats >= _BLOCKS:
        steps = _WORK_DEEP * count
        return Effort(12, rounds=8, work=steps, width=4, everywhere=False, grouped=True, aimed=_AIMED_DEEP)
    alike = roles.repeats >= _BLOCKS
    work = max(_WORK_ALIKE if alike else _WORK, 2.4 * count**2)
    width = 12 if count < (_MANY_ALIKE if alike else _MANY) else 5
    return Effort(targets=12, rounds=20, work=int(work), width=width, everywhere=False)


class Ladder:
    """One search for plans at all budgets, in a frontier of its own.

    Args:
        scheduler: of the problem.
        late: whether the time is over.
        report: told the share of the work that is done, and what is found so far.
        most: steps that are simulated, at most; None for what the problem is worth.

    Attributes:
        frontier: what is found.
        effort: how much work the problem is worth.
        explorer: extends the frontier.
        highest: the peak of the unmodified program.
        network: the choice at the boundary.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        late: Callable[[], bool],
        report: Callable[[float, Frontier], None],
        most: int | None = None,
    ) -> None:
        self.problem = scheduler.problem
        self.scheduler = scheduler
        self.late = late
        self.frontier = Frontier()
        roles = find_roles(self.problem)
        effort = _effort(self.problem, roles)
        self.effort = effort if most is None else replace(effort, work=min(effort.work, most))
        self.explorer = Explorer(
            self.scheduler,
            self.frontier,
            width=self.effort.width,
            everywhere=self.effort.everywhere,
            roles=roles if self.effort.grouped else None,
        )
        self._report = report
        self._width, self._last = self.effort.width, 0
        self._crossed: set[tuple[Drops, Drops]] = set()
        plain = self.explorer.offer(NOTHING)
        self.highest = plain.peak
        self.network = CutNetwork(scheduler, self.problem.boundary or plain.peak_place)

    def report(self, share: float) -> None:
        """Report the share of the work that is done."""
        self._report(share, self.frontier)

    def climb(self) -> None:
        """Every method, with the whole effort."""
        self._cuts()
        self._descents()
        self._structured()
        self._explore()

    def _targets(self) -> list[int]:
        """Budgets, spread from the program's own peak down to the lowest one found so far."""
        highest, lowest, count = self.highest, self.frontier.lowest.peak, self.effort.targets
        return [highest - (highest - lowest) * (i + 1) // count for i in range(count)]

    def _cuts(self) -> None:
        """Cuts at two budgets in the middle, and then all over the range that these have opened up."""
        low, highest = max(self.problem.resident, 1), self.highest
        first = [low + (highest - low) * quarters // 4 for quarters in (1, 2)]
        if self._cuts_at(first) and self._cuts_at(self._targets()):
            self.report(0.3)

    def _cuts_at(self, goals: Iterable[int]) -> bool:
        """Offer cuts for some budgets; says whether there was time for all of them."""
        for goal in goals:
            for drops, simulated in priced_cuts(self.network, goal, start=FIRST_PRICE, rounds=self.effort.rounds):
                self.frontier.offer(drops, simulated)
            if self.late():
                return False
        return True

    def _structured(self) -> None:
        """Segments of about equal bytes, lower sets, and chains with nested repetition: what descents may miss."""
        starts: dict[Drops, int] = {}
        for method in self._methods():
            for drops in method:
                simulated = self.scheduler.evaluate(drops)
                self.frontier.offer(drops, simulated)
                starts[drops] = simulated.peak
            if self.late():
                return
        limit = self.explorer.work + self._share(0.2 * self.effort.aimed)
        for goal in reversed(self._targets()[-4:]):
            point = self._above(goal)
            if point is not None and not self.late():
                self.explorer.descend(point.drops, goal, limit)
        for drops in (*sorted(starts, key=starts.__getitem__)[:3], self.frontier.lowest.drops):
            self._push_from(drops, limit)
        self.report(0.65)

    def _methods(self) -> list[Iterable[Drops]]:
        """The methods that divide forward, with the budgets that they aim at."""
        low, highest, count = self.problem.resident, self.highest, len(self.problem.operations)
        tight, tighter, loose, looser = (low + (highest - low) * percent // 100 for percent in (15, 8, 25, 40))
        methods: list[Iterable[Drops]] = [square_root_segments(self.scheduler)]
        methods.append(chain_plans(self.scheduler, tight, tighter))
        if count <= _CHAINS:
            methods.append(chain_plans(self.scheduler, looser, loose))
        if count <= _LOWER_SETS:
            methods.append(lower_set_plans(self.scheduler, tight, objective="memory"))
        return methods

    def _descents(self) -> None:
        """Aim at budgets all over the range from the plan just above each, the lowest ones first."""
        limit = self._share(0.6 * self.effort.aimed)
        self.push()
        for goal in reversed(self._targets()):
            point = self._above(goal)
            if point is not None:
                self.explorer.descend(point.drops, goal, limit)
            if self.late():
                return
        self.report(0.6)

    def push(self) -> None:
        """Lower the lowest peak as far as it goes, from different starts."""
        limit = self._share(0.4 * self.effort.aimed)
        for start in (self.frontier.lowest.drops, NOTHING, self.network.drops(set(self.network.needed))):
            self._push_from(start, limit)

    def _push_from(self, drops: Drops, limit: int) -> None:
        step = 32
        while step <= 256 and self.explorer.work < limit and not self.late():
            lowest = self.frontier.lowest.peak
            reached = self.explorer.descend(drops, lowest - max(1, (self.highest - lowest) // step), limit)
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
            if self._width >= WIDEST * self.effort.width:
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
