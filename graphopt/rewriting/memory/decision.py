"""What FitMemory decides about a program: nothing and why, updates that are moved, a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from graphopt.analysis.costs.cost import costs_of
from graphopt.analysis.program_replay import reserved_where_cached
from graphopt.ir.node import info
from graphopt.ir.program import Program
from graphopt.ir.timeline import MemoryTimeline
from graphopt.rewriting.memory.budget import BudgetError, within_already
from graphopt.rewriting.memory.checkpoint_segments import is_asked_for
from graphopt.rewriting.memory.named_plan import NamedPlan
from graphopt.rewriting.memory.other_sizes import written_sizes
from graphopt.rewriting.memory.planned import Planned, plan_of
from graphopt.rewriting.memory.preparation import Prepared, prepared
from graphopt.rewriting.pass_ import Changed
from graphopt.rewriting.progress import measuring

__all__ = ["Decision", "OwnSegments", "Told", "carry", "carry_out", "or_own_segments", "own_segments", "taken_bytes"]


@dataclass(frozen=True, slots=True)
class Told:
    """A decision as plain data, for other ranks."""

    reason: str
    counts: Mapping[str, int]
    plan: NamedPlan | None
    lines: tuple[str, ...]
    prepares: bool
    reorders: bool
    undoes: bool


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to be done to a program.

    Attributes:
        reason: why nothing is.
        found: the plan.
        prepared: what was done before it was planned.
        note: what a user should read beside.
    """

    reason: str = ""
    found: Planned | None = None
    prepared: Prepared | None = None
    note: str = ""

    @property
    def also(self) -> tuple[str, ...]:
        """What was done beside the plan, for people."""
        note = (self.note,) if self.note else ()
        if self.prepared is None:
            return note
        segments = self.prepared.segments
        return (*note, *([] if segments is None else [segments.line(self._again)]), *self.prepared.lines)

    @property
    def counts(self) -> dict[str, int]:
        """How much of that there is; beside a plan, what becomes of the model's own segments."""
        if self.prepared is None:
            return {}
        changes, early, segments = self.prepared.changes, self.prepared.early, self.prepared.segments
        counts = {} if segments is None else segments.counts(self._again)
        if self.found is not None:
            return counts
        counts |= {"changes before planning": len(changes)} if changes else {}
        return counts if early is None else {**counts, "updates moved": len(early.early)}

    @property
    def _again(self) -> list[str]:
        return [] if self.found is None else self.found.plan.again

    @property
    def told(self) -> Told:
        """What other ranks need of it."""
        plan, lines = (None, ()) if self.found is None else (self.found.plan, self.found.lines)
        ready = self.prepared
        reorders = ready is not None and ready.reordered
        undoes = ready is not None and ready.segments is not None
        return Told(self.reason, self.counts, plan, (*lines, *self.also), ready is not None, reorders, undoes)


def carry(
    program: Program, memory: MemoryTimeline, known: Sequence[Planned], budget: int, *, shared: bool
) -> Planned | None:
    """A plan for a program out of the searches for others with the same calls; None where none of them fits.

    Args:
        program: is only read.
        memory: its timeline.
        known: what was planned for the others, which is taken as it is where it fits.
        budget: in bytes.
        shared: whether it is one part's share, which differs from that of the other program.
    """
    for planned in known if not shared else ():
        if planned.plan.fits(program, budget):
            return planned
    for planned in known:
        fitting = planned.fitting.carried_to(program, memory)
        fitted = fitting.within(budget)
        if fitted is not None or shared:
            return plan_of(fitting, fitted or fitting.smallest(), budget, planned.costs)
    return None


def taken_bytes(program: Program) -> int:
    """The bytes that a budget has to have: what is reserved, where an allocator keeps freed blocks, or the peak."""
    memory = program.memory()
    reserved = reserved_where_cached(program, memory)
    return memory.peak_bytes if reserved is None else reserved.reserved_peak_bytes


@dataclass(frozen=True, slots=True)
class OwnSegments:
    """A program within a budget whose own segments are as they are.

    Attributes:
        program: with what costs no time, where it needs that.
        decision: that says so.
        seconds: that what its segments run again is expected to take.
    """

    program: Program
    decision: Decision
    seconds: float


def own_segments(program: Program, budget: int, cost: str, origin: str) -> OwnSegments | None:
    """A program with the model's own segments as they are; None where it is not within a budget.

    Args:
        program: is only read.
        budget: in bytes.
        cost: where seconds come from.
        origin: who does it, for people.
    """
    ready = None
    reason = _within(program, budget)
    if not reason:
        ready = prepared(program, origin, undo=False)
        program = ready.program
        if not _within(program, budget):
            return None
    memory = program.memory()
    with measuring() as measured:
        costs = costs_of(memory, cost, progress=measured)
    seconds = sum(each for node, each in zip(memory.nodes, costs.seconds, strict=True) if is_asked_for(node))
    note = "the model's checkpoint() segments stay as they are: no plan that was found is faster"
    return OwnSegments(program, Decision(reason, prepared=ready, note=note), seconds)


def or_own_segments(program: Program, plan: Callable[[], Decision], budget: int, cost: str, origin: str) -> Decision:
    """What is to be done to a program with segments of its own: what is fastest without them, or with them as they are.

    Args:
        program: gets the calls that it is decided about.
        plan: decides about it as if it had none, and gives it these calls.
        budget: in bytes.
        cost: where seconds come from.
        origin: who does it, for people.

    Raises:
        BudgetError: where it exceeds the budget either way.
    """
    given, decision, refused = replace(program), None, None
    try:
        decision = plan()
    except BudgetError as error:
        refused = error
    if decision is not None and decision.found is None:
        return decision
    own = own_segments(given, budget, cost, origin)
    if own is not None and (decision is None or decision.found is None or own.seconds <= decision.found.extra):
        program.graph, decision = own.program.graph, own.decision
    if decision is None:
        assert refused is not None
        raise refused
    return decision


def _within(program: Program, budget: int) -> str:
    memory = program.memory()
    return within_already(memory, budget, reserved_where_cached(program, memory))


def carry_out(program: Program, decision: Decision, found: Planned, *, origin: str) -> Changed:
    """Do to a program what was decided, with the plan that was found for it, or for another one of the capture."""
    plan = found.plan
    done = plan.apply(program, origin=origin)
    sizes = written_sizes(program)
    lines = (*found.lines, *decision.also, *([f"the plan holds up to {sizes}"] if sizes else ()))
    counts = {"run again": len(plan.again), "random ops replayed": len(done.replayed), "offloaded": len(plan.moves)}
    return Changed(
        counts={**counts, **decision.counts},
        tensors=tuple(name for node in done.clones for name in info(node).names[:1]),
        reason="nothing that is run again or moved makes the peak smaller",
        lines=lines,
        details=found.details,
        slowdown=found.extra / found.fitting.seconds if found.fitting.seconds else None,
    )
