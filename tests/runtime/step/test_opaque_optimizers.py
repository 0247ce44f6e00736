"""Optimizers that no program can hold: a whole step calls them as they are, with eager's bits and counted bytes."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import graphopt
from graphopt import Phase, TrainStep
from graphopt.ir.ops.updates.opaque_update import opaque_update_
from graphopt.passes import ClipGradients, DataParallel, FuseUpdate, MixedPrecision, Recompute, ShardOptimizer
from tests.support.properties import examples
from tests.support.training import mean_square

X = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))
STEPS = 9  # RAdam updates otherwise from its sixth step on
Make = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]


class Lion(torch.optim.Optimizer):
    """A user's optimizer: it counts in Python, in its groups and in an attribute, and uses the count."""

    def __init__(self, parameters: Iterable[torch.Tensor], lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr, "count": 0})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                direction = (momentum * 0.9 + p.grad * 0.1).sign()
                p.add_(direction, alpha=-group["lr"] * (1 + 1 / group["count"]))
                momentum.mul_(0.99).add_(p.grad, alpha=0.01)


def hooked(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """SGD whose hook halves the gradients."""
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    def halve(current: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        for group in current.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(0.5)

    optimizer.register_step_pre_hook(halve)
    return optimizer


def tensor_betas(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """Adam that reads tensors which belong to no parameter."""
    return torch.optim.Adam(parameters, betas=(torch.tensor(0.9), torch.tensor(0.99)), foreach=False)


optim: Any = torch.optim
OPTIMIZERS: dict[str, Make] = {
    "NAdam": lambda p: optim.NAdam(p, lr=0.01),
    "NAdam of lists": lambda p: optim.NAdam(p, lr=0.01, foreach=True),
    "RAdam": lambda p: optim.RAdam(p, lr=0.01),
    "Adamax": lambda p: optim.Adamax(p, lr=0.01),
    "ASGD": lambda p: optim.ASGD(p, lr=0.01),
    "Adafactor": lambda p: optim.Adafactor(p, lr=0.01),
    "Adam of lists": lambda p: optim.Adam(p, lr=0.01, foreach=True),
    "Adam one by one": lambda p: optim.Adam(p, lr=0.01, foreach=False, fused=False),
    "Lion": Lion,
    "hooked": hooked,
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))


def eager(make: Make, every: int = 1, clip: float = 0.0) -> list[torch.Tensor]:
    """The losses and parameters of the loop that a whole step takes the place of."""
    model, losses = net(), []
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    torch.manual_seed(1)
    for number in range(STEPS):
        loss = mean_square(model, X * (number + 1))
        (loss / every).backward()
        losses.append(loss.detach())
        if (number + 1) % every == 0:
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return [*losses, *(p.detach() for p in model.parameters()), torch.get_rng_state()]


def stepped(make: Make, passes: Any = (), every: int = 1) -> tuple[list[torch.Tensor], TrainStep]:
    model = net()
    optimizer = make(model.parameters())
    step = graphopt.optimize_step(model, optimizer, passes, loss=mean_square)
    step.accumulate(every)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    torch.manual_seed(1)
    losses = []
    for number in range(STEPS):
        losses.append(step(X * (number + 1)))
        if (number + 1) % every == 0:
            scheduler.step()
    return [*losses, *(p.detach() for p in model.parameters()), torch.get_rng_state()], step


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def is_opaque(step: TrainStep) -> bool:
    return any(node.target is opaque_update_ for node in step.program.phase_nodes(Phase.UPDATE))


@pytest.mark.sweep
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("every", [1, 3])
def test_training_equals_eager_training(make: Make, every: int) -> None:
    found, step = stepped(make, every=every)
    assert is_opaque(step)
    assert same(found, eager(make, every))


@pytest.mark.sweep
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_peaks_are_predicted_to_the_byte(make: Make) -> None:
    model = net()
    step = graphopt.optimize_step(model, make(model.parameters()), loss=mean_square)
    for _ in range(7):
        step(X)
    assert graphopt.measure_peak(lambda: step(X)).allocated_peak_bytes == step.program.memory().allocated_peak_bytes


@examples(3)
@given(
    name=st.sampled_from(["NAdam", "RAdam", "Adamax", "ASGD"]),
    options=st.fixed_dictionaries({"maximize": st.booleans(), "weight_decay": st.sampled_from([0.0, 0.1])}),
    foreach=st.sampled_from([None, True, False]),
    groups=st.booleans(),
)
def test_any_settings(name: str, options: dict[str, Any], foreach: bool | None, groups: bool) -> None:
    def make(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        members = list(parameters)
        parts = [{"params": members[:2], "lr": 0.1}, {"params": members[2:]}] if groups else members
        found: torch.optim.Optimizer = getattr(optim, name)(parts, lr=0.01, foreach=foreach, **options)
        return found

    assert same(stepped(make)[0], eager(make))


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["NAdam", "Lion"])
def test_passes_see_its_gradients(name: str) -> None:
    make = OPTIMIZERS[name]
    assert same(stepped(make, [ClipGradients(max_norm=0.1)])[0], eager(make, clip=0.1))
    assert same(stepped(make, [Recompute("auto")])[0], eager(make))
    found, step = stepped(make, [FuseUpdate()])
    assert same(found, eager(make))
    assert "the update has to wait for all of them" in step.records[0].changed.reason


@pytest.mark.sweep
def test_a_step_whose_gradients_are_not_finite_is_skipped() -> None:
    model = net()
    optimizer = Lion(model.parameters())
    step = graphopt.optimize_step(model, optimizer, [MixedPrecision("float16", init_scale=2.0**4)], loss=mean_square)
    step(X)
    before, calls = copy.deepcopy(model.state_dict()), optimizer.calls
    step(X * 1e30)
    assert optimizer.calls == calls == 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    step(X)
    assert optimizer.calls == 2


def test_what_is_special_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "graphopt"):
        stepped(OPTIMIZERS["NAdam"])
    (line,) = [record.message for record in caplog.records if "NAdam" in record.message]
    assert "runs in eager mode behind the program: it reads tensors' values in Python" in line
    assert "all gradients live together" in line
    assert "of state and" in line


@pytest.mark.sweep(cases=("Lion-its step changes 'count' of its parameter groups",))
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Lion, "its step changes 'count' of its parameter groups"),
        (hooked, "its step has hooks"),
        (tensor_betas, "it computes with tensors that are neither its state nor a learning rate"),
    ],
)
def test_the_reason_is_named(make: Make, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "graphopt"):
        stepped(make)
    assert reason in caplog.text


