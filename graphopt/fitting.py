"""Fitting a program into a number of bytes: from a program to the planner's frontier, and from a plan to the program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import fx

from graphopt.analysis.liveness import MemoryTimeline
from graphopt.analysis.problem import PlanningProblem, planning_problem
from graphopt.planning import Simulated
from graphopt.planning.frontier import Frontier, Point
from graphopt.planning.planner import find_frontier
from graphopt.planning.schedule import Scheduler
from graphopt.program import Program
from graphopt.rerun import Again, Rerun, rerun

__all__ = ["Fitted", "Fitting"]


@dataclass(frozen=True, slots=True)
class Fitted:
    """A plan for a program.

    Attributes:
        simulated: what the planner expects of it.
        peak_bytes: the peak of the rewritten program, by its own memory timeline.
    """

    simulated: Simulated
    peak_bytes: int


class Fitting:
    """The trade between peak bytes and seconds for one program.

    Args:
        program: of stage joint or step; it is only read.
        memory: its timeline.
        seconds: of each call, in the order of ``memory.nodes``.
        time_limit: seconds after which the search begins no further work; None for no limit.
        progress: called with the share of the search that is done, and the frontier so far.
    """

    def __init__(
        self,
        program: Program,
        memory: MemoryTimeline,
        seconds: Sequence[float],
        *,
        time_limit: float | None = None,
        progress: Callable[[float, Frontier], None] | None = None,
    ) -> None:
        self.program = program
        self.memory = memory
        self.planning: PlanningProblem = planning_problem(program, memory, seconds)
        self.scheduler = Scheduler(self.planning.problem)
        self.frontier = find_frontier(self.planning.problem, time_limit=time_limit, progress=progress)

    @property
    def seconds(self) -> float:
        """How long the program's calls take, each run once."""
        return self.planning.problem.seconds

    def simulate(self, point: Point) -> Simulated:
        """The plan behind a point of the frontier."""
        return self.scheduler.evaluate(point.drops)

    def within(self, budget: int) -> Fitted | None:
        """The fastest plan whose rewritten program peaks at ``budget`` bytes or less; None where there is none.

        The rewritten program's own timeline decides: where it is above what the planner expected, the next lower plan
        is taken.
        """
        candidates = [point for point in self.frontier if point.peak <= budget]
        for point in sorted(candidates, key=lambda point: point.again):
            fitted = self.check(point)
            if fitted.peak_bytes <= budget:
                return fitted
        return None

    def check(self, point: Point) -> Fitted:
        """A plan with the peak of the program that comes of it."""
        simulated = self.simulate(point)
        copy = self.program.copy()
        self.apply(copy, simulated, origin="")
        copy.erase_dead()
        return Fitted(simulated, copy.memory().peak_bytes)

    def apply(self, program: Program, simulated: Simulated, *, origin: str) -> Rerun:
        """Rewrite a program (this one, or a copy of it) as a plan says."""
        named = {node.name: node for node in program.graph.nodes}
        nodes = [named[node.name] if node is not None else None for node in self.planning.nodes]
        runs: list[Again] = []
        waiting: list[fx.Node] = []
        upcoming = 0
        for step in simulated.plan.steps:
            node = nodes[step]
            if step != upcoming:
                assert node is not None
                waiting.append(node)
                continue
            upcoming += 1
            if node is not None:
                runs += [Again(again, node, origin) for again in waiting]
                waiting.clear()
        return rerun(program, runs)
