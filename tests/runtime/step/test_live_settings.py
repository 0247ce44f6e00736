"""Settings of an optimizer that a schedule changes: eager mode's bits, and no trace of the update for each change."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import graphopt
from graphopt import TrainStep
from graphopt.passes import (
    ClipGradients,
    FitMemory,
    FuseUpdate,
    MixedPrecision,
    OffloadState,
    Recompute,
    ScaleLoss,
)
from graphopt.runtime.programs.rewrite import Rewritten
from graphopt.runtime.step.live_settings import read_numbers
from tests.support.properties import examples
from tests.support.running import network, rows
from tests.support.training import mean_square

optim: Any = torch.optim
Make = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]
Change = dict[str, Any]


def two_groups(parameters: Iterable[torch.Tensor], **options: Any) -> list[dict[str, Any]]:
    members = list(parameters)
    return [{"params": members[:3], **options}, {"params": members[3:]}]


OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda p: optim.AdamW(p, fused=True),
    "Adam": lambda p: optim.Adam(two_groups(p, betas=(0.8, 0.9)), weight_decay=0.1, fused=True),
    "SGD": lambda p: optim.SGD(two_groups(p, momentum=0.5), lr=0.1, momentum=0.9, weight_decay=0.01, fused=True),
    "Adagrad": lambda p: optim.Adagrad(p, weight_decay=0.1, fused=True),
    "tensor rate": lambda p: optim.AdamW(p, lr=torch.tensor(0.01), fused=True),
}
LISTS: Make = lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=True)  # noqa: E731


class Own(torch.optim.Optimizer):
    """A user's optimizer, which uses a number of its groups as it likes."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.1, "decay": 0.5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(1 - group["decay"] ** 2 if group["decay"] < 0.3 else 0.9).sub_(p.grad, alpha=group["lr"])


def put(optimizer: torch.optim.Optimizer, change: Change) -> None:
    """Set numbers of the first group, those that the optimizer has."""
    group = optimizer.param_groups[0]
    group.update({key: value for key, value in change.items() if key in group or key.startswith("own")})


def eager(make: Make, changes: list[Change], every: int = 1) -> list[torch.Tensor]:
    model, losses = network(), []
    optimizer = make(model.parameters())
    torch.manual_seed(1)
    for number, change in enumerate(changes, 1):
        put(optimizer, change)
        loss = mean_square(model, rows(4) * number)
        (loss / every).backward()
        losses.append(loss.detach())
        if number % every == 0:
            optimizer.step()
            optimizer.zero_grad()
    return [*losses, *(p.detach() for p in model.parameters())]


def stepped(
    make: Make, changes: list[Change], passes: Any = (), every: int = 1, **options: Any
) -> tuple[list[torch.Tensor], TrainStep]:
    model, losses = network(), []
    optimizer = make(model.parameters())
    step = graphopt.optimize_step(model, optimizer, passes, loss=mean_square, **options).accumulate(every)
    torch.manual_seed(1)
    for number, change in enumerate(changes, 1):
        put(optimizer, change)
        losses.append(step(rows(4) * number))
    return [*losses, *(p.detach() for p in model.parameters())], step


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """An item for each time that an update is traced for other settings."""
    found: list[None] = []
    retrace = Rewritten.retrace
    monkeypatch.setattr(Rewritten, "retrace", lambda self: (found.append(None), retrace(self))[1])
    return found


SCHEDULE: list[Change] = [
    {"betas": (0.9 - 0.05 * n, 0.99), "momentum": 0.9 - 0.05 * n, "weight_decay": 0.1 + 0.1 * n, "eps": 1e-6 * (n + 1)}
    for n in range(5)
]


@pytest.mark.sweep(but=("1-AdamW", "1-Adam", "1-SGD", "1-tensor rate"))
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("every", [1, 2])
def test_a_schedule_of_numbers_takes_no_further_trace(make: Make, every: int, traces: list[None]) -> None:
    found, step = stepped(make, SCHEDULE, every=every)
    assert same(found, eager(make, SCHEDULE, every))
    assert not traces
    read = {spec.target for _, spec in step.program.inputs_of("hyperparameter")}
    assert any(not target.startswith("lr[") for target in read)


PASSES: dict[str, Any] = {
    "fuse-update": [FuseUpdate()],
    "fit-memory": [FitMemory("96%")],
    "scale-loss": [ScaleLoss()],
    "offload-state": [OffloadState(tier="host", min_bytes=1)],
    "recompute": [Recompute("net.3")],
}


@pytest.mark.sweep(cases=("scale-loss", "recompute"))
@pytest.mark.parametrize("passes", PASSES.values(), ids=PASSES)
def test_passes_do_not_run_again(passes: Any, traces: list[None]) -> None:
    found, _ = stepped(OPTIMIZERS["AdamW"], SCHEDULE, passes)
    assert same(found, eager(OPTIMIZERS["AdamW"], SCHEDULE))
    assert not traces


