"""The data of the planner, and the simulator that judges every plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import fsum
from typing import NamedTuple

from graphopt.errors import GraphoptError, check_type, public
from graphopt.planning.planner_arguments import check_indices, check_quantity, check_seconds, check_sizes

__all__ = ["InvalidPlanError", "Operation", "Plan", "Problem", "Simulated", "repeated_seconds", "simulate"]


class InvalidPlanError(GraphoptError, ValueError):
    """A problem or a plan that cannot be: something is read before it is made, or recomputed that may not be.

    Example:
        >>> planning.simulate(problem, planning.Plan((0, 2, 1, 3, 4)))
        Traceback (most recent call last):
            ...
        graphopt.planning.problem.InvalidPlanError: ...
    """


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of a program.

    Attributes:
        reads: the values that it reads (indices).
        makes: the values that it makes; each is a storage of its own.
        seconds: how long it runs.
        scratch: bytes that it needs for itself while it runs.
        repeatable: whether running it again gives the same values and has no other effect.
        remakes: the values that running it again makes; None stands for all that it makes.
        memo: bytes that its first run leaves behind, until it has run for the last time, where it is recomputed (a
            generator's state); while it is recomputed it needs as many once more.
        overwrites: values of its one result's size, any one of which that may take the place of where nothing reads the
            value afterwards, and both are made by first runs or both by repeated ones.
        name: for people.

    Raises:
        ArgumentError: where one of them is of another type, or negative.

    Example:
        >>> planning.Operation(reads=(0,), makes=(1,), seconds=0.5, name="relu").made_again
        (1,)
    """

    reads: tuple[int, ...]
    makes: tuple[int, ...]
    seconds: float
    scratch: int = 0
    repeatable: bool = True
    remakes: tuple[int, ...] | None = None
    memo: int = 0
    overwrites: tuple[int, ...] = ()
    name: str = ""

    def __post_init__(self) -> None:
        for field_name in ("reads", "makes", "overwrites"):
            check_indices(f"Operation's {field_name}", getattr(self, field_name))
        if self.remakes is not None:
            check_indices("Operation's remakes", self.remakes)
        check_seconds("Operation's seconds", self.seconds)
        check_quantity("Operation's scratch", self.scratch)
        check_quantity("Operation's memo", self.memo)

    @property
    def made_again(self) -> tuple[int, ...]:
        """The values that running it again makes."""
        return self.makes if self.remakes is None else self.remakes


@dataclass(frozen=True, slots=True)
class Problem:
    """A program as the planner sees it: operations in the order in which they run.

    Attributes:
        operations: in order. Their first runs keep that order in every plan.
        sizes: bytes of each value.
        resident: bytes that are there all the time (parameters, optimizer state, the batch).
        held: values that stay alive at least until an operation (index) has run; the number of operations means to the
            end. They are never recomputed.
        boundary: the index of the first operation of backward; what is made before and read after it is what plans
            decide about first. 0 takes the place where the most bytes are alive.
        names: of the values, for people.

    Raises:
        ArgumentError: where one of them is of another type, or negative.
        InvalidPlanError: where operations read what is not made before, or sizes are missing.

    Example:
        >>> first, second = planning.Operation((), (0,), 1.0), planning.Operation((0,), (1,), 5.0)
        >>> backward = planning.Operation((1, 0), (2,), 1.0)
        >>> problem = planning.Problem((first, second, backward), sizes=(80, 100, 10), boundary=2)
        >>> problem.seconds, problem.sizes
        (7.0, (80, 100, 10))
    """

    operations: tuple[Operation, ...]
    sizes: tuple[int, ...]
    resident: int = 0
    held: Mapping[int, int] = field(default_factory=dict)
    boundary: int = 0
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_type("Problem's operations", self.operations, tuple, "a tuple of Operations, in order")
        for index, operation in enumerate(self.operations):
            check_type(f"Problem's operations[{index}]", operation, Operation, "an Operation(reads, makes, seconds)")
        check_sizes(self.sizes, self.held)
        check_quantity("Problem's resident", self.resident)
        check_type("Problem's boundary", self.boundary, int, "the index of the first operation of backward")
        made: set[int] = set()
        for index, operation in enumerate(self.operations):
            unmade = [value for value in operation.reads if value not in made]
            if unmade:
                raise InvalidPlanError(f"{_called(self, index)} reads value {unmade[0]} before it is made")
            for value in operation.makes:
                if value in made:
                    raise InvalidPlanError(f"{_called(self, index)} makes value {value}, which exists already")
                made.add(value)
        if made != set(range(len(self.sizes))):
            raise InvalidPlanError(f"{len(self.sizes)} sizes are given for {len(made)} values that operations make")
        if not 0 <= self.boundary <= len(self.operations):
            raise InvalidPlanError(f"boundary {self.boundary} is not one of the {len(self.operations)} operations")

    @property
    def makers(self) -> list[int]:
        """The operation that makes each value."""
        found = [0] * len(self.sizes)
        for index, operation in enumerate(self.operations):
            for value in operation.makes:
                found[value] = index
        return found

    @property
    def readers(self) -> list[list[int]]:
        """The operations that read each value, in order."""
        found: list[list[int]] = [[] for _ in self.sizes]
        for index, operation in enumerate(self.operations):
            for value in operation.reads:
                found[value].append(index)
        return found

    @property
    def seconds(self) -> float:
        """How long all operations take, each run once."""
        return sum(operation.seconds for operation in self.operations)

    def may_repeat(self, index: int) -> bool:
        """Whether an operation may be recomputed: it is repeatable, and nothing that it would make again is held."""
        operation = self.operations[index]
        return operation.repeatable and self.held.keys().isdisjoint(operation.made_again)

    def droppable(self) -> list[bool]:
        """Whether each value can be dropped, because it can be made again."""
        found = [False] * len(self.sizes)
        for index, operation in enumerate(self.operations):
            if self.may_repeat(index):
                for value in operation.made_again:
                    found[value] = True
        return found


