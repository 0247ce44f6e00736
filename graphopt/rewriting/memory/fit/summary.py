"""what a plan does with each tensor: saved, recomputed or moved, with bytes and seconds, equal layers folded.

The trade between bytes and seconds that a search found, as plain data: every plan, tensor by tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import fx

from graphopt.analysis.costs.cost import CostReport
from graphopt.analysis.returned_loss import other_tangents
from graphopt.ir.files.text import short_source
from graphopt.ir.memory.timeline import ReservedMemory
from graphopt.ir.node import info, value_of
from graphopt.ir.ops.values import tensors_of
from graphopt.ir.words.columns import aligned
from graphopt.ir.words.written_units import format_bytes, format_seconds
from graphopt.planning import Simulated
from graphopt.planning.problem import lifetimes
from graphopt.rewriting.memory.fit.fitting import Fitted, Fitting

__all__ = [
    "AGAIN",
    "AWAY",
    "KEPT",
    "MOST_PLANS",
    "NOT_NEEDED",
    "Decision",
    "away_lines",
    "crossing",
    "decisions",
    "frontier_data",
    "plan_lines",
    "reserved_lines",
    "summary_lines",
]

_NUMBER = re.compile(r"(?<![A-Za-z_0-9])\d+(?![A-Za-z_0-9])")


@dataclass(frozen=True, slots=True)
class Decision:
    """What is done with one tensor of forward that backward needs.

    Attributes:
        name: of the tensor.
        action: ``saved`` or ``recomputed``.
        times: how often it is made again.
        bytes: of its storage.
        seconds: that making it again takes, each time.
        reason: why.
        source: the line that made it.
    """

    name: str
    action: str
    times: int
    bytes: int
    seconds: float
    reason: str
    source: str


def decisions(fitting: Fitting, simulated: Simulated) -> list[Decision]:
    """For every tensor of forward that lives on in backward, or would without the plan: what is done with it."""
    problem, span = fitting.planning.problem, fitting.span
    plain = crossing(fitting, fitting.scheduler.evaluate(frozenset()))
    planned = crossing(fitting, simulated)
    makers = problem.makers
    runs: dict[int, int] = {}
    for step in simulated.plan.repeats():
        runs[step] = runs.get(step, 0) + 1
    found = []
    for value, size in enumerate(problem.sizes):
        maker = makers[value]
        times = runs.get(maker, 0)
        if (
            not size
            or not span.start <= maker < span.boundary
            or (value not in planned and not (times and value in plain))
        ):
            continue
        seconds = problem.operations[maker].seconds
        droppable = fitting.scheduler.droppable[value]
        action = "saved" if value in planned and not times else "recomputed"
        node = fitting.planning.makers[value]
        reason = _reason(action, times, droppable, value in plain)
        source = short_source(info(node).source)
        found.append(Decision(problem.names[value], action, times, size, seconds, reason, source))
    return found


def _reason(action: str, times: int, droppable: bool, plain: bool) -> str:
    if action == "recomputed":
        return "cheaper than saving it" if times == 1 else "too large to save until its last use"
    if not droppable:
        return "it may not be recomputed"
    return "dropping it is not worth its time" if plain else "what is recomputed starts from it"


def crossing(fitting: Fitting, simulated: Simulated) -> set[int]:
    """The values that are alive when backward begins under a plan, and read after that, by their numbers."""
    problem, boundary = fitting.planning.problem, fitting.span.boundary
    steps = simulated.plan.steps
    start = steps.index(boundary) if boundary < len(problem.operations) else len(steps)
    return {value for value, first, last in lifetimes(problem, steps) if first < start <= last}


def summary_lines(fitting: Fitting, fitted: Fitted, budget: int, costs: CostReport) -> list[str]:
    """What a plan within ``budget`` bytes takes, in bytes and in seconds, next to the unmodified program."""
    share = fitted.seconds / fitting.seconds if fitting.seconds else 0.0
    least = "" if not fitting.knows_smallest else f"; the smallest peak found is {format_bytes(fitting.smallest_peak)}"
    peak = (
        f"peak {format_bytes(fitted.peak_bytes)} of {format_bytes(budget)} allowed; with nothing recomputed it takes "
        f"{format_bytes(fitting.memory.peak_bytes)}{least}"
    )
    waiting = f", waiting for copies {format_seconds(fitted.late)}" if fitted.away else ""
    time = (
        f"what is recomputed takes {format_seconds(fitted.simulated.again)} on top of "
        f"{format_seconds(fitting.seconds)}{waiting}: {share:.1%} more, estimated from {costs.basis}"
    )
    near = _near(fitting, fitted, budget)
    remark = [costs.remark] if costs.remark else []
    return [peak, *reserved_lines(fitting, fitted), time, *near, *remark, *_sliced(fitting), *_outside(fitting)]


def _sliced(fitting: Fitting) -> list[str]:
    """How a batch in slices was planned."""
    sliced = fitting.sliced
    if sliced is None:
        return []
    which = f"tensors are those of slice {sliced.number + 1}, which takes most"
    return [f"each of {sliced.count} slices of the batch recomputes what it has to; {which}"]


def _near(fitting: Fitting, fitted: Fitted, budget: int) -> list[str]:
    """How far a plan is from the best one that there could be, at most."""
    least = fitting.least_seconds(budget) if fitted.seconds > 0 else None
    if least is None:
        return []
    least = min(least, fitted.seconds)
    gap = (fitting.seconds + fitted.seconds) / (fitting.seconds + least) - 1
    bound = f"no plan takes less than {format_seconds(least)} for that"
    return [f"{bound}: this one is at most {gap:.1%} above the best possible"]


def reserved_lines(fitting: Fitting, fitted: Fitted) -> list[str]:
    """What the device's allocator reserves under a plan, next to its peak; nothing where that is the peak itself."""
    reserved = fitting.reserved
    if reserved is None or fitted.reserved_bytes is None:
        return []
    more = fitted.reserved_bytes - fitted.peak_bytes
    least = ""
    if fitting.knows_smallest:
        least = f", and under the plan that takes least {format_bytes(fitting.smallest().taken_bytes)}"
    line = (
        f"{reserved.device} reserves {format_bytes(fitted.reserved_bytes)} for it, {format_bytes(more)} beyond the "
        f"peak{_workspaces(reserved)}; with nothing recomputed {format_bytes(reserved.reserved_peak_bytes)}{least}"
    )
    return [line]