@pytest.mark.sweep(but=("O2",))
@pytest.mark.parametrize("passes", [[MixedPrecision(level="O2")], [ClipGradients(0.1)]], ids=["O2", "clip"])
def test_results_are_those_of_a_step_that_is_traced_each_time(
    passes: Any, monkeypatch: pytest.MonkeyPatch, traces: list[None]
) -> None:
    found, _ = stepped(OPTIMIZERS["AdamW"], SCHEDULE, passes)
    assert not traces
    monkeypatch.setattr("graphopt.runtime.step.live_settings.read_numbers", lambda *_: None)
    expected, _ = stepped(OPTIMIZERS["AdamW"], SCHEDULE, passes)
    assert len(traces) == len(SCHEDULE) - 1
    assert same(found, expected)


def test_a_schedule_of_torch_that_cycles_momentum(traces: list[None]) -> None:
    def train(whole: bool) -> list[torch.Tensor]:
        model = network()
        optimizer = optim.AdamW(model.parameters(), fused=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)
        step = graphopt.optimize_step(model, optimizer, loss=mean_square) if whole else None
        torch.manual_seed(1)
        for _ in range(6):
            if step is not None:
                step(rows(4))
            else:
                mean_square(model, rows(4)).backward()
                optimizer.step()
                optimizer.zero_grad()
            schedule.step()
        return [p.detach() for p in model.parameters()]

    assert same(train(True), train(False))
    assert not traces


numbers = st.sampled_from([0.0, 0.1, 0.5, 0.9])


@examples(4)
@given(
    make=st.sampled_from([*OPTIMIZERS.values(), LISTS, Own]),
    changes=st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                "betas": st.tuples(numbers, numbers),
                "momentum": numbers,
                "weight_decay": numbers,
                "decay": numbers,
                "lr": st.sampled_from([0.1, 0.01]),
                "own": st.integers(0, 3),
                "maximize": st.booleans(),
            },
        ),
        min_size=2,
        max_size=6,
    ),
    every=st.sampled_from([1, 2]),
    fused=st.booleans(),
)
def test_any_changes(make: Make, changes: list[Change], every: int, fused: bool) -> None:
    first = {"own": 0}
    found, _ = stepped(make, [first, *changes], [FuseUpdate()] if fused and make is not Own else (), every)
    assert same(found, eager(make, [first, *changes], every))


def test_a_number_that_a_pass_has_taken_over_is_not_read() -> None:
    model = network()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    program = graphopt.capture(model, (rows(4),), loss=mean_square, optimizer=optimizer)
    (kernel,) = [node for node in program.nodes if "_fused_sgd_" in str(node.target)]
    known = {(0, "momentum", -1): 0.9}
    assert read_numbers(program, known, known) is not None
    kernel.update_kwarg("momentum", 0.0)
    assert read_numbers(program, known, known) is None


def test_kernels_of_lists_are_traced_for_each_change_and_not_in_between(traces: list[None]) -> None:
    changes: list[Change] = [{"momentum": 0.9}, {"momentum": 0.5}, {"momentum": 0.5}, {"momentum": 0.0}]
    found, _ = stepped(LISTS, changes)
    assert same(found, eager(LISTS, changes))
    assert len(traces) == 2


def test_programs_of_which_one_cannot_read_numbers_are_traced_anew(
    monkeypatch: pytest.MonkeyPatch, traces: list[None]
) -> None:
    def refuse_main(program: Any, *rest: Any) -> Any:
        last = any(spec.role == "gradient" for spec in program.inputs)  # of the batches of an update
        return None if last else read_numbers(program, *rest)

    monkeypatch.setattr("graphopt.runtime.step.live_settings.read_numbers", refuse_main)
    found, _ = stepped(OPTIMIZERS["AdamW"], SCHEDULE + SCHEDULE, every=2)
    assert same(found, eager(OPTIMIZERS["AdamW"], SCHEDULE + SCHEDULE, every=2))
    assert 0 < len(traces) < len(SCHEDULE + SCHEDULE)


@pytest.mark.parametrize("make", [LISTS, Own], ids=["lists", "own"])
def test_what_is_traced_again_and_again_is_said_once(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    changes: list[Change] = [{"weight_decay": 0.1 * n, "decay": 0.5 - 0.1 * n} for n in range(1, 6)]
    with caplog.at_level(logging.WARNING, "graphopt"):
        stepped(make, changes)
    (line,) = [record.message for record in caplog.records if "traced anew" in record.message]
    assert "3 times" in line
    assert "decay changed: with fused=True" in line
