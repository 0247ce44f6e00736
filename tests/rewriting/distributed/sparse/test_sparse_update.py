"""Sparse exchange whose update touches the entries that arrive only: where, and with the same results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import graphopt
from graphopt import Pipeline, Program, TrainStep
from graphopt.ir.node import value_of
from graphopt.ir.ops.communication.sparse import sum_entries, sum_sparse
from graphopt.passes import DataParallel, DeepGradientCompression, FuseUpdate, Recompute, ScaleLoss
from graphopt.rewriting.distributed.sparse import sparse_update as scattered
from graphopt.rewriting.pass_ import Changed
from tests.support.properties import examples
from tests.support.training import mean_square

RATE = 0.125  # a power of two: products with it are exact, so that an element's place in a kernel does not matter


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """Two ranks, of which only this one exists: what it sends stands for what the other one sends, too."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 300), nn.Tanh(), nn.Linear(300, 130), nn.Tanh(), nn.Linear(130, 4))


def compression(**options: Any) -> DeepGradientCompression:
    return DeepGradientCompression(**{"sparsity": (0.99,), "min_elements": 1000, **options})


def rewritten(
    optimizer: Callable[[nn.Module], torch.optim.Optimizer], *passes: graphopt.Pass, model: nn.Module | None = None,
) -> tuple[Program, Changed]:  # fmt: skip
    """A whole step, and what DeepGradientCompression did."""
    made = model or network()
    program = graphopt.capture(made, (torch.randn(8, 64),), loss=mean_square, optimizer=optimizer(made))
    records = Pipeline([DataParallel(), *(passes or (compression(),))]).run(program)
    return program, next(record.changed for record in records if record.name == DeepGradientCompression.name)


def targets(program: Program) -> list[Any]:
    return [node.target for node in program.graph.nodes]


def is_scattered(program: Program) -> bool:
    """Whether entries are summed, and nothing else; a mixture fails."""
    found = targets(program)
    assert (sum_entries in found) != (sum_sparse in found)
    return sum_entries in found


def updated_at_entries(changed: Changed) -> list[str]:
    """The tensors that the record names."""
    title = "updated at the entries that arrive, without dense sums: "
    return [name for line in changed.lines if line.startswith(title) for name in line.removeprefix(title).split(", ")]


# --- where -----------------------------------------------------------------------------------------------------------


def sgd(**options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.SGD(model.parameters(), lr=RATE, **options)


IMPLEMENTATIONS: list[dict[str, Any]] = [{}, {"fused": True}, {"foreach": True}, {"foreach": False}]


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors take part: one in 32 elements may arrive."""
    monkeypatch.setattr(scattered, "FEWEST", 32)


@pytest.mark.sweep(but=("{'foreach': False}",))
@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("options", IMPLEMENTATIONS, ids=str)
def test_sgd_updates_the_entries_that_arrive(options: dict[str, Any]) -> None:
    """Whichever implementation; nothing as large as a gradient is made behind the exchange."""
    program, changed = rewritten(sgd(**options))
    assert is_scattered(program)
    assert sorted(updated_at_entries(changed)) == sorted(changed.tensors) == ["0.weight", "2.weight"]
    nodes = list(program.graph.nodes)
    behind = nodes[[node.target for node in nodes].index(sum_entries) :]
    made = [node for node in behind if isinstance(value_of(node), torch.Tensor)]
    written = {id(value_of(node).untyped_storage()) for node, _ in program.inputs_of("parameter", "pass_state")}
    fresh = [value_of(node).numel() for node in made if id(value_of(node).untyped_storage()) not in written]
    assert fresh
    assert max(fresh) < 64 * 300


OTHERS: dict[str, tuple[Callable[[nn.Module], torch.optim.Optimizer], dict[str, Any]]] = {
    "weight decay changes all elements": (sgd(weight_decay=0.1), {}),
    "weight decay without a fused kernel": (sgd(weight_decay=0.1, foreach=True), {}),
    "momentum changes all elements": (sgd(momentum=0.9), {"correction": "feedback"}),
    "so does Adam": (lambda model: torch.optim.AdamW(model.parameters()), {"correction": "feedback"}),
    "a quarter of the elements arrives": (sgd(), {"sparsity": (0.875,)}),
}


@pytest.mark.sweep
@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("name", list(OTHERS))
def test_other_updates_read_dense_sums(name: str) -> None:
    optimizer, options = OTHERS[name]
    program, changed = rewritten(optimizer, compression(**options))
    assert not is_scattered(program)
    assert updated_at_entries(changed) == []
    reason = "more than one of 32 elements arrives" if "sparsity" in options else "the update does more than adding"
    (said,) = [line for line in changed.lines if line.startswith("updated")]
    assert said.startswith(f"updated from dense sums, since {reason}")
    assert all(name in said.rpartition(": ")[2].split(", ") for name in changed.tensors)


@pytest.mark.usefixtures("two_ranks")
def test_one_in_64_elements_may_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scattered, "FEWEST", 64)
    assert not is_scattered(rewritten(sgd(), compression(sparsity=(0.992,)))[0])
    assert is_scattered(rewritten(sgd(), compression(sparsity=(0.9923,)))[0])


class _Transposed(nn.Module):
    """A weight that lies in memory as its transpose, and one of which the model uses the sum with another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.turned = nn.Parameter(torch.randn(300, 64).t())
        self.one, self.two = nn.Parameter(torch.randn(300, 40)), nn.Parameter(torch.randn(300, 40))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.turned) @ (self.one + self.two)