def test_its_state_is_saved_and_loaded_as_ever() -> None:
    def halves(change: bool) -> list[torch.Tensor]:
        model = net()
        optimizer = OPTIMIZERS["NAdam"](model.parameters())
        step = graphopt.optimize_step(model, optimizer, loss=mean_square)
        torch.manual_seed(1)
        for _ in range(3):
            step(X)
        if change:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), torch.get_rng_state()))
            model = net()
            optimizer = OPTIMIZERS["NAdam"](model.parameters())
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            step = graphopt.optimize_step(model, optimizer, loss=mean_square)
            torch.set_rng_state(saved[2])
        return [*(step(X) for _ in range(3)), *model.parameters()]

    assert same(halves(False), halves(True))


CLOSURES: dict[str, Make] = {
    "LBFGS": lambda p: optim.LBFGS(p, lr=0.1),
    "LBFGS with a line search": lambda p: optim.LBFGS(p, lr=0.1, line_search_fn="strong_wolfe"),
}


def add(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.02})  # type: ignore[index]


def remove(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"].pop(0)


def exchange(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"][1] = model[0].weight  # type: ignore[index]


@pytest.mark.sweep(cases=("Lion-add", "Lion-remove", "Lion-exchange", "lists-add", "lists-remove", "lists-exchange"))
@pytest.mark.parametrize("change", [add, remove, exchange])
@pytest.mark.parametrize(
    "make",
    [
        lambda p: optim.NAdam(p, lr=0.01),
        Lion,
        lambda p: optim.AdamW(p, fused=True),
        lambda p: optim.SGD(p, lr=0.1, foreach=True),
    ],
    ids=["NAdam", "Lion", "fused", "lists"],
)
def test_other_parameters_in_its_groups_are_updated(change: Any, make: Make) -> None:
    found = []
    for whole in (False, True):
        model = net()
        optimizer = make(list(model.parameters())[2:])
        step = graphopt.optimize_step(model, optimizer, loss=mean_square) if whole else None
        torch.manual_seed(1)
        for number in range(6):
            if number == 3:
                change(model, optimizer)
            if step is not None:
                step(X)
            else:
                optimizer.zero_grad()
                mean_square(model, X).backward()
                optimizer.step()
        found.append([parameter.detach() for parameter in model.parameters()])
    assert same(*found)


RATES: dict[str, Make] = {
    "AdamW": lambda p: optim.AdamW(p, lr=torch.tensor(0.01), fused=True),
    "Adam of one element": lambda p: optim.Adam(p, lr=torch.tensor([0.01]), fused=True),
    "SGD": lambda p: optim.SGD(p, lr=torch.tensor(0.01), momentum=0.9, fused=True),
}


@pytest.mark.sweep(cases=("SGD",))
@pytest.mark.parametrize("make", RATES.values(), ids=RATES)
def test_learning_rates_that_are_tensors_are_inputs_of_the_program(
    make: Make, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    found, step = stepped(make)
    assert same(found, eager(make))
    assert not is_opaque(step)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.sweep
@pytest.mark.parametrize("make", CLOSURES.values(), ids=CLOSURES)
def test_an_optimizer_that_evaluates_the_model_again(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    def with_norm() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 4))

    model, losses = with_norm(), []
    optimizer = make(model.parameters())
    torch.manual_seed(1)
    for number in range(3):

        def closure(batch: torch.Tensor = X * (number + 1)) -> torch.Tensor:
            optimizer.zero_grad()
            loss = mean_square(model, batch)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).detach())  # type: ignore[arg-type,union-attr]
    expected = [*losses, *model.state_dict().values(), torch.get_rng_state()]

    model = with_norm()
    step = graphopt.optimize_step(model, make(model.parameters()), [Recompute("auto")], loss=mean_square)
    torch.manual_seed(1)
    losses = [step(X * (number + 1)) for number in range(3)]
    assert same([*losses, *model.state_dict().values(), torch.get_rng_state()], expected)
    assert "it evaluates the model several times for one update" in caplog.text
    assert "finds no gradients" not in caplog.text


