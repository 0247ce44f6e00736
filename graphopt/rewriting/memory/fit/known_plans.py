"""What has been planned for the programs of one capture, so that what is decided for one is done to the others."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace

from graphopt.ir.context import PlanStore
from graphopt.ir.program import Program
from graphopt.rewriting.memory.fit.compress_action import CompressAction
from graphopt.rewriting.memory.fit.decision import ProgramPlan
from graphopt.rewriting.memory.fit.other_sizes import Searches
from graphopt.rewriting.memory.fit.planned import Planned
from graphopt.rewriting.memory.fit.state_action import StateAction

__all__ = ["KnownPlans", "ProgramKey", "known_plans", "made_known_plans"]

ProgramKey = tuple[str, Hashable, tuple[tuple[str, int], ...]]
"""The options, the ops that programs have in common, and the sizes that a plan holds for."""


@dataclass(slots=True)
class KnownPlans:
    """Plans by what they depend on; the options always belong to it.

    Attributes:
        budgets: in bytes, by what a share is taken of.
        planned: what was found for programs with the same ops.
        searches: for programs with the same ops, at any sizes.
        decided: what was done to programs, as data.
        compressed: the budget, and which saved activations are stored in 8 bits.
        state: how much of the optimizer's state is offloaded, the best first.
        left_to_copies: bytes of the budget for inputs that stay between two ops that need them.
    """

    budgets: dict[Hashable, int] = field(default_factory=dict)
    planned: dict[ProgramKey, list[Planned]] = field(default_factory=dict)
    searches: dict[Hashable, Searches] = field(default_factory=dict)
    decided: dict[ProgramKey, list[ProgramPlan]] = field(default_factory=dict)
    compressed: dict[str, tuple[int, CompressAction]] = field(default_factory=dict)
    state: dict[str, list[StateAction]] = field(default_factory=dict)
    left_to_copies: dict[Hashable, int] = field(default_factory=dict)


def known_plans(program: Program) -> KnownPlans | None:
    """What is known for a program's capture; None for a program by itself."""
    store = program.context.plans
    return None if store is None else store.of(KnownPlans)


def made_known_plans(program: Program) -> KnownPlans:
    """The same; a program by itself gets a store of its own, since its plan takes several steps."""
    if program.context.plans is None:
        program.context = replace(program.context, plans=PlanStore())
    assert program.context.plans is not None
    return program.context.plans.of(KnownPlans)
