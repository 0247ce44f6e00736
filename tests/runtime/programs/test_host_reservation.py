"""Host memory is taken before the first step: exactly what a program needs, or an error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import graphopt
from graphopt import Program
from graphopt.ir.node import value_of
from graphopt.ir.ops import transfers
from graphopt.ir.ops.transfers.freelist import aligned
from graphopt.ir.ops.values import storage_bytes
from graphopt.passes import FitMemory, Offload, Recompute
from graphopt.rewriting.memory.transfers.transfer_insertion import Move, move
from graphopt.runtime.programs.host_reservation import host_bytes, reserve_host
from tests.support.errors import attempt
from tests.support.fitting import applied, calls
from tests.support.offloading import ROWS, layers, off
from tests.support.training import OPTIMIZERS, captured, mean_square, results
from tests.support.transferring import engine_in, engine_of


@pytest.fixture(autouse=True)
def _own_engine(tmp_path: Path) -> Iterator[None]:
    with engine_in(tmp_path):
        yield


def offloaded() -> Program:
    program, record = applied(captured(layers(), ROWS), off())
    assert record.changed
    return program


@pytest.mark.sweep
def test_as_many_bytes_as_a_run_holds_at_once() -> None:
    program = offloaded()
    sizes = [aligned(storage_bytes(value_of(node.args[0]))) for node in calls(program, "offload")]  # type: ignore[union-attr]
    assert host_bytes(program) == {"cpu": sum(sizes)}  # all of them are away when backward begins
    results(program, layers(), ROWS)
    assert transfers.statistics().peak_stored_bytes == sum(sizes)


def test_no_step_takes_more_than_what_was_reserved() -> None:
    program = offloaded()
    reserve_host(program)
    reserved = transfers.statistics().capacity_bytes
    assert reserved == host_bytes(program)["cpu"]
    results(program, layers(), ROWS)
    assert transfers.statistics().capacity_bytes == reserved
    reserve_host(program)  # is there already
    assert transfers.statistics().capacity_bytes == reserved


@pytest.mark.sweep
def test_blocks_that_are_not_held_together_share_their_place() -> None:
    """A tensor that is brought back before another one goes away."""
    program = captured(layers(p=0.0), ROWS)
    first, second = program.find("net.0", "net.7").values()
    order = program.nodes
    late = [max(order.index(user) for user in node.users) for node in (first, second)]
    between = order[order.index(second) - 1]
    move(program, [Move(first, first, between, between, between)], "host", origin="a test")
    move(program, [Move(second, second, order[late[1]], order[late[1]], order[late[1]])], "host", origin="a test")
    assert host_bytes(program) == {"cpu": 64 * 256 * 4}


def test_a_host_without_room_is_an_error_that_counts_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    program = offloaded()
    need = host_bytes(program)["cpu"]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    engine_of(available=lambda: 4 * need - 1)
    error = attempt(lambda: reserve_host(program))
    assert f"needs {need} bytes × 4 ranks = {4 * need} bytes, and {4 * need - 1} are available" in str(error)
    assert transfers.statistics().capacity_bytes == 0
    engine_of(available=lambda: 4 * need)
    reserve_host(program)
    assert transfers.statistics().capacity_bytes == need


@pytest.mark.sweep(but=("passes0",))
@pytest.mark.parametrize("passes", [[], [Recompute("net.3")], [off(tier="disk")]])
def test_programs_that_move_nothing_to_the_host_reserve_nothing(passes: list[Recompute | Offload]) -> None:
    program = captured(layers(), ROWS)
    if passes:
        program, _ = applied(program, *passes)
    assert host_bytes(program) == {}
    reserve_host(program)
    assert transfers.statistics().capacity_bytes == 0


@pytest.mark.sweep
def test_a_budget_that_is_met_by_moving() -> None:
    rows = torch.linspace(-1, 1, 4096 * 8).reshape(4096, 8).cos()
    budget = FitMemory("70%", host_budget="1GB", allow=("offload",), cost="roofline")
    program, record = applied(captured(layers(), rows), budget)
    assert record.changed.counts["offloaded"] > 0
    reserve_host(program)
    reserved = transfers.statistics().capacity_bytes
    results(program, layers(), rows)
    assert transfers.statistics().capacity_bytes == reserved == transfers.statistics().peak_stored_bytes


def test_a_model_and_a_step_fail_before_they_run() -> None:
    engine_of(available=lambda: 100_000)
    errors = [attempt(lambda: graphopt.optimize(layers(), [off()], example_inputs=(ROWS,)))]
    model = layers()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    step = graphopt.optimize_step(model, OPTIMIZERS["sgd"](model.parameters()), [off()], loss=mean_square)
    errors += [attempt(lambda: step.prepare(ROWS)), attempt(lambda: step(ROWS))]
    for error in errors:
        assert "bytes × 1 rank = " in str(error)
        assert "and 100000 are available" in str(error)
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    engine_of()
    step(ROWS)
    assert transfers.statistics().capacity_bytes == transfers.statistics().peak_stored_bytes > 0
