"""The data of the planner, and the simulator that judges every plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

__all__ = ["InvalidPlanError", "Operation", "Plan", "Problem", "Simulated", "simulate"]


class InvalidPlanError(ValueError):
    """A problem or a plan that cannot be: something is read before it is made, or run again that may not be."""


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
        memo: bytes that its first run leaves behind, until it has run for the last time, where it runs again (a
            generator's state); while it runs again it needs as many once more.
        overwrites: values of its one result's size, any one of which that may take the place of where nothing reads the
            value afterwards, and both are made by first runs or both by repeated ones.
        name: for people.
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
            end. They are never run again.
        boundary: the index of the first operation of backward; what is made before and read after it is what plans
            decide about first. 0 takes the place where the most bytes are alive.
        names: of the values, for people.
    """

    operations: tuple[Operation, ...]
    sizes: tuple[int, ...]
    resident: int = 0
    held: Mapping[int, int] = field(default_factory=dict)
    boundary: int = 0
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        made: set[int] = set()
        for index, operation in enumerate(self.operations):
            for value in operation.reads:
                if value not in made:
                    raise InvalidPlanError(
                        f"operation {index} ({operation.name or 'unnamed'}) reads value {value} before it is made"
                    )
            for value in operation.makes:
                if value in made:
                    raise InvalidPlanError(
                        f"operation {index} ({operation.name or 'unnamed'}) makes value {value}, which exists already"
                    )
                made.add(value)
        if len(made) != len(self.sizes) or made != set(range(len(self.sizes))):
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
    def seconds(self) -> float:
        """How long all operations take, each run once."""
        return sum(operation.seconds for operation in self.operations)

    def droppable(self) -> list[bool]:
        """Whether each value can be dropped, because it can be made again."""
        found = [False] * len(self.sizes)
        for operation in self.operations:
            if operation.repeatable and not any(value in self.held for value in operation.made_again):
                for value in operation.made_again:
                    found[value] = True
        return found


@dataclass(frozen=True, slots=True)
class Plan:
    """How to run a problem: operations (indices) in the order in which they run, each at least once.

    A value lives from the run that makes it to its last read before it is made again. A plan without repeats is the
    program as it is.
    """

    steps: tuple[int, ...]

    def repeats(self) -> list[int]:
        """The operations that run again, in the order of these runs."""
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
        again: seconds of the steps that run again.
    """

    plan: Plan
    bytes: list[int]
    peak: int
    seconds: float
    again: float


def lifetimes(problem: Problem, steps: Sequence[int]) -> list[tuple[int, int, int]]:
    """(value, first step, last step) of everything that a sequence of runs makes.

    Raises:
        InvalidPlanError: where a step reads what is not made yet, an operation never runs, the order of first runs is
            another than the program's, or something runs again that may not.
    """
    operations = problem.operations
    current = [-1] * len(problem.sizes)
    lives: list[list[int]] = []
    position: dict[int, int] = {}
    for place, step in enumerate(steps):
        operation = operations[step]
        for value in operation.reads:
            if current[value] < 0:
                raise InvalidPlanError(f"step {place} runs {_called(problem, step)} before value {value} is made")
            lives[current[value]][2] = place
        repeated = step in position
        if repeated and (not operation.repeatable or any(value in problem.held for value in operation.made_again)):
            raise InvalidPlanError(f"step {place} runs {_called(problem, step)} again, and it may run once only")
        for value in operation.made_again if repeated else operation.makes:
            current[value] = len(lives)
            lives.append([value, place, place])
        if not repeated and step != len(position):
            raise InvalidPlanError(
                f"step {place} runs {_called(problem, step)} where {_called(problem, len(position))} is due: "
                "first runs keep the program's order"
            )
        position.setdefault(step, place)
    if len(position) != len(operations):
        raise InvalidPlanError(f"{_called(problem, len(position))} never runs")
    for value, until in problem.held.items():
        end = position[until] if until < len(operations) else len(steps) - 1
        life = lives[current[value]]
        life[2] = max(life[2], end)
    return [(value, first, last) for value, first, last in lives]


def _saved_in_place(problem: Problem, steps: Sequence[int], lives: Sequence[tuple[int, int, int]]) -> dict[int, int]:
    """Bytes that a step does not need because its result takes the place of a value, by step."""
    ends = {(value, last): first for value, first, last in lives}
    found: dict[int, int] = {}
    first_run = {step: place for place, step in reversed(list(enumerate(steps)))}
    made_again = [first_run[step] != place for place, step in enumerate(steps)]
    for place, step in enumerate(steps):
        for value in problem.operations[step].overwrites:
            first = ends.get((value, place))
            if first is not None and made_again[first] == made_again[place]:
                found[place] = problem.sizes[value]
    return found


def _called(problem: Problem, index: int) -> str:
    return f"operation {index} ({problem.operations[index].name or 'unnamed'})"


def simulate(problem: Problem, plan: Plan) -> Simulated:
    """What a plan takes, exactly.

    Raises:
        InvalidPlanError: for a plan that cannot run.
    """
    steps, operations = plan.steps, problem.operations
    change = [0] * (len(steps) + 1)
    lives = lifetimes(problem, steps)
    for value, first, last in lives:
        change[first] += problem.sizes[value]
        change[last + 1] -= problem.sizes[value]
    first_run: dict[int, int] = {}
    last_run: dict[int, int] = {}
    saved = _saved_in_place(problem, steps, lives)
    extra = [operations[step].scratch - saved.get(place, 0) for place, step in enumerate(steps)]
    for place, step in enumerate(steps):
        if step in first_run:
            last_run[step] = place
            extra[place] += operations[step].memo
        first_run.setdefault(step, place)
    for step, place in last_run.items():
        change[first_run[step]] += operations[step].memo
        change[place + 1] -= operations[step].memo
    alive = [
        count + more for count, more in zip(accumulate(change[:-1], initial=problem.resident), (0, *extra), strict=True)
    ]
    seconds = sum(operations[step].seconds for step in steps)
    return Simulated(plan, alive[1:], max(alive[1:], default=problem.resident), seconds, seconds - problem.seconds)
