"""Problems for the planner's tests: random training-like ones, published ones; and an exhaustive search."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from hypothesis import strategies as st

from graphopt.planning import Operation, Plan, Problem
from graphopt.planning.simulation.schedule import Decision, Drops

Pick = Callable[[int, int], int]
"""Draws an integer between two, both included."""

PUBLISHED = ("resnet50", "unet", "googlenet", "densenet")


class PublishedPlan(NamedTuple):
    """What a plan of the graphs' authors takes: bytes at its peak, and the share of forward's seconds recomputed."""

    peak: int
    again: float


PUBLISHED_PLANS = {
    "resnet50": (PublishedPlan(1_052_000_000, 0.971), PublishedPlan(1_316_000_000, 0.453)),
    "unet": (PublishedPlan(4_370_000_000, 0.913), PublishedPlan(5_468_000_000, 0.571)),
    "googlenet": (PublishedPlan(413_000_000, 0.973), PublishedPlan(495_000_000, 0.713)),
    "densenet": (PublishedPlan(1_299_000_000, 0.893), PublishedPlan(1_672_000_000, 0.582)),
}
"""For each graph the plan of their approximate dynamic programme with the lowest peak over all its budgets (its
memory-centric objective), and the one with the fewest seconds at the smallest budget that it can keep (time-centric);
simulated by their own program, values freed after their last use, gradients of parameters alive until the end."""


# --- random ----------------------------------------------------------------------------------------------------------


@dataclass
class _Maker:
    """Builds a training-like problem from draws."""

    pick: Pick
    operations: list[Operation] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def chance(self, percent: int) -> bool:
        return self.pick(1, 100) > 100 - percent

    def some(self, of: list[int], at_most: int, at_least: int = 0) -> list[int]:
        chosen: list[int] = []
        for _ in range(min(len(of), self.pick(at_least, at_most))):
            # recent values are read more often than old ones
            place = max(self.pick(0, len(of) - 1), self.pick(0, len(of) - 1))
            if of[place] not in chosen:
                chosen.append(of[place])
        return chosen

    def value(self) -> int:
        self.sizes.append(self.pick(1, 20))
        return len(self.sizes) - 1

    def add(self, reads: list[int], makes: list[int], name: str, *, plain: bool) -> None:
        remakes = tuple(makes[:1]) if not plain and len(makes) > 1 and self.chance(30) else None
        self.operations.append(
            Operation(
                tuple(reads),
                tuple(makes),
                float(self.pick(1, 10)),
                scratch=0 if plain or self.chance(70) else self.pick(1, 10),
                repeatable=plain or not self.chance(10),
                remakes=remakes,
                memo=0 if plain or self.chance(85) else self.pick(1, 5),
                name=name,
            )
        )


def training_problem(pick: Pick, *, fewest: int = 6, most: int = 12, plain: bool = False) -> Problem:
    """A random forward program and its backward.

    Args:
        pick: where randomness comes from.
        fewest: operations of forward at least.
        most: and at most.
        plain: leave out scratch, memos, what may not be recomputed, and what recomputing does not make.
    """
    maker = _Maker(pick)
    values: list[int] = []
    for index in range(pick(fewest, most)):
        reads = maker.some(values, 3, 1)
        makes = [maker.value() for _ in range(2 if maker.chance(20) else 1)]
        maker.add(reads, makes, f"f{index}", plain=plain)
        values += makes
    boundary = len(maker.operations)
    gradients: dict[int, int] = {}
    held: dict[int, int] = {}
    for index in reversed(range(boundary)):
        forward = maker.operations[index]
        reads = [gradients[v] for v in forward.makes if v in gradients]
        reads += [v for v in (*forward.reads, *forward.makes) if maker.chance(50)]
        makes = []
        for value in forward.reads:
            if value in gradients:
                reads.append(gradients[value])
            gradients[value] = maker.value()
            makes.append(gradients[value])
        if not makes or maker.chance(20):
            makes.append(maker.value())
            held[makes[-1]] = 2 * boundary
        maker.add(list(dict.fromkeys(reads)), makes, f"b{index}", plain=plain)
    return Problem(tuple(maker.operations), tuple(maker.sizes), resident=pick(0, 10), held=held, boundary=boundary)


def seeded_problem(seed: int, *, fewest: int = 6, most: int = 12, plain: bool = False) -> Problem:
    """The random problem with this number."""
    return training_problem(random.Random(seed).randint, fewest=fewest, most=most, plain=plain)


@st.composite
def problems(draw: st.DrawFn, *, fewest: int = 2, most: int = 8, plain: bool = False) -> Problem:
    """Random training-like problems."""
    return training_problem(lambda low, high: draw(st.integers(low, high)), fewest=fewest, most=most, plain=plain)


def overwriting(problem: Problem) -> Problem:
    """The same problem, with the only result of every second operation of forward as large as what it may overwrite."""
    sizes, operations = list(problem.sizes), list(problem.operations)
    for index, operation in enumerate(operations[: problem.boundary : 2]):
        if len(operation.makes) == 1 and operation.reads:
            sizes[operation.makes[0]] = sizes[operation.reads[0]]
            same = tuple(value for value in operation.reads if sizes[value] == sizes[operation.reads[0]])
            operations[2 * index] = replace(operation, overwrites=same)
    return replace(problem, operations=tuple(operations), sizes=tuple(sizes))


@st.composite
def drops_of(draw: st.DrawFn, problem: Problem) -> Drops:
    """Random decisions about a problem, sensible or not: to drop a value, and to make it again early."""
    moment, value = st.integers(0, len(problem.operations) - 1), st.integers(0, len(problem.sizes) - 1)
    return draw(st.frozensets(st.builds(Decision, moment, value, st.booleans()), max_size=12))


def chain(length: int, *, sizes: list[int] | None = None, seconds: list[float] | None = None) -> Problem:
    """A chain of operations and its backward: each one reads its input and the gradient of its output."""
    sizes, seconds = sizes or [1] * length, seconds or [1.0] * length
    forward = [Operation((i - 1,) if i else (), (i,), seconds[i], name=f"f{i}") for i in range(length)]
    backward = []
    for index in reversed(range(1, length)):
        # the gradient of value i has number 2 * length - 1 - i; the last value's is made by the loss's own backward
        backward.append(
            Operation((index - 1, 2 * length - 1 - index), (2 * length - index,), seconds[index], name=f"b{index}")
        )
    loss = Operation((length - 1,), (length,), 0.0, name="loss")
    return Problem((*forward, loss, *backward), (*sizes, *reversed(sizes)), boundary=length)


# --- published -------------------------------------------------------------------------------------------------------


class _Row(NamedTuple):
    """One line of a file in ``tests/data``; see ``published.py`` there."""

    kind: str
    reads: list[int]
    made: list[int]
    again: list[int]
    towards: list[int]
    others: list[int]


def published_problem(name: str) -> Problem:
    """One of the published graphs of ``tests/data`` (see ``published.py`` there), with its backward.

    A convolution takes 10 seconds and any other operation 1; backward takes none and runs once. A gradient that several
    operations add to is made by the first of them; those of parameters and network inputs stay until the end.
    """
    rows = []
    for line in (Path(__file__).parent / "data" / f"{name}.txt").read_text().splitlines():
        if not line.startswith("#"):
            kind, *lists = line.split("|")
            rows.append(_Row(kind, *([int(number) for number in part.split()] for part in lists)))
    operations: list[Operation] = []
    sizes: list[int] = []
    makes: list[list[int]] = []
    for row in rows:
        makes.append(list(range(len(sizes), len(sizes) + len(row.made))))
        sizes += row.made
        seconds = 10.0 if row.kind.startswith("Conv") else 1.0
        operations.append(Operation(tuple(row.reads), tuple(makes[-1]), seconds, name=row.kind))
    boundary = len(operations)
    gradients: dict[int, int] = {}
    held: dict[int, int] = {}
    for row, outputs in zip(reversed(rows), reversed(makes), strict=True):
        needed = [gradients[v] for v in outputs if v in gradients] + row.again
        needed += [gradients[v] for v in row.towards if v in gradients]
        fresh = [v for v in row.towards if v not in gradients]
        gradients.update((v, len(sizes) + place) for place, v in enumerate(fresh))
        sizes += [sizes[v] for v in fresh]
        lasting = range(len(sizes), len(sizes) + len(row.others))
        held.update(dict.fromkeys(lasting, 2 * boundary))
        sizes += row.others
        operations.append(
            Operation(
                tuple(dict.fromkeys(needed)),
                (*(gradients[v] for v in fresh), *lasting),
                0.0,
                repeatable=False,
                name=f"d{row.kind}",
            )
        )
    return Problem(tuple(operations), tuple(sizes), held=held, boundary=boundary)


# --- exhaustive ------------------------------------------------------------------------------------------------------


_State = tuple[int, frozenset[int]]
"""How many first runs are done, and what is alive."""


class Exhaustive:
    """The cheapest plan of a tiny problem, by Dijkstra's algorithm over (first runs done, what is alive).

    Every plan that keeps the order of first runs is among those that are looked at: what is recomputed may be so at any
    time, in any order, any number of times. A memo is a thing alive like any other, which nothing makes again.
    """

    def __init__(self, problem: Problem, budget: int) -> None:
        self._problem, self._budget = problem, budget
        self._values = len(problem.sizes)
        self._sizes = [*problem.sizes, *(operation.memo for operation in problem.operations)]
        self._held = problem.held
        self._lasting = [
            operation.repeatable and not any(value in problem.held for value in operation.made_again)
            for operation in problem.operations
        ]

    def search(self) -> Plan | None:
        """The plan, or None where nothing fits into the budget."""
        count = len(self._problem.operations)
        start: _State = (0, frozenset())
        best = {start: 0.0}
        came: dict[_State, tuple[_State, int]] = {}
        queue: list[tuple[float, int, _State]] = [(0.0, 0, start)]
        pushed = 0
        while queue:
            seconds, _, state = heapq.heappop(queue)
            if seconds > best[state]:
                continue
            if state[0] == count:
                return self._plan(state, came)
            for step, following in self._moves(*state):
                total = seconds + self._problem.operations[step].seconds
                if total < best.get(following, float("inf")):
                    best[following] = total
                    came[following] = (state, step)
                    pushed += 1
                    heapq.heappush(queue, (total, pushed, following))
        return None

    @staticmethod
    def _plan(state: _State, came: dict[_State, tuple[_State, int]]) -> Plan:
        steps = []
        while state in came:
            state, step = came[state]
            steps.append(step)
        return Plan(tuple(reversed(steps)))

    def _moves(self, done: int, alive: frozenset[int]) -> Iterator[tuple[int, _State]]:
        operations = self._problem.operations
        for step in range(done + 1):
            operation = operations[step]
            if not alive.issuperset(operation.reads):
                continue
            memo = self._values + step
            if step == done:
                made = {*operation.makes, *((memo,) if self._lasting[step] and operation.memo else ())}
                fixed = {*operation.reads, *operation.makes}
                extra = operation.scratch
            elif self._lasting[step] and (not operation.memo or memo in alive):
                made = set(operation.made_again)
                if alive.issuperset(made):
                    continue
                fixed = {*operation.reads, *made, *((memo,) if operation.memo else ())}
                extra = operation.scratch + operation.memo
            else:
                continue
            after = done + (step == done)
            for kept in self._fitting(alive | made, fixed | self._bound(done), extra):
                yield step, (after, self._useful(after, kept))

    def _bound(self, done: int) -> set[int]:
        """What is held while these first runs are done: up to and including the run of the operation it is held for."""
        makers = self._problem.makers
        return {value for value, until in self._held.items() if makers[value] < done <= until}

    def _fitting(self, alive: frozenset[int], fixed: set[int], extra: int) -> Iterator[frozenset[int]]:
        """The largest parts of what is alive that fit into the budget."""
        total = self._problem.resident + extra + sum(self._sizes[v] for v in alive)
        loose = sorted((v for v in alive if v not in fixed and self._sizes[v]), key=lambda v: self._sizes[v])

        def remove(place: int, excess: int, smallest: int, kept: frozenset[int]) -> Iterator[frozenset[int]]:
            if excess <= 0:
                if smallest + excess > 0:  # no removed thing could have stayed
                    yield kept
                return
            for index in range(place, len(loose)):
                size = self._sizes[loose[index]]
                yield from remove(index + 1, excess - size, min(smallest, size), kept - {loose[index]})

        yield from remove(0, total - self._budget, 10**18, alive)

    def _useful(self, done: int, alive: frozenset[int]) -> frozenset[int]:
        """What may still be read, or is held: the rest dies at once."""
        operations = self._problem.operations
        kept = {v for v, until in self._held.items() if v in alive and done <= until}
        for step, operation in enumerate(operations):
            if step >= done:
                kept.update(operation.reads)
            elif self._lasting[step]:
                kept.update(operation.reads)
                if operation.memo:
                    kept.add(self._values + step)
        return alive & kept
