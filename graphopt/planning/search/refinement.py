"""Plans between two neighbours of a frontier, looked for when a budget between them asks for one."""

from __future__ import annotations

from itertools import pairwise

from graphopt.planning.frontier import Frontier, Point
from graphopt.planning.search.local_search import Explorer
from graphopt.planning.simulation.schedule import Drops, Scheduler

__all__ = ["Refinement"]

_SLACK = 0.005
"""The share of a budget below which nothing more is looked for between two plans."""

_CANDIDATES = 160
"""About how many plans are tried between two neighbours, at most."""


class Refinement:
    """Finds plans between neighbours of a frontier that is left as it is.

    What is found depends on the two neighbours, not on the budget, and is not faster than the one with more bytes: so a
    larger budget never gets a slower plan, whichever budgets were asked for before.
    """

    def __init__(self, scheduler: Scheduler, frontier: Frontier) -> None:
        self._scheduler = scheduler
        self._frontier = frontier
        self._found: dict[int, list[Point]] = {}

    def around(self, budget: int) -> list[Point]:
        """Plans between the one of the frontier for this budget and the next, in bytes; not all of them fit.

        Empty where there is no such pair, or the search for the frontier was cut short.
        """
        lower = self._frontier.within(budget)
        upper = next((point for point in self._frontier if point.peak > budget), None)
        if lower is None or upper is None or self._frontier.cut_short:
            return []
        if lower.peak not in self._found:
            self._found[lower.peak] = self._between(lower, upper)
        return self._found[lower.peak]

    def _between(self, lower: Point, upper: Point) -> list[Point]:
        """Cross the neighbours, then what is found with its neighbours, as long as there are gaps that are wide."""
        between = Frontier()
        for point in (lower, upper):
            between.offer(point.drops, self._scheduler.candidate(point.drops))
        explorer = Explorer(self._scheduler, between, least_again=upper.again)
        crossed = set[tuple[Drops, Drops]]()
        while explorer.work < _CANDIDATES * len(self._scheduler.reads):
            gaps = [
                (above.peak - below.peak, below, above)
                for below, above in pairwise(between)
                if above.peak - below.peak > _SLACK * above.peak and (below.drops, above.drops) not in crossed
            ]
            if not gaps:
                break
            _, below, above = max(gaps, key=lambda gap: gap[0])
            crossed.add((below.drops, above.drops))
            explorer.cross(below, above)
        return [point for point in between if point.drops not in (lower.drops, upper.drops)]
