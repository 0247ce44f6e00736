"""Plans for one budget: descents to it from all over, and exploration of what lies around it.

A bound from below by one linear programme says when no plan can be much faster, which mostly is after a few descents.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice, pairwise

from graphopt.planning.frontier import Point
from graphopt.planning.problem import Simulated
from graphopt.planning.search.cuts import CutNetwork, priced_cuts
from graphopt.planning.search.local_search import Explorer
from graphopt.planning.search.lower_bound import quick_bound
from graphopt.planning.search.segments import square_root_segments
from graphopt.planning.simulation.schedule import Drops

__all__ = ["FIRST_PRICE", "WIDEST", "Aim"]

FIRST_PRICE = 10.0
"""The price that cuts begin with; see ``priced_cuts``."""

_CUTS = ((1.0, 12), (0.92, 8), (1.1, 6))
"""Shares of the budget that cuts are for, and how often prices are adapted to each."""

_DESCENTS = 6
"""From how many plans above the budget it is descended to, at most; each may take a tenth of the work."""

_AROUND = 6
"""How many plans on each side of the budget are explored and crossed."""

WIDEST = 4
"""How many times as many values as at first are tried at each peak, at most."""

_NEAR = 0.005
"""The share of the problem's seconds by which a plan may be slower than the bound, where the search ends."""


@dataclass
class Aim:
    """Looks for the fastest plan within a budget.

    Args:
        explorer: whose frontier is extended.
        network: the choice at the boundary.
        plain: the unmodified program, simulated.
        width: how many idle values are tried at a peak.
        late: whether the time is over.
    """

    explorer: Explorer
    network: CutNetwork
    plain: Simulated
    width: int
    late: Callable[[], bool]
    _crossed: set[tuple[Drops, Drops]] = field(default_factory=set)

    def at(self, budget: int, work: int) -> float:
        """Look for the fastest plan within a budget.

        Ends where it is within half a per cent of the problem's seconds of a proven bound, where nothing around the
        budget is left to try, or where ``work`` steps are simulated.

        Returns:
            the seconds by which it is slower than the bound; ``inf`` where none was found.
        """
        explorer = self.explorer
        problem = explorer.scheduler.problem
        least = quick_bound(problem, self.plain, budget)
        limit, above = explorer.work + work, math.inf
        for _ in self._stages(budget, limit):
            found = explorer.frontier.within(budget)
            above = math.inf if found is None else found.again - least
            if above <= _NEAR * problem.seconds or explorer.work >= limit or self.late():
                break
        return above

    def _stages(self, budget: int, limit: int) -> Iterator[None]:
        """The search in small pieces: cuts, descents, exploration."""
        explorer = self.explorer
        frontier, scheduler = explorer.frontier, explorer.scheduler
        for share, rounds in _CUTS:
            for drops, simulated in priced_cuts(self.network, int(budget * share), start=FIRST_PRICE, rounds=rounds):
                frontier.offer(drops, simulated)
            yield
        for drops in square_root_segments(scheduler):
            frontier.offer(drops, scheduler.evaluate(drops))
        above = [point.drops for point in frontier if point.peak > budget]
        some = [above[(len(above) - 1) * number // (_DESCENTS - 1)] for number in range(_DESCENTS)] if above else []
        tenth = (limit - explorer.work) // 10
        for drops in dict.fromkeys(some):
            explorer.descend(drops, budget, min(limit, explorer.work + tenth))
            yield
        width = self.width
        while True:
            crossed, explored = self._cross_around(budget), self._explore_around(budget, width)
            yield
            if not crossed and not explored:
                if width >= WIDEST * self.width:
                    return
                width *= 2

    def _around(self, budget: int) -> list[Point]:
        """The plans next to the budget, on both sides."""
        points = list(self.explorer.frontier)
        place = next((number for number, point in enumerate(points) if point.peak > budget), len(points))
        return points[max(0, place - _AROUND) : place + _AROUND]

    def _cross_around(self, budget: int) -> bool:
        """Cross the neighbours that are farthest apart, of those next to the budget; says whether some were left."""
        pairs = [pair for pair in pairwise(self._around(budget)) if (pair[0].drops, pair[1].drops) not in self._crossed]
        if not pairs:
            return False
        lower, upper = max(pairs, key=lambda pair: (pair[1].peak - pair[0].peak) * (pair[0].again - pair[1].again))
        self._crossed.add((lower.drops, upper.drops))
        self.explorer.cross(lower, upper)
        return True

    def _explore_around(self, budget: int, width: int) -> bool:
        """Explore the plan next to the budget that is not explored yet; says whether one was left."""
        around = self._around(budget)
        place = sum(point.peak <= budget for point in around)
        nearest = sorted(range(len(around)), key=lambda number: abs(number - place + 0.5))
        open_points = (around[number] for number in nearest if around[number].explored < width)
        for point in islice(open_points, 1):
            self.explorer.explore(point, width)
            return True
        return False
