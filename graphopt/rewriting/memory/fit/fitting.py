"""Fitting a program into a number of bytes: from a program to the planner's frontier, and from a plan to a program."""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import fx

from graphopt.analysis.program_replay import reserved_where_cached
from graphopt.ir.memory.timeline import MemoryTimeline
from graphopt.ir.program import Program
from graphopt.planning import Problem, Simulated
from graphopt.planning.frontier import Frontier, Point
from graphopt.planning.planner import find_frontier
from graphopt.planning.search.lower_bound import fewest_seconds_again, quick_bound
from graphopt.planning.search.refinement import Refinement
from graphopt.planning.simulation.schedule import Scheduler
from graphopt.planning.transfers.offloading import Away, Lanes, Moved, moved_away
from graphopt.planning.transfers.slices import SlicedPlans, Span
from graphopt.rewriting.memory.fit.named_plan import NamedMove, NamedPlan
from graphopt.rewriting.memory.recompute.planning_problem import PlanningProblem, planning_problem, repeatable_calls
from graphopt.rewriting.memory.recompute.recompute_plan import Recomputation

__all__ = ["Fitted", "Fitting", "FittingOptions"]

_IMPOSSIBLE = 2**63
"""The peak of a plan that cannot be carried out in a program."""

_TRIALS = 24
"""How many plans of a frontier are tried with values offloaded."""

_LITTLE = 1 / 8
"""The share of a budget that an allocator leaves unused at most where plans are aimed at that budget."""

_UNUSED = 32
"""The part of a peak that an allocator leaves unused at least, as plans are aimed at."""

_BETWEEN = 8
"""In how many steps plans are aimed at between a budget and the peak, from which copies may take what is above."""

_STEP = 1 / 128
"""How far apart in bytes plans are that are looked at as programs whose allocator reserves more than their tensors.

A share of the peak of the unmodified program. What is reserved for a plan is only known from its program.
"""


@dataclass(frozen=True, slots=True)
class Fitted:
    """A plan for a program.

    Attributes:
        simulated: what the planner expects of it.
        peak_bytes: the peak of the rewritten program, by its own memory timeline.
        away: the values that wait elsewhere, and when.
        late: seconds for which the computation waits for copies.
        reserved_bytes: what the device's allocator reserves for the rewritten program, where it keeps freed blocks.
    """

    simulated: Simulated
    peak_bytes: int
    away: tuple[Away, ...] = ()
    late: float = 0.0
    reserved_bytes: int | None = None

    @property
    def taken_bytes(self) -> int:
        """The bytes that a budget has to have: what is reserved, or else the peak."""
        return self.peak_bytes if self.reserved_bytes is None else self.reserved_bytes

    @property
    def seconds(self) -> float:
        """Seconds on top of the unmodified program: what is recomputed, and waiting for copies."""
        return self.simulated.again + self.late


@dataclass(frozen=True, slots=True)
class _Choice:
    """A plan that could be taken: what it is expected to take in bytes, and in seconds on top of the program's own."""

    peak: int
    seconds: float
    plan: Point | Moved


@dataclass(frozen=True, slots=True)
class FittingOptions:
    """How plans are searched for, and what they may do.

    Attributes:
        time_limit: seconds after which the search begins no further work; None for no limit.
        progress: called with the share of the search that is done, and the frontier so far.
        lanes: gives what copies can do, where values may be offloaded; None where they may not.
        tier: where to: ``host`` or ``disk``.
        recompute: whether operations may be recomputed.
        interruptible: take an interruption from the keyboard as the end of the search, and go on with what it found.
        budgets: in bytes; plans for these are searched for, unless what is taken depends on plans for all.
        thorough: search for the best plans at every budget, however long that takes.
        origin: who rewrites programs by these plans, for people.
    """

    time_limit: float | None = None
    progress: Callable[[float, Frontier], None] | None = None
    lanes: Callable[[PlanningProblem], Lanes] | None = None
    tier: str = "host"
    recompute: bool = True
    interruptible: bool = False
    budgets: tuple[int, ...] = ()
    thorough: bool = False
    origin: str = ""


_DEFAULTS = FittingOptions()


