"""FitMemory places updates: as early as their gradients allow, with eager's bits, within the budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import graphopt
from graphopt import PassError, Phase, Program
from graphopt.passes import ClipGradients, FitMemory, FuseUpdate
from graphopt.rewriting.memory.fit import memory_planner
from graphopt.rewriting.memory.fit.budget import BudgetError
from tests.support.fitting import applied
from tests.support.properties import examples
from tests.support.running import Compiler
from tests.support.training import Net, assert_same, mean_square, train, train_whole_step

X = torch.linspace(-1, 1, 4 * 64).reshape(4, 64).cos()
BATCHES = [(X.roll(number, 0),) for number in range(3)]
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "sgd, one by one": lambda parameters: torch.optim.SGD(parameters, lr=0.05, foreach=False),
}


def wide(layers: int = 5) -> Net:
    """Layers whose gradients are far larger than their activations."""
    torch.manual_seed(0)
    return Net(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(layers)))


def captured(make: Any) -> tuple[Program, int]:
    """The program of a step, and its peak with early updates, which is lower."""
    model = wide()
    program = graphopt.capture(model, (X,), loss=mean_square, optimizer=make(model.parameters()))
    early = program.copy()
    graphopt.Pipeline([FuseUpdate()]).run(early)
    budget = early.memory().peak_bytes
    assert budget < program.memory().peak_bytes
    return program, budget


def fit(budget: int | str) -> FitMemory:
    return FitMemory(budget, cost="roofline", allow=("recompute",))


@pytest.mark.sweep
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_budget_below_all_gradients_is_met_with_eagers_bits(name: str) -> None:
    program, budget = captured(OPTIMIZERS[name])
    (record,) = graphopt.Pipeline([fit(budget)]).run(program)
    assert program.memory().peak_bytes <= budget
    assert any("are updated while backward still runs" in line for line in record.changed.lines)
    place = {node: number for number, node in enumerate(program.nodes)}
    updates, backward = program.phase_nodes(Phase.UPDATE), program.phase_nodes(Phase.BACKWARD)
    assert min(place[node] for node in updates) < max(place[node] for node in backward)
    found = train_whole_step(wide(), OPTIMIZERS[name], mean_square, BATCHES, [fit(budget)])
    expected = train(wide(), OPTIMIZERS[name], mean_square, BATCHES)
    assert_same(expected, found, name, skip=".gradient.")


def test_the_smallest_budget_is_that_with_updates_moved_by_name() -> None:
    smallest = []
    for passes in ([fit(1000)], [FuseUpdate(), fit(1000)]):
        with pytest.raises(PassError) as refused:
            graphopt.Pipeline(passes).run(captured(OPTIMIZERS["sgd"])[0])
        smallest.append(str(refused.value).partition("every plan takes")[2][:20])
    assert smallest[0] == smallest[1] != ""


@pytest.mark.sweep
def test_updates_stay_where_the_program_fits_already() -> None:
    program, _ = captured(OPTIMIZERS["sgd"])
    before = [node.name for node in program.nodes]
    (record,) = graphopt.Pipeline([fit(10**9)]).run(program)
    assert not record.changed
    assert [node.name for node in program.nodes] == before


def test_updates_that_need_all_gradients_stay_behind_backward() -> None:
    model = wide()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    step = graphopt.optimize_step(model, optimizer, [ClipGradients(0.1), fit("99%")], loss=mean_square)
    with pytest.raises(PassError, match="no plan fits"):
        step.prepare(X)


@pytest.mark.sweep
def test_what_a_compiler_runs_has_its_updates_behind() -> None:
    """It runs the update behind what it compiles, so that nothing may be planned upon an earlier one."""
    model = wide()
    _, budget = captured(OPTIMIZERS["sgd"])
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    step = graphopt.optimize_step(model, optimizer, [fit(budget)], loss=mean_square, backend=Compiler())
    with pytest.raises(PassError, match="no plan fits"):
        step.prepare(X)


def smallest_budget(program: Program) -> int:
    """The first budget that is met, of those that errors name: each of them is larger than the one it refuses."""
    budget = 1000
    while True:
        try:
            applied(program, fit(budget))
        except PassError as error:
            assert isinstance(error.__cause__, BudgetError)  # noqa: PT017 - what is refused says what to ask for
            assert error.__cause__.smallest_bytes > budget  # noqa: PT017
            budget = error.__cause__.smallest_bytes
        else:
            return budget


@given(
    layers=st.integers(1, 4),
    share=st.integers(0, 100),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    tied=st.booleans(),
)
@examples(5)
def test_every_budget_from_the_smallest_on_is_met_with_eagers_bits(
    layers: int, share: int, optimizer: str, *, tied: bool
) -> None:
    make = OPTIMIZERS[optimizer]

    def model() -> Net:
        made = wide(layers)
        if tied:
            made.net[-1][0].weight = made.net[0][0].weight
        return made

    first = model()
    program = graphopt.capture(first, (X,), loss=mean_square, optimizer=make(first.parameters()))
    smallest, largest = smallest_budget(program), program.memory().peak_bytes
    with pytest.raises(PassError, match="no plan fits"):
        applied(program, fit(smallest - 1))
    budget = smallest + (largest - smallest) * share // 100
    assert applied(program, fit(budget))[0].memory().peak_bytes <= budget
    found = train_whole_step(model(), make, mean_square, BATCHES, [fit(budget)])
    assert_same(train(model(), make, mean_square, BATCHES), found, f"{share} %", skip=".gradient.")


def test_the_second_program_of_a_step_gets_the_plan_of_the_first_without_a_decision_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepared: list[Program] = []
    original = memory_planner.prepared

    def noted(program: Program, *args: Any, **options: Any) -> Any:
        prepared.append(program)
        return original(program, *args, **options)

    monkeypatch.setattr(memory_planner, "prepared", noted)

    def train_with(passes: Any) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        step = graphopt.optimize_step(model, optimizer, passes, loss=mean_square)
        losses = [step(x) for x in torch.randn(3, 64, 16)]
        return step, [*losses, *model.parameters()]

    _, plain = train_with([])
    step, fitted = train_with([FitMemory("75%", cost="roofline")])
    assert len(prepared) == 1
    assert all(torch.equal(one, other) for one, other in zip(plain, fitted, strict=True))
    first, later = ([node.name for node in program.phase_nodes(Phase.RECOMPUTE)] for program in step.programs.values())
    assert first == later != []
