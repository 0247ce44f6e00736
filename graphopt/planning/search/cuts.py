"""Minimum cuts: what to carry over a moment, and what to make again after it, at given prices of memory.

For fixed prices the choice that minimises "seconds of what is recomputed + price x bytes carried" is a minimum cut. The
prices, one for each moment of the program, are found by raising them where the simulated plan takes more than the
budget and lowering them where it takes less.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from graphopt.planning.problem import Problem, Simulated
from graphopt.planning.simulation.schedule import Decision, Drops, Scheduler

__all__ = ["CutNetwork", "priced_cuts"]

_SOURCE, _SINK = 0, 1
_INFINITE = 2**31 - 1
_TOTAL = 2**30
"""The sum of all finite capacities: scipy's flows are 32-bit integers."""


class CutNetwork:
    """The choice at one moment as a flow network: nodes are operations and values made before it.

    An operation on the sink's side is recomputed after the moment; a value on the sink's side whose operation is on the
    source's side is carried over it.
    """

    def __init__(self, scheduler: Scheduler, moment: int) -> None:
        problem = scheduler.problem
        self.moment = moment
        self.scheduler = scheduler
        needed = {v for operation in problem.operations[moment:] for v in operation.reads}
        self.needed = sorted(v for v in needed if scheduler.makers[v] < moment)
        self.values, self.operations = self._relevant()
        self._number = {v: 2 + index for index, v in enumerate(self.values)}
        base = 2 + len(self.values)
        self._op_number = {o: base + index for index, o in enumerate(self.operations)}
        self._build()
        self.last_before, self.first_after = self._windows()

    def _relevant(self) -> tuple[list[int], list[int]]:
        """The values and operations that what is needed after the moment can be made from."""
        scheduler = self.scheduler
        values, operations = set(self.needed), set[int]()
        pending = list(self.needed)
        while pending:
            maker = scheduler.makers[pending.pop()]
            if maker in operations:
                continue
            operations.add(maker)
            if scheduler.problem.operations[maker].repeatable:
                fresh = [v for v in scheduler.reads[maker] if v not in values]
                values.update(fresh)
                pending += fresh
        return sorted(values), sorted(operations)

    def _build(self) -> None:
        """The edges: values from their operations, operations from the source, the sink from values, reads."""
        scheduler = self.scheduler
        edges = [(self._op_number[scheduler.makers[value]], self._number[value]) for value in self.values]
        edges += [(_SOURCE, self._op_number[operation]) for operation in self.operations]
        edges += [(self._number[value], _SINK) for value in self.needed]
        for operation in self.operations:
            if scheduler.problem.operations[operation].repeatable:
                edges += [(self._number[v], self._op_number[operation]) for v in scheduler.reads[operation]]
        self._rows, self._columns = np.array(edges, dtype=np.int64).reshape(-1, 2).T
        self._size = 2 + len(self.values) + len(self.operations)
        self._run = np.array([scheduler.seconds[o] for o in self.operations])
        self._fixed = np.array([not self._free(o) for o in self.operations])

    def _free(self, operation: int) -> bool:
        """Whether all that an operation makes can be made again."""
        return all(self.scheduler.droppable[v] for v in self.scheduler.makes[operation])

    def _windows(self) -> tuple[np.ndarray, np.ndarray]:
        """For each value: the last operation before the moment that reads it, and the first after it that needs it."""
        scheduler, moment = self.scheduler, self.moment
        count = len(scheduler.reads)
        last, first = {}, {}
        for value in self.values:
            readers = scheduler.readers(value)
            last[value] = max((at for at in readers if at < moment), default=scheduler.makers[value])
            first[value] = min((at for at in readers if at >= moment), default=count)
        for operation in reversed(self.operations):
            soonest = min((first[v] for v in scheduler.makes[operation] if v in first), default=count)
            for value in scheduler.reads[operation]:
                if value in first:
                    first[value] = min(first[value], soonest)
        return np.array(list(last.values())), np.array(list(first.values()))

    def carried(self, prices: np.ndarray) -> set[int]:
        """The values to carry over the moment.

        Args:
            prices: seconds per byte for each operation during which a byte is carried, shape (operations,).
        """
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        total = np.concatenate([[0.0], np.cumsum(prices)])
        window = total[np.minimum(self.first_after + 1, len(prices))] - total[self.last_before]
        sizes = np.array([self.scheduler.problem.sizes[v] for v in self.values])
        keep = sizes * window
        finite = float(keep.sum() + self._run[~self._fixed].sum()) or 1.0
        scale = _TOTAL / finite
        keep_units = np.maximum(1, keep * scale).astype(np.int32)
        run_units = np.where(self._fixed, _INFINITE, np.maximum(1, self._run * scale)).astype(np.int32)
        rest = np.full(len(self._rows) - len(keep_units) - len(run_units), _INFINITE, dtype=np.int32)
        capacity = csr_array(
            (np.concatenate([keep_units, run_units, rest]), (self._rows, self._columns)), shape=(self._size, self._size)
        )
        flow = maximum_flow(capacity, _SOURCE, _SINK).flow
        residual = capacity - flow
        residual.eliminate_zeros()
        reached = np.zeros(self._size, dtype=bool)
        reached[breadth_first_order(residual, _SOURCE, directed=True, return_predecessors=False)] = True
        makers = self.scheduler.makers
        return {v for v in self.values if not reached[self._number[v]] and reached[self._op_number[makers[v]]]}

    def drops(self, carried: set[int]) -> Drops:
        """The decisions that carry just these values over the moment."""
        droppable, moment = self.scheduler.droppable, self.moment
        made = [v for v, maker in enumerate(self.scheduler.makers) if maker < moment]
        return frozenset(Decision(moment, v) for v in made if v not in carried and droppable[v])


def by_operation(problem: Problem, simulated: Simulated) -> np.ndarray:
    """The most bytes alive from the end of one operation's first run to the end of the next one's."""
    found = np.zeros(len(problem.operations))
    upcoming = 0
    most = 0
    for step, count in zip(simulated.plan.steps, simulated.bytes, strict=True):
        most = max(most, count)
        if step == upcoming:
            found[step] = most
            most = 0
            upcoming += 1
    return found


def priced_cuts(
    network: CutNetwork, budget: int, *, start: float, rounds: int, power: float = 8.0
) -> Iterator[tuple[Drops, Simulated]]:
    """Plans from prices that are adapted round by round to a budget in bytes.

    Args:
        network: the choice at the boundary.
        budget: bytes.
        start: the first price of all moments, as a multiple of (all seconds / all bytes carried).
        rounds: how many.
        power: how hard prices react in the first round; later rounds react less.
    """
    problem = network.scheduler.problem
    sizes = np.array([problem.sizes[v] for v in network.values])
    spans = network.first_after - network.last_before + 1
    prices = np.full(len(problem.operations), start * max(problem.seconds, 1e-12) / max(1.0, float(sizes @ spans)))
    seen: set[frozenset[int]] = set()
    for number in range(rounds):
        carried = frozenset(network.carried(prices))
        drops = network.drops(set(carried))
        simulated = network.scheduler.evaluate(drops)
        if carried not in seen:
            seen.add(carried)
            yield drops, simulated
        ratio = by_operation(problem, simulated) / budget
        exponent = power / (1 + number / 8)
        prices = prices * np.clip(np.power(np.maximum(ratio, 1e-3), exponent), 0.5, 2.0)
        floor = prices.max() * 1e-6
        prices = np.maximum(prices, floor)
