"""Plans that were searched for some sizes of a program whose sizes vary, looked through for others.

What is worth keeping hardly depends on the sizes, how much of it fits into a number of bytes does. So one search gives
plans for a range of sizes: of those on its frontier, the fastest that fits is taken, each checked as a program.
"""

from __future__ import annotations

from graphopt.ir.node import value_of
from graphopt.ir.program import Program
from graphopt.ir.words.written_units import format_bytes
from graphopt.rewriting.memory.fit.fitting import Fitted, Fitting
from graphopt.rewriting.memory.fit.planned import Planned

__all__ = ["Searches", "written_sizes"]

_PLANS = 33
"""Plans of a frontier that are looked through."""


class Searches:
    """The searches for programs with the same calls."""

    def __init__(self) -> None:
        self._found: list[tuple[Planned, list[Fitted]]] = []

    def add(self, planned: Planned) -> None:
        """Keep the search that a plan comes from."""
        self._found.append((planned, planned.fitting.trade(_PLANS)))

    def plan_within(self, program: Program, budget: int) -> Planned | None:
        """A plan with which a program fits into a number of bytes; None where none of those that were found does.

        Args:
            program: with the calls of those that were searched, at the sizes of its context.
            budget: in bytes.
        """
        for planned, plans in reversed(self._found):
            fitting = planned.fitting
            found = _fastest(fitting, plans, program, budget)
            if found is not None:
                again = len(fitting.named(found).again)
                line = (
                    f"of the plans that were searched for {written_sizes(fitting.program)}, the fastest one within "
                    f"{format_bytes(budget)} recomputes {again} ops"
                )
                seconds = fitting.seconds + found.seconds
                return Planned(
                    budget, fitting.named(found), fitting, planned.costs, seconds, found.taken_bytes, (line,)
                )
        return None


def _fastest(fitting: Fitting, plans: list[Fitted], program: Program, budget: int) -> Fitted | None:
    """The fastest of some plans with which a program fits; fewer bytes at some sizes are taken for fewer at others."""
    low, high = 0, len(plans)
    best: Fitted | None = None
    while low < high:
        middle = (low + high) // 2
        if fitting.named(plans[middle]).fits(program, budget):
            best, low = plans[middle], middle + 1
        else:
            high = middle
    return best


def written_sizes(program: Program) -> str:
    """The sizes that a program is planned for, by where they come up first; empty where sizes are fixed."""
    places: dict[str, str] = {}
    for node, spec in program.inputs_of("input"):
        for dim, size in enumerate(value_of(node).shape):
            places.setdefault(str(size), f"dimension {dim} of {spec.target}")
    return ", ".join(f"{places.get(name, name)} = {size}" for name, size in program.context.sizes.planned.items())
