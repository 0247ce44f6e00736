"""What FitMemory decides about a program: nothing and why, updates that are moved, a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from graphopt.analysis.program_replay import reserved_where_cached
from graphopt.ir.memory.timeline import MemoryTimeline
from graphopt.ir.node import info
from graphopt.ir.program import Program
from graphopt.ir.words.written_units import format_bytes
from graphopt.rewriting.memory.fit.budget import BudgetError, within_already, within_share
from graphopt.rewriting.memory.fit.fitting import Fitting
from graphopt.rewriting.memory.fit.named_plan import NamedPlan
from graphopt.rewriting.memory.fit.other_sizes import written_sizes
from graphopt.rewriting.memory.fit.planned import Planned, plan_of
from graphopt.rewriting.memory.fit.preparation import Preparation, Prepared, prepared
from graphopt.rewriting.memory.recompute.checkpoint_segments import is_asked_for
from graphopt.rewriting.memory.recompute.gathered_parameters import costs_with_gathers
from graphopt.rewriting.memory.recompute.planning_problem import repeatable_calls
from graphopt.rewriting.pass_ import Changed
from graphopt.rewriting.progress import measuring

__all__ = [
    "Decision",
    "MemoryPlan",
    "OwnSegments",
    "ProgramPlan",
    "carry",
    "or_own_segments",
    "own_segments",
    "taken_bytes",
]


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What FitMemory decides, as plain data: made once, and done to every program of a capture, on every rank.

    Attributes:
        reason: why nothing is done.
        counts: what is done beside the plan, for the record.
        lines: what a user should read.
        preparation: what is done first; None where nothing is.
        named: what is recomputed and offloaded, by the names of ops; None where nothing is.
        slowdown: the share of the program's seconds that it adds.
    """

    reason: str
    counts: Mapping[str, int]
    lines: tuple[str, ...]
    preparation: Preparation | None
    named: NamedPlan | None
    slowdown: float | None

    def carry_out(self, program: Program, *, origin: str, fitting: Fitting | None = None) -> Changed:
        """Do it to a program that is prepared: nothing is measured or searched.

        Args:
            program: rewritten in place.
            origin: who does it, for people.
            fitting: the search that the plan was taken out of, where that was for this program.
        """
        if self.named is None:
            return Changed(self.counts, reason=self.reason, lines=self.lines, satisfied=bool(self.reason))
        if fitting is None:
            done = self.named.apply(program, origin=origin)
        else:
            done = fitting.rewrite(program, self.named, origin=origin)
        sizes = written_sizes(program)
        counts = {
            "recomputed": len(self.named.again),
            "random ops replayed": len(done.replayed),
            "offloaded": len(self.named.moves),
        }
        return Changed(
            counts={**counts, **self.counts},
            tensors=tuple(name for node in done.clones for name in info(node).names[:1]),
            reason="nothing that is recomputed or moved makes the peak smaller",
            lines=(*self.lines, *([f"the plan holds up to {sizes}"] if sizes else ())),
            slowdown=self.slowdown,
        )


@dataclass(frozen=True, slots=True)
class ProgramPlan:
    """A decision about one program.

    Attributes:
        plan: what is done to it, and to others of the capture.
        peak_bytes: of the program as it was.
        details: what reports can ask for (``Changed.details``).
    """

    plan: MemoryPlan
    peak_bytes: int
    details: Mapping[str, Callable[[], Any]]

    def carry_out(self, program: Program, *, origin: str, fitting: Fitting | None = None) -> Changed:
        """Do it to a program that is prepared (``MemoryPlan.carry_out``)."""
        return replace(self.plan.carry_out(program, origin=origin, fitting=fitting), details=self.details)

    def carried_to(self, program: Program, memory: MemoryTimeline, budget: int, *, origin: str) -> Changed | None:
        """Prepare another program of the capture and do it to that; None where it needs more than that, or less.

        Args:
            program: has the same calls (``shared_calls``); rewritten in place where it fits then.
            memory: its timeline.
            budget: in bytes.
            origin: who does it, for people.
        """
        plan, takes_less = self.plan, memory.peak_bytes < self.peak_bytes
        if takes_less and taken_bytes(program) <= budget:
            return None
        trial = program.copy() if plan.preparation is None else plan.preparation.done_to(program, origin)
        if trial is None or (plan.named is not None and not plan.named.possible(trial, repeatable_calls(trial))):
            return None
        if takes_less and taken_bytes(trial) <= budget:
            return None
        changed = self.carry_out(trial, origin=origin)
        trial.erase_dead()
        if taken_bytes(trial) > budget:
            return None
        program.take_over(trial)
        return changed


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
    def plan(self) -> MemoryPlan:
        """It as plain data."""
        ready = None if self.prepared is None else self.prepared.done
        found = self.found
        if found is None:
            return MemoryPlan(self.reason, self.counts, self.also, ready, None, None)
        slowdown = found.extra / found.fitting.seconds if found.fitting.seconds else None
        return MemoryPlan("", self.counts, (*found.lines, *self.also), ready, found.plan, slowdown)


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
        seconds: that what its segments recompute is expected to take.
    """

    program: Program
    decision: Decision
    seconds: float

    @property
    def taken_bytes(self) -> int:
        """What a budget has to have for it."""
        return taken_bytes(self.program)


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
        costs = costs_with_gathers(program, memory, cost, measured)
    seconds = sum(each for node, each in zip(memory.nodes, costs.seconds, strict=True) if is_asked_for(node))
    note = "the model's checkpoint() segments stay as they are: no plan that was found is faster"
    if reason and program.context.room is not None:  # what it is within is a share, or the smallest plan of the part
        least = (
            f"no plan that was found takes less than this part without recomputation, {format_bytes(memory.peak_bytes)}"
        )
        reason = within_share(memory) if _within(program, program.context.room) else least
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
    found = None if decision is None else decision.found
    if decision is not None and found is None:
        return decision
    # The plan of a part may exceed its share, where it is the smallest one that was found.
    taken = budget if found is None else max(budget, found.taken_bytes)
    own = own_segments(given, taken, cost, origin)
    if own is not None and (found is None or budget < own.taken_bytes < taken or own.seconds <= found.extra):
        program.graph, decision = own.program.graph, own.decision
    if decision is None:
        assert refused is not None
        raise refused
    return decision


def _within(program: Program, budget: int) -> str:
    memory = program.memory()
    return within_already(memory, budget, reserved_where_cached(program, memory))