class Fitting:
    """The trade between peak bytes and seconds for one program.

    Args:
        program: of stage joint or step; it is only read.
        memory: its timeline.
        seconds: of each call, in the order of ``memory.nodes``.
        options: of the search.

    Attributes:
        reserved: what the device's allocator reserves for the unmodified program; None where that is no more than its
            tensors.
        sliced: where the program takes its batch in slices, the one that is planned, for all.
    """

    def __init__(
        self, program: Program, memory: MemoryTimeline, seconds: Sequence[float], options: FittingOptions = _DEFAULTS
    ) -> None:
        self.program = program
        self.memory = memory
        self.planning: PlanningProblem = planning_problem(program, seconds)
        self.scheduler = Scheduler(self.planning.problem)
        self.lanes = None if options.lanes is None else options.lanes(self.planning)
        self.tier = options.tier
        self._options = options
        self._moved: list[Moved] | None = None
        self._smallest: Fitted | None = None
        self._rewritten: tuple[NamedPlan, Program, Recomputation] | None = None
        self._looked_at: dict[int, tuple[Point | Moved, Fitted]] = {}
        self._repeatable: set[fx.Node] | None = None
        self._lower = 0
        self.reserved = reserved_where_cached(program, memory)
        slices = self.planning.slices
        self._thorough: Fitting | None = None
        self.sliced = SlicedPlans(self.scheduler, slices) if slices and options.recompute else None
        self._search_all()

    def _search_all(self) -> None:
        options = self._options
        if self.sliced is not None:
            self.frontier = self.sliced.frontier(self._search(self.sliced.part, options))
        else:
            self.frontier = self._search(self.planning.problem, options) if options.recompute else self._unchanged()
        self._refinement = self.sliced or Refinement(self.scheduler, self.frontier)

    def _search(self, problem: Problem, options: FittingOptions) -> Frontier:
        """The plans in which operations are recomputed."""
        return find_frontier(
            problem,
            budget=self._targets() if self.is_aimed else None,
            thorough=options.thorough,
            time_limit=options.time_limit,
            progress=options.progress,
            interruptible=options.interruptible,
        )

    @property
    def is_aimed(self) -> bool:
        """Whether only plans for some budgets are searched for.

        What more than one slice takes depends on plans at all of them, and so does what an allocator leaves unused,
        where that is much.
        """
        budgets = self._options.budgets
        if self.sliced is not None or not budgets or self._options.thorough:
            return False
        return self._unused <= _LITTLE * min(budgets)

    @property
    def _unused(self) -> int:
        """What the allocator reserves beyond the peak of the unmodified program."""
        return 0 if self.reserved is None else self.reserved.reserved_peak_bytes - self.memory.peak_bytes

    def _targets(self) -> list[int]:
        """The budgets that plans are searched for: those that are asked for, and what a plan may come from beside.

        An allocator reserves more than is alive, so that a plan for fewer bytes may be the one that fits; with copies
        to the host a plan for more bytes may, as soon as some of its values wait there.
        """
        peak, found = self.memory.peak_bytes, list(self._options.budgets)
        for budget in self._options.budgets:
            if self.reserved is not None:
                unused = max(self._unused, peak // _UNUSED)
                found += [budget - unused * number // 2 for number in (1, 2, 3)]
            if self.lanes is not None and self.lanes.room:
                found += [budget + (peak - budget) * number // _BETWEEN for number in range(1, _BETWEEN)]
        return sorted({target for target in found if target > 0}, reverse=True)

    def thorough(self) -> Fitting:
        """The same program after the most effort for all budgets; this one where that was made for it already."""
        if self._options.thorough or self.is_carried:
            return self
        if self._thorough is None:
            found = copy.copy(self)
            found._options = replace(self._options, budgets=(), thorough=True)
            found._moved = found._smallest = found._rewritten = None
            found._looked_at = {}
            found._search_all()
            self._thorough = found
        return self._thorough

    def _unchanged(self) -> Frontier:
        """The program as it is, in which nothing is recomputed."""
        frontier = Frontier()
        frontier.offer(frozenset(), self.scheduler.evaluate(frozenset()))
        return frontier

    def carried_to(self, program: Program, memory: MemoryTimeline) -> Fitting:
        """The same plans for another program that shares its calls (``shared_calls``), without a search.

        Their peaks are those of that program; a plan that runs a call again which cannot be there is left out.

        Args:
            program: is only read.
            memory: its timeline.
        """
        carried = copy.copy(self)
        carried.program, carried.memory = program, memory
        carried._smallest = carried._thorough = carried._rewritten = None
        carried._looked_at = {}
        carried.reserved = reserved_where_cached(program, memory)
        carried._repeatable = repeatable_calls(program)
        carried._lower = min(0, memory.peak_bytes - self.memory.peak_bytes)
        return carried

    @property
    def is_carried(self) -> bool:
        """Whether the search was for another program; which of its plans takes least here takes long to find."""
        return self._repeatable is not None

    @property
    def span(self) -> Span:
        """The operations whose results plans decide about first: forward, and where backward begins."""
        problem = self.planning.problem
        return Span(0, problem.boundary, len(problem.operations)) if self.sliced is None else self.sliced.span

    @property
    def seconds(self) -> float:
        """How long the program's calls take, each run once."""
        return self.planning.problem.seconds

    def least_seconds(self, budget: int) -> float | None:
        """Seconds on top of the unmodified program that every plan within a budget takes, at least.

        None where values may wait elsewhere, which nothing bounds.
        """
        if self.lanes is not None and self.lanes.room:
            return None
        bound = fewest_seconds_again if self._options.thorough else quick_bound
        return bound(self.planning.problem, self.scheduler.evaluate(frozenset()), budget)

    def expected_seconds(self, budget: int) -> float | None:
        """Seconds on top of the unmodified program of the fastest plan that is expected to fit into a budget."""
        choices = [*self._choices(), *self._refined(budget)]
        return min((choice.seconds for choice in choices if choice.peak <= budget), default=None)

    def simulate(self, point: Point) -> Simulated:
        """The plan behind a point of the frontier."""
        return self.scheduler.evaluate(point.drops)

    def within(self, budget: int) -> Fitted | None:
        """The fastest plan whose rewritten program takes ``budget`` bytes or less; None where there is none.

        The rewritten program's own timeline decides, and where the device's allocator keeps freed blocks, what it
        reserves: where that is above what the planner expected, the next best plan is taken. More bytes never get a
        slower plan: what there is to choose from does not depend on the budget, but for plans between its neighbours
        on the frontier, none of which is faster than the next one there. What is reserved is looked at for plans that
        are farther apart (``_STEP``), without any between them. Of plans carried over from another program none is
        looked at that is expected to take more: a search for this program by itself finds better ones.
        """
        above = self._lower  # a carried program takes so much more or less than expected, as far as is known
        waiting = self._tried() if self.reserved is not None else [*self._choices(), *self._refined(budget - above)]
        while waiting:
            choice = min(waiting, key=lambda choice: choice.seconds)
            waiting = [other for other in waiting if other is not choice and other.peak + above <= budget]
            if choice.peak + above > budget:
                continue
            fitted = self._fitted(choice)
            if fitted.taken_bytes <= budget:
                return fitted
            if self.is_carried and fitted.peak_bytes < _IMPOSSIBLE:
                above = max(above, fitted.peak_bytes - choice.peak)
            if self.reserved is None and isinstance(choice.plan, Point) and choice.plan in self.frontier:
                waiting += self._refined(choice.peak - 1)
        if self.is_carried:
            return None
        smallest = self.smallest()
        return smallest if smallest.taken_bytes <= budget else None

    def trade(self, most: int) -> list[Fitted]:
        """Plans of which none is better in both bytes and seconds, as the planner expects them, from few bytes to many.

        Args:
            most: how many (2 at least); of more than that, those whose peaks are evenly spread.
        """
        best = _trade_off(self._choices())
        low, high = best[0].peak, best[-1].peak
        goals = [low + (high - low) * number // (most - 1) for number in range(most)]
        spread = {bisect_right(best, goal, key=lambda choice: choice.peak) - 1: None for goal in goals}
        return [self._expected(best[place]) for place in (spread if len(best) > most else range(len(best)))]

    def check(self, point: Point) -> Fitted:
        """A plan with the peak of the program that comes of it."""
        return self._fitted(_Choice(point.peak, point.again, point))

    def smallest(self) -> Fitted:
        """The plan with the fewest bytes that was found; of several, the fastest. The program is not rewritten yet."""
        if self._smallest is None:
            choices = sorted(self._tried(), key=lambda choice: (choice.peak, choice.seconds))
            best = self._fitted(choices[0])
            for choice in choices[1:]:
                if choice.peak >= best.taken_bytes:
                    break
                best = min(best, self._fitted(choice), key=lambda fitted: fitted.taken_bytes)
            self._smallest = best
        return self._smallest

    @property
    def least_expected(self) -> int:
        """The fewest bytes at the peak that the planner expects of a plan; also known when the program is rewritten."""
        return min(choice.peak for choice in self._choices())

    @property
    def knows_smallest(self) -> bool:
        """Whether the plan with the fewest bytes of all is known: each that may be it takes a look at its program."""
        return not self.is_carried and (self._smallest is not None or self._options.thorough)

    @property
    def smallest_peak(self) -> int:
        """The lowest peak that was found, in bytes; where more is reserved, another plan may take the fewest bytes."""
        peak = self.smallest().peak_bytes
        return peak if self.reserved is None else min(peak, self.frontier.lowest.peak)

    def _tried(self) -> list[_Choice]:
        """The plans looked at as programs: all, or some evenly apart where each takes a replay."""
        choices = self._choices()
        if self.reserved is None:
            return choices
        step = int(_STEP * self.memory.peak_bytes)
        # Chosen from by themselves: copies come and go, and leave more unused.
        moved = [choice for choice in choices if isinstance(choice.plan, Moved)]
        others = [choice for choice in choices if not isinstance(choice.plan, Moved)]
        return [*_spread(_trade_off(others), step), *_spread(_trade_off(moved), step)]

    def _choices(self) -> list[_Choice]:
        """The plans of the frontier as they are, and some of them with values offloaded."""
        points = list(self.frontier)
        found = [_Choice(point.peak, point.again, point) for point in points]
        if self.lanes is not None and self.lanes.room and self._moved is None:
            stride = max(1, -(-len(points) // _TRIALS))
            plans = [self.simulate(point) for point in {id(p): p for p in (*points[::stride], points[-1])}.values()]
            self._moved = [moved for plan in plans for moved in moved_away(self.scheduler, plan, self.lanes)]
        for moved in self._moved or ():
            found.append(_Choice(moved.peak, moved.simulated.again + moved.late, moved))
        return found

    def _refined(self, budget: int) -> list[_Choice]:
        """Plans between the two of the frontier that are next to a budget."""
        return [_Choice(point.peak, point.again, point) for point in self._refinement.around(budget)]

    def _expected(self, choice: _Choice) -> Fitted:
        """A plan with what the planner expects, not looked at as a program."""
        if isinstance(choice.plan, Point):
            return Fitted(self.simulate(choice.plan), choice.peak)
        return Fitted(choice.plan.simulated, choice.peak, choice.plan.away, choice.plan.late)

    def _fitted(self, choice: _Choice) -> Fitted:
        """A plan as a program; where each takes a replay of the allocator, the least plan looks at the same again."""
        plan = choice.plan
        known = self._looked_at.get(id(plan))
        if known is not None:
            return known[1]
        if isinstance(plan, Point):
            found = self._checked(self.simulate(plan), (), 0.0)
        else:
            found = self._checked(plan.simulated, plan.away, plan.late)
        if self.reserved is not None:
            self._looked_at[id(plan)] = plan, found
        return found

    def _checked(self, simulated: Simulated, away: tuple[Away, ...], late: float) -> Fitted:
        expected = Fitted(simulated, _IMPOSSIBLE, away, late)
        plan = self.named(expected)
        if self._repeatable is not None and not plan.possible(self.program, self._repeatable):
            return expected
        changed = self.program.copy()
        self._rewritten = plan, changed, plan.apply(changed, origin=self._options.origin)
        changed.erase_dead()
        memory = changed.memory()
        reserved = None if self.reserved is None else reserved_where_cached(changed, memory)
        taken = None if reserved is None else reserved.reserved_peak_bytes
        return replace(expected, peak_bytes=memory.peak_bytes, reserved_bytes=taken)

    def rewrite(self, program: Program, plan: NamedPlan, *, origin: str) -> Recomputation:
        """Rewrite a program by one of the plans: this one as it was rewritten already, where it was looked at last."""
        last, self._rewritten = self._rewritten, None
        if last is None or program is not self.program or last[0] != plan or self._options.origin != origin:
            return plan.apply(program, origin=origin)
        program.take_over(last[1])
        return last[2]

    def apply(self, program: Program, fitted: Fitted, *, origin: str) -> Recomputation:
        """Rewrite a program (this one, or a copy of it) as a plan says."""
        return self.named(fitted).apply(program, origin=origin)

    def named(self, fitted: Fitted) -> NamedPlan:
        """A plan by the names of the program's calls."""
        nodes, makers = self.planning.nodes, self.planning.makers
        names = ["" if node is None else node.name for node in nodes]
        moves = [
            NamedMove(makers[item.value].name, item.window.freed, item.window.fetched, item.copy.needed)
            for item in fitted.away
        ]
        return NamedPlan(tuple(names[step] for step in fitted.simulated.plan.steps), tuple(moves), self.tier)


def _trade_off(choices: Sequence[_Choice]) -> list[_Choice]:
    """Those of which none is better in both bytes and seconds, from few bytes to many."""
    best: list[_Choice] = []
    for choice in sorted(choices, key=lambda choice: (choice.peak, choice.seconds)):
        if not best or choice.seconds < best[-1].seconds:
            best.append(choice)
    return best


def _spread(best: Sequence[_Choice], step: int) -> list[_Choice]:
    """Of some plans, from few bytes to many, those that are at least ``step`` bytes apart, and the last one."""
    found: list[_Choice] = []
    for choice in best:
        if not found or choice is best[-1] or choice.peak >= found[-1].peak + step:
            found.append(choice)
    return found
