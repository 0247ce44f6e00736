"""Segments between lower sets of the forward graph, chosen by dynamic programming.

A lower set holds, with every operation, all operations that it reads from. A growing sequence of lower sets divides
forward into segments; what a segment makes and a later one reads is carried over to backward, and the rest is made
again there.

Source: Kusumoto et al., A Graph Theoretic Framework of Recomputation Algorithms for Memory-Efficient Backpropagation,
NeurIPS 2019, arXiv 1905.11722.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from graphopt.errors import GraphoptError
from graphopt.planning.search.segments import Forward
from graphopt.planning.simulation.schedule import Drops, Scheduler

if TYPE_CHECKING:
    from scipy.sparse import csr_array

__all__ = ["MOST_EXACT", "LowerSets", "Sequence", "lower_set_plans"]

Array = npt.NDArray[Any]
Objective = Literal["time", "memory"]

MOST_EXACT = 3000
"""The most lower sets that the exact method takes: all pairs of them are compared."""

_MOST_APPROXIMATE = 300
_TICKS = 96
"""Units that the seconds of forward are divided into."""

_SWEPT = 12
_HALVED = 4


def lower_set_plans(
    scheduler: Scheduler, budget: int, *, exact: bool = False, objective: Objective = "time"
) -> Iterator[Drops]:
    """Plans from sequences of lower sets, for a sweep of budgets.

    What the dynamic programme takes a plan's memory for is neither an upper nor a lower bound of it, because values die
    inside a segment and are made again one by one. So its budget is swept, from the smallest that is feasible to where
    one segment is left, and then halved in between around ``budget``, by the simulated peaks.

    Args:
        scheduler: of the problem.
        budget: bytes that a plan may take, resident bytes included.
        exact: consider all lower sets in place of an approximate family: each operation with its ancestors, and what
            comes before a place in the program's order; where these are many, those with narrow borders.
        objective: ``time`` looks for the fewest seconds recomputed within each budget; ``memory`` for the most, whose
            segments are longer, which often lowers the simulated peak.

    Yields:
        different decisions, at most about 40; each sequence with its last segment dropped at the boundary, and kept.

    Raises:
        GraphoptError: with ``exact``, where forward has more than ``MOST_EXACT`` lower sets.
    """
    forward = Forward(scheduler)
    if forward.boundary == 0:
        return
    sets = LowerSets(forward, exact=exact)
    sweep = _Sweep(scheduler, sets, objective)
    lowest, highest = sets.smallest_budget(), sets.largest_budget()
    for number in range(_SWEPT):
        yield from sweep.plans(lowest * (highest / max(lowest, 1.0)) ** (number / (_SWEPT - 1)))
    for _ in range(_HALVED):
        yield from sweep.plans(sweep.between(lowest, highest, budget))


class _Sweep:
    """Gives each plan once, and remembers the simulated peaks."""

    def __init__(self, scheduler: Scheduler, sets: LowerSets, objective: Objective) -> None:
        self._scheduler, self._sets = scheduler, sets
        self._objective: Objective = objective
        self._seen: set[Drops] = set()
        self._peaks: dict[float, int] = {}

    def plans(self, goal: float) -> Iterator[Drops]:
        """The new plans for a budget of the dynamic programme."""
        sequence = self._sets.best(goal, self._objective)
        if sequence is None:
            return
        for keep_last in (True, False):
            drops = self._sets.drops(sequence, keep_last=keep_last)
            self._peaks[goal] = self._scheduler.evaluate(drops).peak
            if drops not in self._seen:
                self._seen.add(drops)
                yield drops

    def between(self, lowest: float, highest: float, budget: int) -> float:
        """Half-way between the largest goal whose simulated peak is within a budget, and the next one."""
        below = max((goal for goal, peak in self._peaks.items() if peak <= budget), default=lowest)
        above = min((goal for goal in self._peaks if goal > below), default=highest)
        return (below + above) / 2


@dataclass(frozen=True, slots=True)
class Sequence:
    """A growing sequence of lower sets, the last of them all of forward.

    Attributes:
        sets: their numbers in the family, without the empty one.
        again: seconds recomputed, by the dynamic programme's estimate.
    """

    sets: tuple[int, ...]
    again: float


class LowerSets:
    """A family of lower sets, what a segment between each two of them takes, and the best sequences.

    Args:
        forward: of the problem; not empty.
        exact: all lower sets in place of the approximate family.

    Raises:
        GraphoptError: with ``exact``, where there are more than ``MOST_EXACT``.
    """

    def __init__(self, forward: Forward, *, exact: bool = False) -> None:
        self._forward = forward
        sources = _sources(forward)
        members = _all_lower_sets(sources) if exact else _approximate_family(forward, sources)
        self._member, self._border = members, _borders(forward, members)
        self._tick = sum(forward.scheduler.seconds[: forward.boundary]) / _TICKS or 1.0
        self._segments()

    def _segments(self) -> None:
        """Bytes carried, peak and seconds again of the segment from each set (column) to each larger one (row)."""
        forward, member = self._forward, self._member
        scheduler = forward.scheduler
        makers = [scheduler.makers[v] for v in forward.values]
        sizes = np.array([scheduler.problem.sizes[v] for v in forward.values], dtype=np.float64)
        bytes_made = np.bincount(makers, weights=sizes, minlength=forward.boundary)
        total = member @ bytes_made
        self._carried = (self._border * sizes) @ (1.0 - member[:, makers]).T
        self._peak = 2 * (total[:, None] - total[None, :]) + self._beside(bytes_made)[:, None]
        seconds = np.array(scheduler.seconds[: forward.boundary]) * self._rerun()
        again = seconds.sum(axis=1)[:, None] - seconds @ member.T
        again[-1] = 0.0  # the last segment is there when backward begins
        self._again = np.rint(again / self._tick).astype(np.int64)
        self._below = (member @ member.T >= member.sum(axis=1)[None, :]) & ~np.eye(len(member), dtype=bool)

    def _rerun(self) -> Array:
        """Which operations of each set are recomputed: what is used later, and not on the set's border, needs them."""
        forward, scheduler = self._forward, self._forward.scheduler
        used = {v for reads in scheduler.reads for v in reads}
        rerun = np.zeros_like(self._member)
        for place, value in enumerate(forward.values):
            if value in used and scheduler.droppable[value]:
                maker = scheduler.makers[value]
                rerun[:, maker] = np.maximum(rerun[:, maker], ~self._border[:, place])
        return rerun * self._member

    def _beside(self, bytes_made: Array) -> Array:
        """Bytes of what reads from each set, and of what else that reads: their gradients are there as well."""
        scheduler, count = self._forward.scheduler, self._forward.boundary
        pairs = [(scheduler.makers[v], index) for index in range(count) for v in scheduler.reads[index]]
        edges = _incidence(pairs, (count, count))
        outside = self._member == 0
        after = (self._member @ edges > 0) & outside
        beside = (after @ edges.T > 0) & outside
        found: Array = after @ bytes_made + beside @ bytes_made
        return found

    def largest_budget(self) -> float:
        """The bytes, by the estimate, of forward as one segment."""
        return float(self._peak[-1, 0])

    def smallest_budget(self, *, precision: float = 0.005) -> float:
        """The fewest bytes, by the estimate, with which some sequence is feasible, within a relative precision."""
        low, high = 0.0, self.largest_budget()
        while high - low > precision * high:
            middle = (low + high) / 2
            if self._feasible(middle):
                high = middle
            else:
                low = middle
        return high

    def _feasible(self, budget: float) -> bool:
        carried = np.full(len(self._member), np.inf)
        carried[0] = 0.0
        for number in range(1, len(carried)):
            before = self._below[number] & (carried + self._peak[number] <= budget)
            if before.any():
                carried[number] = (carried[before] + self._carried[number, before]).min()
        return bool(np.isfinite(carried[-1]))

    def best(self, budget: float, objective: Objective = "time") -> Sequence | None:
        """The best feasible sequence within a budget in bytes of the estimate; None where there is none.

        The fewest bytes carried are kept for each set and each number of ticks (1/96 of forward's seconds) recomputed.
        """
        ticks = np.arange(_TICKS + 1)
        carried = np.full((len(self._member), len(ticks)), np.inf)
        carried[0, 0] = 0.0
        origin = np.zeros(carried.shape, dtype=np.int64)
        for number in range(1, len(carried)):
            before = np.flatnonzero(self._below[number] & (carried.min(axis=1) + self._peak[number] <= budget))
            if not len(before):
                continue
            room = budget - self._peak[number, before]
            reached = carried[before]
            reached = np.where(reached <= room[:, None], reached + self._carried[number, before][:, None], np.inf)
            spent = ticks[None, :] - self._again[number, before][:, None]
            reached = np.where(spent >= 0, np.take_along_axis(reached, np.maximum(spent, 0), axis=1), np.inf)
            choice = reached.argmin(axis=0)
            carried[number] = reached[choice, ticks]
            origin[number] = before[choice]
        final = np.flatnonzero(np.isfinite(carried[-1]))
        if not len(final):
            return None
        return self._sequence(origin, int(final[0] if objective == "time" else final[-1]))

    def _sequence(self, origin: Array, tick: int) -> Sequence:
        number, sets, again = len(self._member) - 1, list[int](), tick * self._tick
        while number:
            sets.append(number)
            before = int(origin[number, tick])
            tick -= int(self._again[number, before])
            number = before
        return Sequence(tuple(reversed(sets)), again)

    def drops(self, sequence: Sequence, *, keep_last: bool) -> Drops:
        """The decisions of a sequence: its borders are carried over the boundary.

        Args:
            sequence: from ``best``.
            keep_last: whether what the last segment makes is carried as well.
        """
        values = self._forward.values
        carried = {values[place] for number in sequence.sets for place in np.flatnonzero(self._border[number])}
        if keep_last and len(sequence.sets) > 1:
            inside = self._member[sequence.sets[-2]]
            carried |= {v for v in values if not inside[self._forward.scheduler.makers[v]]}
        return self._forward.drops(carried)


