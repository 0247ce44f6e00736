"""Timelines that are made once for a program that stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import fx, nn

from graphopt.analysis import liveness
from graphopt.ir.context import OffloadedInputs, StepContext
from graphopt.ir.memory.timeline import MemoryTimeline
from graphopt.ir.node import OutputSpec, Phase, info, set_info, set_value, value_of
from graphopt.ir.program import Program
from tests.support.training import captured

ROWS = torch.randn(8, 4)


def program() -> Program:
    torch.manual_seed(0)
    return captured(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)), ROWS)


def gelu(of: Program) -> fx.Node:
    return next(node for node in of.phase_nodes(Phase.FORWARD) if "gelu" in str(node.target))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Program]:
    """The programs that timelines are made for."""
    original, seen = liveness._simulate, list[Program]()

    def simulate(of: Program, *options: bool) -> MemoryTimeline:
        seen.append(of)
        return original(of, *options)

    monkeypatch.setattr(liveness, "_simulate", simulate)
    return seen


def test_a_program_that_stays_as_it_is_is_looked_at_once(made: list[Program]) -> None:
    one = program()
    assert one.memory() is one.memory()
    assert len(made) == 1
    assert one.copy().memory().bytes == one.memory().bytes
    assert len(made) == 2


def test_what_a_profiler_kept_from_being_measured_is_measured_later(made: list[Program]) -> None:
    one = program()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        one.memory()
    one.memory()
    assert len(made) == 2


def insert(of: Program) -> None:
    node = gelu(of)
    clone = of.insert(torch.ops.aten.clone.default, (node,), after=node, phase=Phase.FORWARD, origin="test")
    node.replace_all_uses_with(clone, delete_user_cb=lambda user: user is not clone)


def shrink(of: Program) -> None:
    node = gelu(of)
    set_value(node, value_of(node).new_empty(2, 8))


def hand_out(of: Program) -> None:
    of.output_node.args = ((*of.output_values, gelu(of)),)
    of.outputs = [*of.outputs, OutputSpec("output", "more")]


def rephase(of: Program) -> None:
    first = next(iter(of.phase_nodes(Phase.BACKWARD)))
    set_info(first, replace(info(first), phase=Phase.RECOMPUTE))


def elsewhere(of: Program) -> None:
    of.context = replace(of.context, offloaded=OffloadedInputs(frozenset(node.name for node in of.placeholders[:1])))


def there(of: Program) -> None:
    of.context = replace(of.context, step=StepContext(there=lambda role, target: True))


@pytest.mark.parametrize("change", [insert, shrink, hand_out, rephase, elsewhere, there])
def test_a_program_that_is_changed_is_looked_at_again(made: list[Program], change: Callable[[Program], None]) -> None:
    """And what is found is what a program that was never looked at before gives."""
    one, other = program(), program()
    one.memory()
    change(one)
    change(other)
    assert one.memory().bytes == other.memory().bytes
    assert len(made) == 3