def test_what_acts_once_per_step_is_refused_where_the_model_is_evaluated_again() -> None:
    with pytest.raises(graphopt.GraphoptError, match=r"LBFGS evaluates the model several times.*clip-gradients"):
        stepped(CLOSURES["LBFGS"], [ClipGradients(max_norm=1.0)])
    with pytest.raises(graphopt.GraphoptError, match=r"accumulate\(3\)"):
        stepped(CLOSURES["LBFGS"], every=3)


@pytest.mark.sweep
def test_it_cannot_be_sharded() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(graphopt.GraphoptError, match=r"NAdam cannot be sharded, .*\n.*use AdamW, .* fused=True"):
            stepped(OPTIMIZERS["NAdam"], [DataParallel(), ShardOptimizer()])
        with pytest.raises(graphopt.GraphoptError, match=r"AdamW cannot be sharded, .*\n.*give AdamW fused=True"):
            stepped(
                lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
                [DataParallel(), ShardOptimizer()],
            )
    finally:
        dist.destroy_process_group()


@pytest.mark.sweep
def test_a_program_from_a_file_calls_no_optimizer() -> None:
    model = net()
    optimizer = Lion(model.parameters())
    step = graphopt.optimize_step(model, optimizer, loss=mean_square, example_inputs=(X,))
    text = step.program.to_json()
    loaded = graphopt.Program.from_json(text)
    module = loaded.to_graph_module()
    inputs = [torch.zeros_like(t) if isinstance(t, torch.Tensor) else t for t in _real(loaded)]
    module(inputs)
    assert optimizer.calls == 0


def _real(program: graphopt.Program) -> list[Any]:
    return [torch.zeros(tuple(node.meta["val"].shape), dtype=node.meta["val"].dtype) for node in program.placeholders]
