"""The trade between bytes and seconds that a search found, as plain data: every plan, tensor by tensor."""

from __future__ import annotations

from typing import Any

from graphopt.analysis.costs.cost import CostReport
from graphopt.rewriting.memory.fit import Fitted, Fitting
from graphopt.rewriting.memory.summary import crossing

__all__ = ["AGAIN", "AWAY", "KEPT", "MOST_PLANS", "NOT_NEEDED", "frontier_data"]

MOST_PLANS = 120
"""How many plans are told of; where there are more, their peaks are evenly spread."""

KEPT, AGAIN, AWAY, NOT_NEEDED = "kro."
"""What a plan does with a tensor: it stays in memory, is computed again, waits elsewhere, or is not needed."""


def frontier_data(fitting: Fitting, fitted: Fitted, budget: int, costs: CostReport) -> dict[str, Any]:
    """What the search of ``fitting`` found, from few bytes to many; sizes in bytes, times in seconds.

    ``plans`` holds a text for each plan, with one character for each of ``tensors`` (``KEPT``, ``AGAIN``, ``AWAY``,
    ``NOT_NEEDED``): those that forward makes and that backward needs under any plan. ``chosen`` is the place of the
    plan that was carried out, ``plain`` that of the program as it is. ``calls`` has the seconds of each call of the
    program, in running order.

    Args:
        fitting: whose program may have been rewritten since.
        fitted: the plan that was carried out.
        budget: what the user allowed.
        costs: the seconds of each call, and how they are known.
    """
    plans = _plans(fitting, fitted)
    needed = crossing(fitting, plans[-1].simulated)
    coded = [_decided(fitting, plan, needed) for plan in plans]
    tensors = sorted({value for decided in coded for value in decided})
    problem, storages = fitting.planning.problem, fitting.planning.storages
    makers = problem.makers
    return {
        "plain_bytes": fitting.memory.peak_bytes,
        "resident_bytes": fitting.memory.resident_bytes,
        "seconds": fitting.seconds,
        "measured": bool(costs.measured or costs.cached),
        "tier": fitting.tier,
        "budget_bytes": budget,
        "chosen": plans.index(fitted),
        "plain": len(plans) - 1,
        "peaks": [plan.peak_bytes for plan in plans],
        "extra": [max(plan.seconds, 0.0) for plan in plans],
        "runs": [len(plan.simulated.plan.repeats()) for plan in plans],
        "plans": ["".join(decided.get(value, NOT_NEEDED) for value in tensors) for decided in coded],
        "tensors": {
            "name": [problem.names[value] for value in tensors],
            "node": [storages[value].owner.name for value in tensors],
            "bytes": [problem.sizes[value] for value in tensors],
            "seconds": [problem.operations[makers[value]].seconds for value in tensors],
        },
        "calls": list(costs.seconds),
    }


def _plans(fitting: Fitting, fitted: Fitted) -> list[Fitted]:
    """The plans by peak: those of the frontier, the one that was carried out, and the program as it is."""
    plain = Fitted(fitting.scheduler.evaluate(frozenset()), fitting.memory.peak_bytes)
    taken = fitted.simulated.plan.steps, fitted.away
    others = [
        plan
        for plan in fitting.trade(MOST_PLANS)
        if plan.peak_bytes < plain.peak_bytes and (plan.simulated.plan.steps, plan.away) != taken
    ]
    return [*sorted([*others, fitted], key=lambda plan: plan.peak_bytes), plain]


def _decided(fitting: Fitting, plan: Fitted, needed: set[int]) -> dict[int, str]:
    """What a plan does with each tensor of forward that is alive in backward; ``needed`` are those of no plan."""
    problem, makers, span = fitting.planning.problem, fitting.planning.problem.makers, fitting.span
    kept = crossing(fitting, plan.simulated)
    again = set(plan.simulated.plan.repeats())
    away = {item.value for item in plan.away}
    found: dict[int, str] = {}
    for value in needed | kept | away:
        if not problem.sizes[value] or not span.start <= makers[value] < span.boundary:
            continue
        if value in away:
            found[value] = AWAY
        elif makers[value] in again:
            found[value] = AGAIN if value in needed else NOT_NEEDED
        elif value in kept:
            found[value] = KEPT
    return found
