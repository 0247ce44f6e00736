"""Budgets on devices whose allocator keeps freed blocks: what it reserves is within them."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import pytest
import torch

from graphopt import Phase, Program
from graphopt.analysis.costs.cost import costs_of
from graphopt.analysis.program_replay import reserved_where_cached
from graphopt.errors import PassError
from graphopt.ir.context import GraphPartContext
from graphopt.ir.node import info
from graphopt.rewriting.memory.fit.budget import BudgetError, budget_bytes, within_already
from graphopt.rewriting.memory.fit.fitting import Fitting, FittingOptions
from graphopt.rewriting.memory.fit.preparation import prepared
from graphopt.rewriting.memory.transfers.transfer_insertion import host_lanes
from tests.support.budgets import fit
from tests.support.fitting import applied, structure, wide
from tests.support.toy_devices import on_device, toy_device
from tests.support.training import captured

ROWS = torch.ones(256, 8)
SWEPT = partial(pytest.param, marks=pytest.mark.sweep)
DEVICE = toy_device(workspaces={"cublas": 20_480})


def reserved(program: Program) -> int:
    found = reserved_where_cached(program, program.memory())
    assert found is not None
    return found.reserved_peak_bytes


@pytest.fixture(scope="module")
def plain() -> Program:
    return on_device(captured(wide(), ROWS), DEVICE)


def fitting_of(program: Program, *, host: bool = False) -> Fitting:
    memory = program.memory()
    lanes = (lambda planning: host_lanes(planning, 10**9, rate=1e9, smallest=10_000)) if host else None
    return Fitting(program, memory, costs_of(memory, "roofline").seconds, FittingOptions(lanes=lanes))


@pytest.mark.parametrize("share", [SWEPT("95%"), "80%", SWEPT("70%")])
def test_what_is_reserved_is_within_the_budget(plain: Program, share: str) -> None:
    budget = int(reserved(plain) * int(share[:-1]) / 100)
    program, record = applied(plain, fit(share, allow=("recompute",)))
    assert reserved(program) <= budget
    text = "\n".join(record.changed.lines)
    told = re.search(
        r"^toy reserves (\S+ \S+) for it, \S+ \S+ beyond the peak, workspaces among them \(cublas ", text, re.M
    )
    assert told
    assert f"with nothing recomputed {reserved(plain) / 1000:.1f} kB" in text


def test_a_budget_between_the_peak_and_what_is_reserved_is_not_met_as_it_is(plain: Program) -> None:
    peak, taken = plain.memory().peak_bytes, reserved(plain)
    assert peak < taken
    program, record = applied(plain, fit(taken - 1))
    assert record.changed.counts["recomputed"] > 0
    assert reserved(program) <= taken - 1
    _, untouched = applied(plain, fit(taken))
    assert untouched.changed.reason.startswith(f"what toy reserves without recomputation, {taken / 1000:.1f} kB")


@pytest.mark.sweep
@pytest.mark.parametrize("host", [False, SWEPT(True)])
def test_more_bytes_never_cost_more_seconds_reserved(plain: Program, host: bool) -> None:
    fitting = fitting_of(plain, host=host)
    low, high = fitting.smallest().taken_bytes, reserved(plain)
    seconds = []
    for number in range(12):
        budget = low + (high - low) * number // 11
        found = fitting.within(budget)
        assert found is not None
        assert found.peak_bytes <= found.taken_bytes <= budget
        changed = plain.copy()
        fitting.apply(changed, found, origin="")
        changed.erase_dead()
        assert reserved(changed) == found.taken_bytes
        seconds.append(found.seconds)
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1] == 0.0
    assert fitting.within(low - 1) is None


@pytest.mark.sweep
def test_a_budget_that_cannot_be_met_is_told_by_what_is_reserved(plain: Program) -> None:
    ways = [prepared(plain, "a test", reorder=reorder).program for reorder in (True, False)]
    least = min(fitting_of(way).smallest().taken_bytes for way in ways)
    with pytest.raises(PassError, match=f"the smallest plan found has toy reserve {least} bytes") as caught:
        applied(plain, fit(least - 1, allow=("recompute",)))
    assert isinstance(caught.value.__cause__, BudgetError)
    assert caught.value.__cause__.smallest_bytes == least


def test_shares_are_of_what_is_reserved(plain: Program) -> None:
    memory, found = plain.memory(), reserved_where_cached(plain, plain.memory())
    assert found is not None
    assert budget_bytes("100%", memory, found) == found.reserved_peak_bytes
    assert within_already(memory, found.reserved_peak_bytes, found)
    assert not within_already(memory, found.reserved_peak_bytes - 1, found)
    assert budget_bytes("auto", memory) == DEVICE.memory_bytes - DEVICE.context_bytes


@pytest.mark.sweep
def test_a_program_on_a_plain_heap_is_fitted_by_its_peak() -> None:
    program = captured(wide(), ROWS)
    fitting = fitting_of(program)
    assert fitting.reserved is None
    found = fitting.within(program.memory().peak_bytes * 8 // 10)
    assert found is not None
    assert found.reserved_bytes is None
    assert found.taken_bytes == found.peak_bytes
    heap = on_device(program, toy_device(kind="cpu", allocator=replace(toy_device().allocator, caching=False)))
    budget = program.memory().peak_bytes * 8 // 10
    same = [structure(applied(one, fit(budget, cost="h100-80gb"))[0]) for one in (program, heap)]
    assert same[0] == same[1]


@pytest.mark.sweep
def test_a_part_of_a_model_is_fitted_by_its_peak(plain: Program) -> None:
    part = plain.copy()
    room = part.memory().peak_bytes
    part.context = replace(part.context, part=GraphPartContext(room))
    _, record = applied(part, fit("60%"))
    assert record.changed.reason.startswith("this part's peak without recomputation")
    smaller = plain.copy()
    smaller.context = replace(smaller.context, part=GraphPartContext(room * 8 // 10))
    program, _ = applied(smaller, fit("60%"))
    assert program.memory().peak_bytes <= room * 8 // 10
    assert any(info(node).origin == "fit-memory" for node in program.phase_nodes(Phase.RECOMPUTE))