# --- families --------------------------------------------------------------------------------------------------------


def _incidence(pairs: list[tuple[int, int]], shape: tuple[int, int]) -> csr_array:
    """A sparse matrix of zeros and, at some pairs of row and column, ones."""
    from scipy.sparse import csr_array

    rows, columns = np.array(sorted(set(pairs)), dtype=np.int64).reshape(-1, 2).T
    return csr_array((np.ones(len(rows), dtype=np.float32), (rows, columns)), shape=shape)


def _bits(operations: list[int]) -> int:
    """A set of different operations as bits."""
    return sum(1 << operation for operation in operations)


def _members(masks: list[int], count: int) -> Array:
    """Ones and zeros for sets of operations (rows) that are given as bits; in single precision, for fast products."""
    width = -(-count // 8)
    packed = np.frombuffer(b"".join(mask.to_bytes(width, "little") for mask in masks), dtype=np.uint8)
    bits = np.unpackbits(packed.reshape(len(masks), width), axis=1, bitorder="little")
    return bits[:, :count].astype(np.float32)


def _borders(forward: Forward, members: Array) -> Array:
    """Which values each set hands on: read by an operation outside it, or read in backward and never made again."""
    scheduler, values = forward.scheduler, forward.values
    number = {v: place for place, v in enumerate(values)}
    pairs = [(index, number[v]) for index in range(forward.boundary) for v in scheduler.reads[index]]
    readers = _incidence(pairs, (forward.boundary, len(values)))
    outside = members @ readers < readers.sum(axis=0)
    pinned = np.array([v in forward.pinned for v in values], dtype=bool)
    made = members[:, [scheduler.makers[v] for v in values]] > 0
    border: Array = made & (outside | pinned)
    return border


def _sources(forward: Forward) -> list[list[int]]:
    """The operations of forward that each one reads from."""
    makers = forward.scheduler.makers
    found = []
    for reads in forward.scheduler.reads[: forward.boundary]:
        found.append(sorted({makers[v] for v in reads}))
    return found


def _approximate_family(forward: Forward, sources: list[list[int]]) -> Array:
    """Ancestors of each operation, and prefixes of the program's order; from nothing to everything, smaller ones first.

    Where they are more than 300, the ones with the fewest bytes on their border among some neighbours in size.
    """
    full = (1 << len(sources)) - 1
    ancestors: list[int] = []
    for index, before in enumerate(sources):
        ancestors.append(reduce(or_, (ancestors[source] for source in before), 1 << index))
    family = {*ancestors, *((1 << place) - 1 for place in range(len(sources) + 1))} - {0, full}
    ordered = sorted(family, key=lambda mask: (mask.bit_count(), mask))
    if len(ordered) > _MOST_APPROXIMATE:
        thinned = ordered[:: -(-len(ordered) // (8 * _MOST_APPROXIMATE))]
        sizes = np.array([forward.scheduler.problem.sizes[v] for v in forward.values])
        width = _borders(forward, _members(thinned, len(sources))) @ sizes
        group = -(-len(thinned) // _MOST_APPROXIMATE)
        ordered = [thinned[at + int(width[at : at + group].argmin())] for at in range(0, len(thinned), group)]
    return _members([0, *ordered, full], len(sources))


def _all_lower_sets(sources: list[list[int]]) -> Array:
    """All lower sets, smaller ones first; more than 3000 are refused."""
    needed = [_bits(before) for before in sources]
    found, pending = {0}, [0]
    while pending:
        mask = pending.pop()
        for index, before in enumerate(needed):
            larger = mask | 1 << index
            if before & mask == before and larger not in found:
                found.add(larger)
                pending.append(larger)
        if len(found) > MOST_EXACT:
            raise GraphoptError(
                f"the {len(sources)} operations of forward have more than {MOST_EXACT} lower sets, too many to compare "
                "all pairs of them; leave out exact=True"
            )
    return _members(sorted(found, key=lambda mask: (mask.bit_count(), mask)), len(sources))