def _workspaces(reserved: ReservedMemory) -> str:
    """The workspaces that are a part of what is reserved."""
    named = [f"{library} {format_bytes(size)}" for library, size in reserved.workspaces.items() if size]
    return f", workspaces among them ({', '.join(named)})" if named else ""


def _outside(fitting: Fitting) -> list[str]:
    """What a peak counts of a loss that the user computes, and what it cannot count."""
    program = fitting.program
    if not program.inputs_of("tangent"):
        return []
    values = [value for value, _ in program.outputs_of("output", "base") if isinstance(value, fx.Node)]
    if all(one.numel() == 1 for value in values for one in tensors_of(value_of(value))):
        return []  # the loss itself
    returned = {
        id(storage): storage.bytes
        for value in values
        for storage in fitting.memory.refers[value]
        if not storage.is_input
    }
    count, outside = sum(returned.values()), "not counted: what the loss outside allocates"
    others = sum(storage.bytes for storage in other_tangents(program, fitting.memory))
    if max(count, others) <= max(_UNNOTICED, fitting.memory.peak_bytes // 1000):
        return [outside]
    gradients = f", and {format_bytes(others)} of gradients for results beside the loss, which most loops do without"
    found = f"{format_bytes(count)} that the model returns{gradients if others else ''}"
    return [f"counted until backward ends: {found}; {outside}"]


_UNNOTICED = 4096
"""Bytes that are not worth a word, whatever the peak is."""


def away_lines(fitting: Fitting, fitted: Fitted) -> list[str]:
    """The tensors that wait elsewhere, with the seconds that their copies have on the way back."""
    if not fitted.away:
        return []
    problem, steps = fitting.planning.problem, fitted.simulated.plan.steps
    total = sum(item.copy.bytes for item in fitted.away)
    rows = [("offloaded", "bytes", "fetched before its next use")]
    for item in sorted(fitted.away, key=lambda item: -item.copy.bytes):
        ahead = steps[item.window.fetched : item.copy.needed]
        time = sum(problem.operations[step].seconds for step in ahead)
        rows.append(
            (problem.names[item.value], format_bytes(item.copy.bytes), f"{len(ahead)} ops, {format_seconds(time)}")
        )
    return [f"{format_bytes(total)} in {len(fitted.away)} tensors wait on the {fitting.tier}", *aligned(rows)]


@dataclass(slots=True)
class _Row:
    names: list[str]
    decision: Decision


def plan_lines(fitting: Fitting, simulated: Simulated, *, most: int = 24) -> list[str]:
    """The decisions as a table, largest first; tensors of equal layers share a row."""
    rows = _folded(decisions(fitting, simulated))
    rows.sort(key=lambda row: (row.decision.action, -row.decision.bytes * len(row.names)))
    shown = []
    for action in ("saved", "recomputed"):
        of_action = [row for row in rows if row.decision.action == action]
        shown += [_cells(row) for row in of_action[:most]]
        if len(of_action) > most:
            rest = of_action[most:]
            total = sum(row.decision.bytes * len(row.names) for row in rest)
            shown.append((action, f"and {sum(len(row.names) for row in rest)} more", format_bytes(total), "", "", ""))
    return aligned([("action", "tensor", "bytes", "again", "reason", "source"), *shown]) if shown else []


def _cells(row: _Row) -> tuple[str, ...]:
    decision, count = row.decision, len(row.names)
    name = row.names[0] if count == 1 else f"{_NUMBER.sub('*', row.names[0])} × {count}"
    size = format_bytes(decision.bytes) if count == 1 else f"{count} × {format_bytes(decision.bytes)}"
    times = f"{decision.times} × " if decision.times > 1 else ""
    again = f"{times}{format_seconds(decision.seconds)}" if decision.times else ""
    return decision.action, name, size, again, decision.reason, decision.source


def _folded(found: Iterable[Decision]) -> list[_Row]:
    rows: dict[tuple[object, ...], _Row] = {}
    for decision in found:
        pattern = _NUMBER.sub("*", re.sub(r"_\d+", "_*", decision.name))
        key = (pattern, decision.action, decision.times, decision.bytes, decision.reason)
        row = rows.setdefault(key, _Row([], decision))
        row.names.append(decision.name)
    return list(rows.values())


MOST_PLANS = 120
"""How many plans are told of; where there are more, their peaks are evenly spread."""

KEPT, AGAIN, AWAY, NOT_NEEDED = "kro."
"""What a plan does with a tensor: it stays in memory, is recomputed, waits elsewhere, or is not needed."""


def frontier_data(fitting: Fitting, fitted: Fitted, budget: int, costs: CostReport) -> dict[str, Any]:
    """What the search of ``fitting`` found, from few bytes to many; sizes in bytes, times in seconds.

    ``plans`` holds a text for each plan, with one character for each of ``tensors`` (``KEPT``, ``AGAIN``, ``AWAY``,
    ``NOT_NEEDED``): those that forward makes and that backward needs under any plan. ``chosen`` is the place of the
    plan that was carried out, ``plain`` that of the unmodified program. ``calls`` has the seconds of each call of the
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
        "basis": costs.basis,
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
    """The plans by peak: those of the frontier, the one that was carried out, and the unmodified program."""
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