def groups(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups of parameters with rates of their own, one of them with weight decay."""
    first, *others = model.parameters()
    rates: list[dict[str, Any]] = [{"params": [first], "lr": RATE}, {"params": others, "lr": RATE / 2}]
    return torch.optim.SGD(rates, lr=RATE)


# --- with the same results -------------------------------------------------------------------------------------------

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], torch.optim.Optimizer], list[graphopt.Pass]]] = {
    "one group": (network, sgd(), []),
    "lists": (network, sgd(foreach=True), []),
    "one by one": (network, sgd(foreach=False), []),
    "uphill": (network, sgd(maximize=True, fused=True), []),
    "two groups": (network, groups, []),
    "transposed, and one gradient of two parameters": (_Transposed, sgd(), []),
    "updates moved": (network, sgd(), [FuseUpdate()]),
    "updates moved, one by one": (network, sgd(foreach=False), [FuseUpdate()]),
    "steps that are checked": (network, sgd(), [ScaleLoss(init_scale=1.0, dynamic=False)]),
    "steps that are checked, lists": (network, sgd(foreach=True), [ScaleLoss(init_scale=1.0, dynamic=False)]),
    "recomputation": (network, sgd(), [Recompute(("1", "3"))]),
}
OPTIONS: list[dict[str, Any]] = [
    {"clip_norm": 0.1, "nesterov": True}, {"correction": "feedback", "wire": "bfloat16"},
]  # fmt: skip


def trained(name: str, options: dict[str, Any], *, poisoned: bool = False) -> tuple[list[torch.Tensor], TrainStep]:
    make, optimizer, passes = MODELS[name]
    model = make()
    step = graphopt.optimize_step(
        model, optimizer(model), [DataParallel(), compression(**options), *passes], loss=mean_square
    )
    generator = torch.Generator().manual_seed(0)
    for number in range(5):
        x = torch.randn(8, 64, generator=generator)
        step(x * float("inf") if poisoned and number == 2 else x)
    return [parameter.detach().clone() for parameter in model.parameters()], step


@pytest.mark.sweep
@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in MODELS), *((name, options) for name in list(MODELS)[:2] for options in OPTIONS)], ids=str,
)  # fmt: skip
def test_training_is_that_with_dense_sums(name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit, also around a step that is skipped or whose gradients are left out."""
    found, step = trained(name, options, poisoned="checked" in name)
    assert is_scattered(step.program)
    monkeypatch.setattr(scattered, "FEWEST", 10**9)
    expected, dense = trained(name, options, poisoned="checked" in name)
    assert not is_scattered(dense.program)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    starts = [parameter.detach() for parameter in MODELS[name][0]().parameters()]
    assert all(one.isfinite().all() for one in found)
    assert not any(torch.equal(one, start) for one, start in zip(found, starts, strict=True))
    assert step.program.memory().peak_bytes <= dense.program.memory().peak_bytes


@pytest.mark.sweep
@pytest.mark.usefixtures("two_ranks")
def test_residuals_and_momenta_are_the_same_where_steps_are_checked_and_none_is_skipped() -> None:
    """What is sent is taken from them by another op there, which takes nothing in a step that is skipped."""
    found = []
    for passes in ([], [ScaleLoss(init_scale=1.0, dynamic=False)]):
        torch.manual_seed(0)
        model = nn.Linear(64, 32)
        step = graphopt.optimize_step(model, sgd()(model), [DataParallel(), compression(), *passes], loss=mean_square)
        for number in range(3):
            step(torch.linspace(-1, 1, 8 * 64).reshape(8, 64).roll(number, 1))
        kept = {key: value for key, value in step.state_dict()["held"].items() if value.numel() == 64 * 32}
        found.append({**kept, "weight": model.weight.detach()})
    plain, checked = found
    assert [key.split("/")[1] for key in sorted(plain) if (plain[key] == 0).any()] == ["momentum", "residual"]
    assert plain.keys() == checked.keys()
    assert all(torch.equal(value, checked[key]) for key, value in plain.items())


@pytest.mark.usefixtures("two_ranks")
def test_the_peak_is_no_higher_than_predicted() -> None:
    """What selecting takes for itself depends on the numbers; the prediction is of the worst ones."""
    model = network()
    step = graphopt.optimize_step(model, sgd()(model), [DataParallel(), compression()], loss=mean_square)
    x = torch.randn(8, 64)
    step(x)
    assert is_scattered(step.program)
    assert graphopt.measure_peak(lambda: step(x)).allocated_peak_bytes <= step.program.memory().allocated_peak_bytes


@pytest.mark.usefixtures("two_ranks")
def test_a_second_time_is_nothing() -> None:
    program, _ = rewritten(sgd())
    before = program.to_text()
    assert not compression().apply(program)
    assert program.to_text() == before


@examples(2)
@given(
    shapes=st.lists(st.tuples(st.integers(8, 60), st.integers(8, 60), st.booleans()), min_size=1, max_size=5),
    split=st.integers(0, 5), ranks=st.integers(2, 5), bucket=st.sampled_from([0.0, 0.005, 32.0]),
    options=st.sampled_from([*IMPLEMENTATIONS, {"maximize": True, "fused": True}]), fuse=st.booleans(),
)  # fmt: skip
def test_any_list_of_parameters_is_trained_as_with_dense_sums(
    shapes: list[tuple[int, int, bool]], split: int, ranks: int, bucket: float, options: dict[str, Any], fuse: bool
) -> None:
    """Matrices of any layout, in two groups, in any buckets; each gets itself, times a number, as its gradient."""

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            generator = torch.Generator().manual_seed(1)
            for place, (rows, columns, turned) in enumerate(shapes):
                value = torch.randn(rows, columns, generator=generator)
                self.register_parameter(f"p{place}", nn.Parameter(value.t() if turned else value))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sum((p.square().sum() * (place + 1) for place, p in enumerate(self.parameters())), x.sum()) / 4

    def train(fewest: int) -> tuple[list[torch.Tensor], TrainStep]:
        patch.setattr(scattered, "FEWEST", fewest)
        model = Bare()
        members = list(model.parameters())
        parts = [part for part in (members[:split], members[split:]) if part]
        optimizer = torch.optim.SGD(
            [{"params": part, "lr": RATE / 2**place} for place, part in enumerate(parts)], lr=RATE, **options
        )
        exchange = DataParallel(bucket_mb=bucket, first_bucket_mb=bucket)
        passes = [exchange, compression(sparsity=(0.95,), min_elements=400), *([FuseUpdate()] if fuse else [])]
        step = graphopt.optimize_step(model, optimizer, passes, loss=lambda model, x: model(x))
        for _ in range(3):
            step(torch.zeros(2))
        return [parameter.detach() for parameter in model.parameters()], step

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        with pytest.MonkeyPatch.context() as patch:
            found, step = train(1)
            expected, _ = train(10**9)
    finally:
        dist.destroy_process_group()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    large = any(rows * columns >= 400 for rows, columns, _ in shapes)
    assert (sum_entries in targets(step.program)) == large
