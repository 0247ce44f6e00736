"""A plan that was taken out of a search, with what is needed to take others out of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from graphopt.analysis.costs.cost import CostReport
from graphopt.rewriting.memory.fit.fitting import Fitted, Fitting
from graphopt.rewriting.memory.fit.named_plan import NamedPlan
from graphopt.rewriting.memory.fit.summary import away_lines, frontier_data, plan_lines, summary_lines

__all__ = ["Planned", "plan_of"]


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan that was found for one program, and can be carried over to others of the same capture.

    Attributes:
        budget: in bytes, of the program that it was found for.
        plan: what is done.
        fitting: the search that it comes from.
        costs: the seconds that the search went by.
        seconds: that the program is expected to take so.
        taken_bytes: that a budget has to have for it, of the program that it was found for.
        lines: what a user should read about it.
        details: what reports can ask for (``Changed.details``).
    """

    budget: int
    plan: NamedPlan
    fitting: Fitting
    costs: CostReport
    seconds: float
    taken_bytes: int
    lines: tuple[str, ...] = ()
    details: Mapping[str, Callable[[], Any]] = field(default_factory=dict)

    @property
    def extra(self) -> float:
        """Seconds on top of the program's own calls: what is recomputed, and waiting for copies."""
        return self.seconds - self.fitting.seconds


def plan_of(fitting: Fitting, fitted: Fitted, budget: int, costs: CostReport) -> Planned:
    """What one plan of a search does and means; to be called while the program is as it was searched.

    Args:
        fitting: the search.
        fitted: the plan.
        budget: in bytes.
        costs: the seconds that the search went by.
    """
    summary = summary_lines(fitting, fitted, budget, costs)
    lines = (*summary, *away_lines(fitting, fitted), *plan_lines(fitting, fitted.simulated))
    details = {"frontier": lambda: frontier_data(fitting.thorough(), fitted, budget, costs)}
    seconds = fitting.seconds + fitted.seconds
    return Planned(budget, fitting.named(fitted), fitting, costs, seconds, fitted.taken_bytes, lines, details)
