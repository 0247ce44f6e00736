"""Local search for the frontier: every decision that could help is tried, and judged by simulating it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from random import Random
from typing import TypeVar

from graphopt.planning.frontier import Frontier, Point
from graphopt.planning.simulation.candidates import Candidate
from graphopt.planning.simulation.edits import Roles
from graphopt.planning.simulation.idle import Idle, Touches
from graphopt.planning.simulation.schedule import Decision, Drops, Scheduler

__all__ = ["Explorer"]

T = TypeVar("T")

_INDEX = itemgetter(0)

_CROSSINGS = 12
"""At how many places two plans are crossed, at most."""


class Explorer:
    """Extends a frontier from its own points.

    Around a point, decisions are tried that drop what is alive but idle at its peak (alone, with the sources that would
    come back to life, and with all that is made only on the way), and that take back drops; and between neighbours,
    plans that are crossed of both. What lies on the frontier is explored in turn, spread over its whole range, so that
    no budget is favoured.

    Args:
        scheduler: of the problem.
        frontier: extended in place; holds at least one point.
        width: how many idle values are tried at a peak.
        everywhere: also try to drop what is idle anywhere, for small problems.
        roles: what is decided for one value is also tried for all others that play the same role in other blocks, and
            for the first and the second half of these; None to decide value by value.
        least_again: seconds recomputed in a plan that is taken, at least.

    Attributes:
        work: steps simulated so far.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        frontier: Frontier,
        *,
        width: int = 12,
        everywhere: bool = False,
        roles: Roles | None = None,
        least_again: float = 0.0,
    ) -> None:
        self.scheduler = scheduler
        self.frontier = frontier
        self.work = 0
        self._width = width
        self._everywhere = everywhere
        self._roles = roles
        self._least_again = least_again
        self._tried = set[int]()
        self._least_seconds = scheduler.problem.seconds * 1e-4 or 1e-9  # what a decision counts at least

    def offer(self, drops: Drops) -> Candidate:
        """Simulate decisions and offer them to the frontier."""
        found = self.scheduler.candidate(drops)
        self.work += len(found.bytes)
        if found.again >= self._least_again:
            self.frontier.offer(drops, found)
        return found

    def _offer_new(self, drops: Drops) -> None:
        """Offer decisions, unless they were among those that have been tried here before, which are known by hash."""
        key = hash(drops)
        if key not in self._tried:
            self._tried.add(key)
            self.offer(drops)

    def _try_all(self, options: Iterable[Drops]) -> list[Candidate]:
        return [self.offer(drops) for drops in options]

    def explore(self, point: Point, width: int | None = None) -> None:
        """Try everything around a point, but for what has been tried already.

        Args:
            point: of the frontier.
            width: how many idle values are tried at its peak.
        """
        tried, point.explored = point.explored, width or self._width
        start = self.scheduler.candidate(point.drops)
        self._lower(start, slice(tried, point.explored))
        if not tried:
            self._take_back(start)

    def cross(self, lower: Point, upper: Point) -> None:
        """Try what takes the decisions of one plan up to some moment, and those of another one behind it.

        Between neighbours of the frontier these lie in between in bytes and seconds: the one runs more again in the
        first half of the layers, say, and the other in the second. (Path relinking: Glover, 1997.)
        """
        differing = sorted(lower.drops ^ upper.drops)
        parts = min(_CROSSINGS + 1, len(differing))
        self.scheduler.stay_near(lower.drops)
        for number in range(1, parts):
            place = len(differing) * number // parts
            for part in (differing[:place], differing[place:]):
                self._offer_new(lower.drops.symmetric_difference(part))

    def descend(self, drops: Drops, target: int, limit: int) -> bool:
        """Lower the peak, one decision after the other, until it is at most ``target`` bytes.

        Each round takes the decision that removes the most bytes above the target, summed over the steps, for its
        seconds. Ends where nothing helps, or when ``work`` is above ``limit``; says whether the target was reached.
        """
        current = self.offer(drops)
        while current.peak > target and self.work < limit:
            best = self._best(current, target)
            if best is None:
                return False
            current = best
        return current.peak <= target

    def _best(self, current: Candidate, target: int) -> Candidate | None:
        """Of what could lower the peak, that which removes the most bytes above a target for its seconds."""
        above, again = current.above(target), current.again
        best, highest = None, 0.0
        for trial in self._lower(current):
            gain = above - trial.above(target)
            score = gain / (max(trial.again - again, 0.0) + self._least_seconds)
            if score > highest:
                best, highest = trial, score
        return best

    # --- lowering the peak -------------------------------------------------------------------------------------------

    def _lower(self, start: Candidate, which: slice | None = None) -> list[Candidate]:
        """Decisions that could lower the peak, tried; ``which`` of the values that are idle there, largest first."""
        self.scheduler.stay_near(start.drops)
        place = start.peak_place
        touches = Touches(self.scheduler, start.steps, droppable=True)
        tried: list[Candidate] = []
        which = which or slice(0, self._width)
        for group in self._waiting(start.steps, touches, place, which):
            for part in _parts(group):
                tried += self._drop(start.drops, {idle.value: idle.moment + 1 for idle in part})
                tried += self._try_all(self._early(start, touches, part))
                if self._everywhere:
                    tried += self._try_all(self._made_early(start.drops, touches, part[0]))
        if which.start:
            return tried
        if self._everywhere:
            tried += self._try_all(self._sooner(start, touches))
        tried += self._try_all(self._carried_for(start, touches.moments, touches.moments[place]))
        return tried

    def _waiting(self, steps: Sequence[int], touches: Touches, place: int, which: slice) -> list[list[Idle]]:
        """What waits at a place and can be dropped, the largest first; each with all that waits like it elsewhere."""
        sizes = self.scheduler.problem.sizes
        waiting = touches.idle_at(place)
        waiting.sort(key=lambda idle: -sizes[idle.value])
        if self._roles is not None:
            return self._waiting_alike(self._roles, steps, touches, waiting, which)
        waiting = waiting[which]
        if self._everywhere and not which.start:
            waiting += [idle for idle in touches.idle() if idle not in waiting]
        return [[idle] for idle in waiting]

    def _waiting_alike(
        self, roles: Roles, steps: Sequence[int], touches: Touches, waiting: Sequence[Idle], which: slice
    ) -> list[list[Idle]]:
        """What waits, each with all of the same role that waits elsewhere between operations of the same roles."""

        def key(idle: Idle) -> Hashable:
            step = steps[idle.next_place]
            first_run = step == touches.moments[idle.next_place]
            return roles.values[idle.value], roles.operations[idle.moment], roles.operations[step], first_run

        keys = list(dict.fromkeys(map(key, waiting)))[which]
        return _grouped(keys, touches.idle(), key)

    def _drop(self, drops: Drops, moments: Mapping[int, int]) -> list[Candidate]:
        """Drop values: alone; with the sources that would come back to life; with all that is made only on the way.

        Args:
            drops: what is decided already.
            moments: at which each value is dropped.
        """
        alone = drops | {Decision(moment, value) for value, moment in moments.items()}
        if alone == drops:
            return []
        tried = [self.offer(alone)]
        together = alone.union(*(self._with_sources(value, moment) for value, moment in moments.items()))
        if together != alone:
            tried.append(self.offer(together))
        passing = together | self._passing(tried[-1], moments)
        if passing != together:
            tried.append(self.offer(passing))
        if self._everywhere:
            anew = alone.union(*(self._from_scratch(value, moment) for value, moment in moments.items()))
            if anew not in (alone, together):
                tried.append(self.offer(anew))
        return tried

    def _with_sources(self, value: int, moment: int) -> set[Decision]:
        """Drops of a value, and of those of its sources that nothing reads from a moment on."""
        scheduler = self.scheduler
        dropped, pending = {value}, [value]
        while pending:
            for source in scheduler.reads[scheduler.makers[pending.pop()]]:
                if source not in dropped and scheduler.droppable[source] and scheduler.last_read(source) < moment:
                    dropped.add(source)
                    pending.append(source)
        return {Decision(moment, v) for v in dropped}

    def _passing(self, dropped: Candidate, moments: Mapping[int, int]) -> set[Decision]:
        """Drops of everything that is made again only on the way to values, when each of them is made again.

        Args:
            dropped: a plan in which the values are dropped.
            moments: at which each value is dropped.
        """
        makers, stops = self.scheduler.makers, dropped.stops()
        found = set[Decision]()
        for value, moment in moments.items():
            maker = makers[value]
            for index, again in stops[bisect_left(stops, moment, key=_INDEX) :]:
                if maker in again:
                    found |= self._made_beside(value, again[: again.index(maker) + 1], index + 1)
                    break
        return found

    def _made_beside(self, value: int, operations: Iterable[int], moment: int) -> set[Decision]:
        """Drops, at a moment, of all that operations make again, but for one value."""
        remakes, droppable = self.scheduler.remakes, self.scheduler.droppable
        made = {v for operation in operations for v in remakes[operation]}
        return {Decision(moment, v) for v in made if v != value and droppable[v]}

    def _from_scratch(self, value: int, moment: int) -> set[Decision]:
        """Drops of all that a value is made of, each behind its last read before the value is read again."""
        scheduler = self.scheduler
        need = min((at for at in scheduler.readers(value) if at >= moment), default=moment)
        found, seen, pending = set[Decision](), {value}, [value]
        while pending:
            for source in scheduler.reads[scheduler.makers[pending.pop()]]:
                if source not in seen and scheduler.droppable[source]:
                    seen.add(source)
                    pending.append(source)
                    reads = [at for at in scheduler.readers(source) if at < need]
                    found.add(Decision(max([scheduler.makers[source], *reads]) + 1, source))
        return found

    # --- making values again early -----------------------------------------------------------------------------------

    def _early(self, start: Candidate, touches: Touches, waiting: Sequence[Idle]) -> Iterator[Drops]:
        """Make what values wait to be read for when they are touched before, so that the results wait instead."""
        scheduler, steps = self.scheduler, start.steps
        made = set[Decision]()
        for idle in waiting:
            step = steps[idle.next_place]
            if step != touches.moments[idle.next_place]:
                early = [v for v in scheduler.remakes[step] if scheduler.makers[v] < idle.moment]
                made |= {Decision(idle.moment, v, remake=True) for v in early}
        if made - start.drops:
            yield start.drops | made

    def _made_early(self, drops: Drops, touches: Touches, idle: Idle) -> Iterator[Drops]:
        """Drop a value, and make it again before it is needed: while what it is made of is still there, say."""
        dropped = drops | {idle.drop}
        for moment in range(idle.moment + 2, touches.moments[idle.next_place] + 1):
            yield dropped | {Decision(moment, idle.value, remake=True)}

    def _sooner(self, start: Candidate, touches: Touches) -> Iterator[Drops]:
        """Make what is made again sooner: when one of its sources is touched for the last time before."""
        scheduler = self.scheduler
        touched: dict[int, list[int]] = {}
        for step, moment in zip(start.steps, touches.moments, strict=True):
            reads = scheduler.reads[step]
            if step != moment:
                recent = [at for source in reads for at in touched.get(source, ())[-2:]]
                for sooner in [at for at in recent if at < moment]:
                    yield start.drops | {Decision(sooner, v, remake=True) for v in scheduler.remakes[step]}
            for value in (*reads, *scheduler.makes[step]):
                touched.setdefault(value, []).append(moment)

    # --- taking decisions back ---------------------------------------------------------------------------------------

    def _carried_for(self, start: Candidate, moments: Sequence[int], moment: int) -> list[Drops]:
        """Without drops whose values are recomputed at the moment of the peak: carrying one may save what leads to it.

        Args:
            start: what is decided already.
            moments: for each place in the plan.
            moment: of the peak.
        """
        makers, sizes = self.scheduler.makers, self.scheduler.problem.sizes
        now = [step for step, at in zip(start.steps, moments, strict=True) if at == moment]
        again = set(now) - {moment}
        found = [d for d in start.drops if makers[d.value] in again and d.moment <= moment and not d.remake]
        found.sort(key=lambda drop: (sizes[drop.value], drop.moment, drop.value))
        groups = self._alike(start.drops, found)[: 2 * self._width]
        return [start.drops.difference(part) for group in groups for part in _parts(group)]

    def _take_back(self, start: Candidate) -> None:
        """Try to do without each drop that lets something be recomputed; and without all that make nothing run."""
        scheduler = self.scheduler
        scheduler.stay_near(start.drops)
        again = {v for _, steps in start.stops() for step in steps for v in scheduler.remakes[step]}
        working = [decision for decision in start.drops if decision.value in again]
        working.sort(key=lambda decision: (-scheduler.seconds[scheduler.makers[decision.value]], _order(decision)))
        for group in self._alike(start.drops, working):
            for part in _parts(group):
                self._offer_new(start.drops.difference(part))

    def _alike(self, drops: Drops, chosen: Sequence[Decision]) -> list[list[Decision]]:
        """Chosen decisions, each with those about values of the same role at operations of the same role."""
        if self._roles is None:
            return [[decision] for decision in chosen]
        values, operations = self._roles.values, (*self._roles.operations, -1)
        end = len(operations) - 1

        def key(decision: Decision) -> Hashable:
            moment, value, remake = decision
            return operations[moment if moment < end else end], values[value], remake

        groups = _grouped(map(key, chosen), drops, key)
        for group in groups:
            group.sort(key=_order)
        return groups

    # --- decisions at random -----------------------------------------------------------------------------------------

    def shake(self, point: Point, chance: Random) -> None:
        """Take a few decisions at random around a point, then lower the peak again and take back what can be."""
        drops = point.drops
        for _ in range(chance.randint(1, 4)):
            drops = self._at_random(drops, chance)
        self.descend(drops, point.peak, self.work + 40 * len(self.scheduler.reads))
        simulated = self.offer(drops)
        for decision in sorted(drops, key=_order):
            trial = self.offer(drops - {decision})
            if (trial.peak, trial.again) <= (max(simulated.peak, point.peak), simulated.again):
                drops, simulated = drops - {decision}, trial

    def _at_random(self, drops: Drops, chance: Random) -> Drops:
        """Take back one of some decisions, or drop something that is idle; unchanged where there is neither."""
        waiting = Touches(self.scheduler, self.offer(drops).steps, droppable=True).idle()
        if drops and (not waiting or chance.random() < 0.4):
            return drops - {chance.choice(sorted(drops, key=_order))}
        if not waiting:
            return drops
        drop = chance.choice(waiting).drop
        drops = drops | {drop}
        if chance.random() < 0.5:
            drops = drops | self._from_scratch(drop.value, drop.moment)
        return drops


def _order(decision: Decision) -> tuple[int, bool, int]:
    """The order in which decisions are tried: by moment; what is made again, the last value first; what is dropped."""
    moment, value, remake = decision
    return moment, not remake, -value if remake else value


def _grouped(keys: Iterable[Hashable], items: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    """A group of items for each different key, in the order of the keys; items with other keys are left out."""
    groups: dict[Hashable, list[T]] = {wanted: [] for wanted in keys}
    for item in items:
        group = groups.get(key(item))
        if group is not None:
            group.append(item)
    return list(groups.values())


def _parts(group: list[T]) -> list[list[T]]:
    """A group, and its halves."""
    if len(group) < 2:
        return [group]
    middle = len(group) // 2
    return [group, group[:middle], group[middle:]]