@dataclass(frozen=True, slots=True)
class Plan:
    """How to run a problem: operations (indices) in the order in which they run, each at least once.

    A value lives from the run that makes it to its last read before it is made again. A plan without repeats is the
    program as it is.

    Example:
        >>> planning.Plan((0, 1, 2, 0, 3)).repeats()
        [0]
    """

    steps: tuple[int, ...]

    def __post_init__(self) -> None:
        check_type("Plan's steps", self.steps, (tuple, list), "a tuple of operations (indices) in the order of running")

    def repeats(self) -> list[int]:
        """The operations that are recomputed, in the order of these runs."""
        seen: set[int] = set()
        again = []
        for step in self.steps:
            if step in seen:
                again.append(step)
            seen.add(step)
        return again


@dataclass(frozen=True, slots=True)
class Simulated:
    """What a plan takes.

    Attributes:
        plan: what was simulated.
        bytes: alive at each step: the problem's resident bytes, inputs, results and scratch of the step, and all else.
        peak: the most of them.
        seconds: of all steps.
        again: seconds of the steps that are recomputed.

    Example:
        >>> plain = planning.simulate(problem, planning.Plan((0, 1, 2, 3, 4)))
        >>> plain.peak, plain.seconds, plain.again
        (200, 9.0, 0.0)
    """

    plan: Plan
    bytes: list[int]
    peak: int
    seconds: float
    again: float


class Lifetime(NamedTuple):
    """One life of a value: from the step that makes it to the last one that touches it, or that it is held for."""

    value: int
    first: int
    last: int


def lifetimes(problem: Problem, steps: Sequence[int]) -> list[Lifetime]:
    """The lives of everything that a sequence of runs makes.

    Raises:
        InvalidPlanError: where a step reads what is not made yet, an operation never runs, the order of first runs is
            another than the program's, or something is recomputed that may not.
    """
    runner = _Runner(problem)
    for place, step in enumerate(steps):
        runner.run(place, step)
    runner.end(len(steps))
    return [Lifetime(value, *span) for value, span in zip(runner.values, runner.spans, strict=True)]


