"""What FitMemory decides about a program: nothing and why, updates that are moved, a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from graphopt.analysis.program_replay import reserved_where_cached
from graphopt.ir.node import info
from graphopt.ir.program import Program
from graphopt.ir.timeline import MemoryTimeline
from graphopt.rewriting.memory.named_plan import NamedPlan
from graphopt.rewriting.memory.other_sizes import written_sizes
from graphopt.rewriting.memory.planned import Planned, plan_of
from graphopt.rewriting.memory.preparation import Prepared
from graphopt.rewriting.pass_ import Changed

__all__ = ["Decision", "Told", "carry", "carry_out", "taken_bytes"]


@dataclass(frozen=True, slots=True)
class Told:
    """A decision as plain data, for other ranks."""

    reason: str
    counts: Mapping[str, int]
    plan: NamedPlan | None
    lines: tuple[str, ...]
    prepares: bool
    reorders: bool


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to be done to a program.

    Attributes:
        reason: why nothing is.
        found: the plan.
        prepared: what was done before it was planned.
    """

    reason: str = ""
    found: Planned | None = None
    prepared: Prepared | None = None

    @property
    def also(self) -> tuple[str, ...]:
        """What was done beside the plan, for people."""
        return () if self.prepared is None else self.prepared.lines

    @property
    def counts(self) -> dict[str, int]:
        """How much of that there is."""
        if self.prepared is None:
            return {}
        changes, early = self.prepared.changes, self.prepared.early
        counts = {"changes before planning": len(changes)} if changes else {}
        return counts if early is None else {**counts, "updates moved": len(early.early)}

    @property
    def told(self) -> Told:
        """What other ranks need of it."""
        plan, lines = (None, ()) if self.found is None else (self.found.plan, self.found.lines)
        ready = self.prepared
        reorders = ready is not None and ready.reordered
        return Told(self.reason, self.counts, plan, (*lines, *self.also), ready is not None, reorders)


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


def carry_out(program: Program, found: Planned, also: tuple[str, ...], *, origin: str) -> Changed:
    """Do to a program what was planned for it, or for another one of the capture; ``also`` is what was done before."""
    plan = found.plan
    done = plan.apply(program, origin=origin)
    sizes = written_sizes(program)
    lines = (*found.lines, *also, *([f"the plan holds up to {sizes}"] if sizes else ()))
    return Changed(
        counts={"run again": len(plan.again), "random ops replayed": len(done.replayed), "offloaded": len(plan.moves)},
        tensors=tuple(name for node in done.clones for name in info(node).names[:1]),
        reason="nothing that is run again or moved makes the peak smaller",
        lines=lines,
        details=found.details,
    )
