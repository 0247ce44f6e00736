"""Local search for the frontier: every decision that could help is tried, and judged by simulating it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import pairwise
from random import Random
from typing import TypeVar

from graphopt.planning.frontier import Frontier, Point
from graphopt.planning.problem import Simulated
from graphopt.planning.repeats import Roles
from graphopt.planning.schedule import Drops, Scheduler

__all__ = ["Explorer"]

T = TypeVar("T")


class Lives:
    """Where every instance of every value is touched, in a simulated plan."""

    def __init__(self, scheduler: Scheduler, simulated: Simulated) -> None:
        self.moments: list[int] = []
        self.values: list[int] = []
        self.touches: list[list[int]] = []
        current: dict[int, list[int]] = {}
        reads, makes, remakes = scheduler.reads, scheduler.makes, scheduler.remakes
        upcoming = 0
        for place, step in enumerate(simulated.plan.steps):
            self.moments.append(upcoming)
            made = remakes[step]
            if step == upcoming:
                upcoming += 1
                made = makes[step]
            for value in reads[step]:
                current[value].append(place)
            for value in made:
                current[value] = [place]
                self.values.append(value)
                self.touches.append(current[value])

    def idle_at(self, place: int) -> list[tuple[int, int, int]]:
        """(value, moment of its last touch before, step of its next touch) of what is alive at a step but idle."""
        found = []
        moments = self.moments
        for value, touches in zip(self.values, self.touches, strict=True):
            if touches[0] < place < touches[-1]:
                index = bisect_left(touches, place)
                if touches[index] != place:
                    before = moments[touches[index - 1]]
                    if before < moments[touches[index]]:
                        found.append((value, before, touches[index]))
        return found

    def idle(self) -> list[tuple[int, int, int]]:
        """The same of every time that a value waits for a later moment."""
        moments = self.moments
        return [
            (value, moments[before], after)
            for value, touches in zip(self.values, self.touches, strict=True)
            for before, after in pairwise(touches)
            if moments[before] < moments[after]
        ]


class Explorer:
    """Extends a frontier from its own points.

    Around a point, decisions are tried that drop what is alive but idle at its peak (alone, with the sources that would
    come back to life, and with all that is made only on the way), and that take back drops. What lies on the frontier
    is explored in turn, spread over its whole range, so that no budget is favoured.

    Args:
        scheduler: of the problem.
        frontier: extended in place; holds at least one point.
        width: how many idle values are tried at a peak.
        everywhere: also try to drop what is idle anywhere, for small problems.
        roles: what is decided for one value is also tried for all others that play the same role in other blocks, and
            for the first and the second half of these; None to decide value by value.

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
    ) -> None:
        self.scheduler = scheduler
        self.frontier = frontier
        self.work = 0
        self._width = width
        self._everywhere = everywhere
        self._roles = roles

    def offer(self, drops: Drops) -> Simulated:
        """Simulate decisions and offer them to the frontier."""
        simulated = self.scheduler.evaluate(drops)
        self.work += len(simulated.bytes)
        self.frontier.offer(drops, simulated)
        return simulated

    def explore(self, point: Point) -> None:
        """Try everything around a point."""
        point.explored = True
        simulated = self.scheduler.evaluate(point.drops)
        self._lower(point.drops, simulated)
        self._take_back(point.drops, simulated)

    def descend(self, drops: Drops, target: int, limit: int) -> bool:
        """Lower the peak, one decision after the other, until it is at most ``target`` bytes.

        Each round takes the decision that removes the most bytes above the target, summed over the steps, for its
        seconds. Ends where nothing helps, or when ``work`` is above ``limit``; says whether the target was reached.
        """
        unit = self.scheduler.problem.seconds * 1e-4 or 1e-9
        simulated = self.offer(drops)
        while simulated.peak > target and self.work < limit:
            above = _above(simulated, target)
            best: tuple[float, Drops, Simulated] | None = None
            for candidate, trial in self._lower(drops, simulated):
                gain = above - _above(trial, target)
                if gain > 0:
                    score = gain / (max(trial.again - simulated.again, 0.0) + unit)
                    if best is None or score > best[0]:
                        best = (score, candidate, trial)
            if best is None:
                return False
            _, drops, simulated = best
        return simulated.peak <= target

    def _lower(self, drops: Drops, simulated: Simulated) -> list[tuple[Drops, Simulated]]:
        """Decisions that could lower the peak, tried."""
        place = simulated.bytes.index(simulated.peak)
        lives = Lives(self.scheduler, simulated)
        tried: list[tuple[Drops, Simulated]] = []
        for group in self._waiting(simulated, lives, place):
            for part in _parts(group):
                tried += self._drop(drops, {value: before + 1 for value, before, _ in part})
                early = self._early(drops, simulated, lives, part)
                if early is not None:
                    tried.append((early, self.offer(early)))
                if self._everywhere:
                    for pair in self._made_early(drops, lives, part[0]):
                        tried.append((pair, self.offer(pair)))
        if self._everywhere:
            for early in self._sooner(drops, simulated, lives):
                tried.append((early, self.offer(early)))
        for without in self._carried_for(drops, simulated, lives, place):
            tried.append((without, self.offer(without)))
        return tried

    def _waiting(self, simulated: Simulated, lives: Lives, place: int) -> list[list[tuple[int, int, int]]]:
        """What waits at a step and can be dropped, the largest first; each with all that waits like it elsewhere."""
        sizes, droppable = self.scheduler.problem.sizes, self.scheduler.droppable
        waiting = [item for item in lives.idle_at(place) if droppable[item[0]]]
        waiting.sort(key=lambda item: -sizes[item[0]])
        if self._roles is None:
            waiting = waiting[: self._width]
            if self._everywhere:
                waiting += [item for item in lives.idle() if droppable[item[0]] and item not in waiting]
            return [[item] for item in waiting]
        keys = list(dict.fromkeys(self._waits_like(simulated, lives, item) for item in waiting))[: self._width]
        groups: dict[Hashable, list[tuple[int, int, int]]] = {key: [] for key in keys}
        for item in lives.idle():
            if droppable[item[0]]:
                key = self._waits_like(simulated, lives, item)
                if key in groups:
                    groups[key].append(item)
        return list(groups.values())

    def _waits_like(self, simulated: Simulated, lives: Lives, item: tuple[int, int, int]) -> Hashable:
        """Equal for values of the same role that wait between operations of the same roles."""
        assert self._roles is not None
        value, before, after = item
        step = simulated.plan.steps[after]
        roles = self._roles.operations
        return self._roles.values[value], roles[before], roles[step], step == lives.moments[after]

    def _drop(self, drops: Drops, items: Mapping[int, int]) -> list[tuple[Drops, Simulated]]:
        """Drop values: alone; with the sources that would come back to life; with all that is made only on the way.

        Args:
            drops: what is decided already.
            items: the moment at which each value is dropped.
        """
        alone = drops | {(moment, value) for value, moment in items.items()}
        if alone == drops:
            return []
        tried = [(alone, self.offer(alone))]
        together = alone | {(moment, v) for value, moment in items.items() for v in self._chain(value, moment)}
        if together != alone:
            tried.append((together, self.offer(together)))
        passing = together | self._passing(tried[-1][1].plan.steps, items)
        if passing != together:
            tried.append((passing, self.offer(passing)))
        if self._everywhere:
            anew = alone.union(*(self._from_scratch(value, moment) for value, moment in items.items()))
            if anew not in (alone, together):
                tried.append((anew, self.offer(anew)))
        return tried

    def _early(
        self, drops: Drops, simulated: Simulated, lives: Lives, items: Sequence[tuple[int, int, int]]
    ) -> Drops | None:
        """Make what values wait to be read for when they are touched before, so that the results wait instead."""
        made = set[tuple[int, int]]()
        for _, before, after in items:
            step = simulated.plan.steps[after]
            if step != lives.moments[after]:
                made |= {(before, ~v) for v in self.scheduler.remakes[step] if self.scheduler.makers[v] < before}
        return drops | made if made - drops else None

    def _made_early(self, drops: Drops, lives: Lives, item: tuple[int, int, int]) -> Iterator[Drops]:
        """Drop a value, and make it again before it is needed: while what it is made of is still there, say."""
        value, before, after = item
        dropped = drops | {(before + 1, value)}
        for moment in range(before + 2, lives.moments[after] + 1):
            yield dropped | {(moment, ~value)}

    def _sooner(self, drops: Drops, simulated: Simulated, lives: Lives) -> Iterator[Drops]:
        """Make what is made again sooner: when one of its sources is touched for the last time before."""
        scheduler = self.scheduler
        touched: dict[int, list[int]] = {}
        for step, moment in zip(simulated.plan.steps, lives.moments, strict=True):
            if step != moment:
                for source in scheduler.reads[step]:
                    for sooner in touched.get(source, ())[-2:]:
                        if sooner < moment:
                            yield drops | {(sooner, ~v) for v in scheduler.remakes[step]}
            for value in (*scheduler.reads[step], *scheduler.makes[step]):
                touched.setdefault(value, []).append(moment)

    def _carried_for(self, drops: Drops, simulated: Simulated, lives: Lives, place: int) -> list[Drops]:
        """Without drops whose values run again at the moment of the peak: carrying one may save what leads to it."""
        moment, makers, sizes = lives.moments[place], self.scheduler.makers, self.scheduler.problem.sizes
        again = {s for s, at in zip(simulated.plan.steps, lives.moments, strict=True) if at == moment and s != moment}
        found = [(at, value) for at, value in drops if value >= 0 and makers[value] in again and at <= moment]
        found.sort(key=lambda item: (sizes[item[1]], item))
        return [drops.difference(part) for group in self._alike(drops, found)[: 2 * self._width] for part in group]

    def _alike(self, drops: Drops, chosen: Sequence[tuple[int, int]]) -> list[list[list[tuple[int, int]]]]:
        """Chosen decisions, each with those that are like it elsewhere: all of these, and halves of them."""
        if self._roles is None:
            return [[[item]] for item in chosen]
        keys = dict.fromkeys(self._decides_like(item) for item in chosen)
        groups: dict[Hashable, list[tuple[int, int]]] = {key: [] for key in keys}
        for item in sorted(drops):
            key = self._decides_like(item)
            if key in groups:
                groups[key].append(item)
        return [_parts(group) for group in groups.values()]

    def _decides_like(self, item: tuple[int, int]) -> Hashable:
        """Equal for decisions about values of the same role at operations of the same role."""
        assert self._roles is not None
        moment, value = item
        roles = self._roles.operations
        return roles[moment] if moment < len(roles) else -1, self._roles.values[max(value, ~value)], value >= 0

    def _chain(self, value: int, moment: int) -> set[int]:
        """A value and those of its sources that nothing reads from a moment on."""
        scheduler = self.scheduler
        chain, pending = {value}, [value]
        while pending:
            for source in scheduler.reads[scheduler.makers[pending.pop()]]:
                if source not in chain and scheduler.droppable[source] and scheduler.last_read(source) < moment:
                    chain.add(source)
                    pending.append(source)
        return chain

    def _from_scratch(self, value: int, moment: int) -> set[tuple[int, int]]:
        """Drops of all that a value is made of, each behind its last read before the value is read again."""
        scheduler = self.scheduler
        need = min((at for at in scheduler.readers(value) if at >= moment), default=moment)
        found, seen, pending = set[tuple[int, int]](), {value}, [value]
        while pending:
            for source in scheduler.reads[scheduler.makers[pending.pop()]]:
                if source not in seen and scheduler.droppable[source]:
                    seen.add(source)
                    pending.append(source)
                    reads = [at for at in scheduler.readers(source) if at < need]
                    found.add((max([scheduler.makers[source], *reads]) + 1, source))
        return found

    def shake(self, point: Point, chance: Random) -> None:
        """Take a few decisions at random around a point, then lower the peak again and take back what can be."""
        drops = point.drops
        for _ in range(chance.randint(1, 4)):
            lives = Lives(self.scheduler, self.offer(drops))
            idle = [item for item in lives.idle() if self.scheduler.droppable[item[0]]]
            if drops and (not idle or chance.random() < 0.4):
                drops = drops - {chance.choice(sorted(drops))}
            elif idle:
                value, before, _ = chance.choice(idle)
                drops = drops | {(before + 1, value)}
                if chance.random() < 0.5:
                    drops = drops | self._from_scratch(value, before + 1)
        self.descend(drops, point.peak, self.work + 40 * len(self.scheduler.reads))
        simulated = self.offer(drops)
        for item in sorted(drops):
            trial = self.offer(drops - {item})
            if (trial.peak, trial.again) <= (max(simulated.peak, point.peak), simulated.again):
                drops, simulated = drops - {item}, trial

    def _passing(self, steps: Sequence[int], items: Mapping[int, int]) -> set[tuple[int, int]]:
        """Drops of everything that is made again only on the way to values, when each of them is made again.

        Args:
            steps: of a plan in which the values are dropped.
            items: the moment at which each value is dropped.
        """
        scheduler = self.scheduler
        wanted: dict[int, dict[int, int]] = {}
        for value, moment in items.items():
            wanted.setdefault(scheduler.makers[value], {})[value] = moment
        found = set[tuple[int, int]]()
        upcoming = 0
        run: list[int] = []
        for step in steps:
            if step == upcoming:
                upcoming += 1
                run = []
                continue
            run.append(step)
            for value in [value for value, moment in wanted.get(step, {}).items() if upcoming >= moment]:
                made = {v for other in run for v in scheduler.remakes[other]}
                found |= {(upcoming + 1, v) for v in made if v != value and scheduler.droppable[v]}
                del wanted[step][value]
        return found

    def _take_back(self, drops: Drops, simulated: Simulated) -> None:
        """Try to do without each drop that makes something run again; and without all that make nothing run."""
        scheduler = self.scheduler
        again = {v for step in simulated.plan.repeats() for v in scheduler.remakes[step]}
        working = [item for item in drops if max(item[1], ~item[1]) in again]
        working.sort(key=lambda item: (-scheduler.seconds[scheduler.makers[max(item[1], ~item[1])]], item))
        for group in self._alike(drops, working):
            for part in group:
                self.offer(drops.difference(part))


def _parts(group: list[T]) -> list[list[T]]:
    """A group, and its halves."""
    if len(group) < 2:
        return [group]
    middle = len(group) // 2
    return [group, group[:middle], group[middle:]]


def _above(simulated: Simulated, target: int) -> int:
    return sum([count - target for count in simulated.bytes if count > target])
