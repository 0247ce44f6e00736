"""``passes="auto"``: the passes for the machine that is here, the same on every rank, with results as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import graphopt
from graphopt import Pipeline
from tests.support.ranks import run_ranks
from tests.support.training import mean_square


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.Sigmoid())))


def trained(passes: str, *, whole: bool) -> tuple[nn.Module, graphopt.ir.program.Program]:
    network = model()
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    x = torch.ones(2048, 256)
    if whole:
        step = graphopt.optimize_step(network, optimizer, passes, loss=mean_square)
        for _ in range(2):
            step(x)
        return network, step.program
    optimized = graphopt.optimize(network, passes)
    for _ in range(2):
        optimizer.zero_grad()
        optimized(x).square().mean().backward()
        optimizer.step()
    return network, optimized.program


@pytest.mark.parametrize("whole", [False, True], ids=["drop-in", "whole step"])
def test_a_machine_with_room_gets_no_pass_and_one_without_a_plan(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    network, program = trained("", whole=whole)
    roomy, same = trained("auto", whole=whole)
    assert same.memory().peak_bytes == program.memory().peak_bytes
    room = int(0.8 * (program.memory().peak_bytes - program.memory().present_bytes) / 0.95)
    monkeypatch.setattr("graphopt.rewriting.memory.fit.budget.free_bytes", lambda device: room)
    narrow, planned = trained("auto", whole=whole)
    assert planned.memory().peak_bytes < program.memory().peak_bytes
    for one in (roomy, narrow):
        assert all(torch.equal(p, q) for p, q in zip(network.parameters(), one.parameters(), strict=True))


RANKS = """
import graphopt
from tests.runtime.advice.test_automatic import model
from tests.support.training import mean_square

lines = []
import graphopt.runtime.advice.automatic as automatic
automatic.leave_line = lines.append
x = torch.full((512, 256), 0.5 + rank)
found = []
for passes in ("auto", None):
    network = model()
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    passes = passes or chosen
    step = graphopt.optimize_step(network, optimizer, passes, loss=mean_square, example_inputs=(x,))
    chosen = str(step.pipeline)
    losses = [step(x).item() for _ in range(3)]
    found.append(losses)
    state = [float(value) for value in losses]
say([chosen, found, lines])
"""


def test_ranks_come_to_the_same_and_train_as_with_it_by_name(tmp_path: Path) -> None:
    (one,), (other,) = run_ranks(RANKS, 2, tmp_path / "store")
    chosen, (automatic, named), lines = one
    assert other[0] == chosen
    assert "data-parallel" in Pipeline(chosen).passes[0].name
    assert automatic == named
    assert len(lines) == 1
    assert lines[0].startswith(f"passes='auto': {chosen}: ")
    assert "a step (predicted); runner-up" in lines[0]


REFUSED = """
import graphopt
import graphopt.runtime.advice.machine as machine
from tests.runtime.advice.test_automatic import model
from tests.support.training import mean_square

def refused(x):
    network = model()
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    try:
        graphopt.optimize_step(network, optimizer, "auto", loss=mean_square, example_inputs=(x,))
    except graphopt.GraphoptError as error:
        return f"{type(error).__name__}: {error}"

say(refused(torch.zeros(8 + rank, 256)))
machine.free_bytes = lambda device: 1000
say(refused(torch.zeros(512, 256)))
"""


def test_ranks_whose_batches_differ_and_ranks_without_room_are_told_so_on_all(tmp_path: Path) -> None:
    for differ, narrow in run_ranks(REFUSED, 2, tmp_path / "store"):
        assert "give batches of equal sizes" in differ
        assert narrow.startswith("BudgetError: the least that one of 2 x ")
        assert "what to do" not in narrow


def test_behind_torch_compile_it_is_the_same() -> None:
    network = model()
    x = torch.ones(2048, 256)
    expected = torch.autograd.grad(network(x).square().mean(), list(network.parameters()))
    compiled = torch.compile(network, backend="graphopt", options={"passes": "auto"})
    found = torch.autograd.grad(compiled(x).square().mean(), list(network.parameters()))
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))
    (graph,) = graphopt.compiled_graphs(compiled)
    assert [record.name for record in graph.records] == ["fit-memory"]


NO_BATCH = """
import graphopt
from tests.runtime.advice.test_automatic import model
network = model()
try:
    graphopt.optimize_step(network, torch.optim.SGD(network.parameters()), "auto", loss=lambda model, x: model(x).sum())
except graphopt.ArgumentError as error:
    say(str(error))
"""


@pytest.mark.sweep
def test_without_a_batch_ranks_are_told_what_to_give(tmp_path: Path) -> None:
    for (said,) in run_ranks(NO_BATCH, 2, tmp_path / "store"):
        assert "give example_inputs=" in said