class _Runner:
    """Runs steps one after the other, and keeps the lives of what they make.

    Attributes:
        values: that were made, in this order.
        spans: the first and the last step of the life of each.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.values: list[int] = []
        self.spans: list[list[int]] = []
        self._newest: dict[int, list[int]] = {}
        self._first_runs: list[int] = []

    def run(self, place: int, step: int) -> None:
        """Run an operation at a place in the plan."""
        operation = self._problem.operations[step]
        for value in operation.reads:
            if value not in self._newest:
                raise InvalidPlanError(f"step {place} runs {_called(self._problem, step)} before value {value} is made")
            self._newest[value][1] = place
        repeated = 0 <= step < len(self._first_runs)
        if repeated and not self._problem.may_repeat(step):
            raise InvalidPlanError(f"step {place} runs {_called(self._problem, step)} again, and it may run once only")
        for value in operation.made_again if repeated else operation.makes:
            self._newest[value] = [place, place]
            self.values.append(value)
            self.spans.append(self._newest[value])
        if not repeated:
            self._run_first(place, step)

    def _run_first(self, place: int, step: int) -> None:
        due = len(self._first_runs)
        if step != due:
            raise InvalidPlanError(
                f"step {place} runs {_called(self._problem, step)} where {_called(self._problem, due)} is due: "
                "first runs keep the program's order"
            )
        self._first_runs.append(place)

    def end(self, steps: int) -> None:
        """Behind the last step: what is held lives at least as long as it has to."""
        first_runs, count = self._first_runs, len(self._problem.operations)
        if len(first_runs) != count:
            raise InvalidPlanError(f"{_called(self._problem, len(first_runs))} never runs")
        for value, until in self._problem.held.items():
            span = self._newest[value]
            span[1] = max(span[1], first_runs[until] if until < count else steps - 1)


def _saved_in_place(problem: Problem, steps: Sequence[int], lives: Sequence[Lifetime]) -> dict[int, int]:
    """Bytes that a step does not need because its result takes the place of a value, by step."""
    ends = {(life.value, life.last): life.first for life in lives}
    found: dict[int, int] = {}
    first_run = _first_runs(steps)
    made_again = [first_run[step] != place for place, step in enumerate(steps)]
    for place, step in enumerate(steps):
        for value in problem.operations[step].overwrites:
            first = ends.get((value, place))
            if first is not None and made_again[first] == made_again[place]:
                found[place] = problem.sizes[value]
    return found


def _first_runs(steps: Sequence[int]) -> dict[int, int]:
    """Where each operation runs for the first time."""
    found: dict[int, int] = {}
    for place, step in enumerate(steps):
        found.setdefault(step, place)
    return found


def _called(problem: Problem, index: int) -> str:
    return f"operation {index} ({problem.operations[index].name or 'unnamed'})"


@public
def simulate(problem: Problem, plan: Plan) -> Simulated:
    """What a plan takes, exactly.

    Raises:
        ArgumentError: for what is no problem or no plan.
        InvalidPlanError: for a plan that cannot run.

    Example:
        >>> planning.simulate(problem, planning.Plan((0, 1, 2, 0, 3, 4))).again
        1.0
    """
    check_type("simulate's problem", problem, Problem, "a planning.Problem")
    check_type("simulate's plan", plan, Plan, "a planning.Plan", "write Plan(steps)")
    steps, operations = plan.steps, problem.operations
    lives = lifetimes(problem, steps)
    saved = _saved_in_place(problem, steps, lives)
    extra = [operations[step].scratch - saved.get(place, 0) for place, step in enumerate(steps)]
    change = [0] * (len(steps) + 1)
    for value, first, last in lives:
        change[first] += problem.sizes[value]
        change[last + 1] -= problem.sizes[value]
    first_run = _first_runs(steps)
    last_run = {step: place for place, step in enumerate(steps)}
    for place, step in enumerate(steps):
        if place != first_run[step]:
            extra[place] += operations[step].memo
    for step, place in last_run.items():
        if place != first_run[step]:
            change[first_run[step]] += operations[step].memo
            change[place + 1] -= operations[step].memo
    alive = [problem.resident + count + more for count, more in zip(accumulate(change[:-1]), extra, strict=True)]
    again = repeated_seconds(steps, [operation.seconds for operation in operations])
    return Simulated(plan, alive, max(alive, default=problem.resident), problem.seconds + again, again)


def repeated_seconds(steps: Sequence[int], seconds: Sequence[float]) -> float:
    """Seconds of the steps that are recomputed; rounded once, so that their order does not matter.

    Args:
        steps: whose first runs are in the program's order.
        seconds: of each operation.
    """
    again: list[float] = []
    upcoming = 0
    for step in steps:
        if step == upcoming:
            upcoming += 1
        else:
            again.append(seconds[step])
    return fsum(again)
