"""DeepGradientCompression: what is exchanged sparsely when, what the program and the record say, what is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import graphopt
from graphopt import GraphoptError, Pipeline, Program
from graphopt.ir.node import value_of
from graphopt.ir.ops.communication.collectives import ALL_GATHER, ALL_REDUCE
from graphopt.ir.ops.communication.sparse import packed_bytes
from graphopt.passes import DataParallel, DeepGradientCompression
from graphopt.rewriting.distributed.sparse.sparse_update import Rampup
from graphopt.rewriting.pass_ import Changed
from graphopt.rewriting.training_pass import Clock
from graphopt.runtime.ranks.exchange_plan import exchange_plan

NAME = "deep-gradient-compression"
PUBLISHED = (0.75, 0.9375, 0.984375, 0.996, 0.999)

# --- the warm-up -----------------------------------------------------------------------------------------------------


def test_the_published_warm_up_over_100_updates_has_20_of_each_sparsity() -> None:
    rampup = Rampup(PUBLISHED, begin=10, steps=100)
    assert [rampup.at(step) for step in (0, 9, 10, 29, 30, 49, 50, 69, 70, 89, 90, 109, 110, 10**9)] == [
        None, None, 0.75, 0.75, 0.9375, 0.9375, 0.984375, 0.984375, 0.996, 0.996, 0.999, 0.999, 0.999, 0.999
    ]  # fmt: skip
    assert rampup.starts() == [(10, 0.75), (30, 0.9375), (50, 0.984375), (70, 0.996), (90, 0.999)]


@given(st.integers(1, 7), st.integers(0, 50), st.integers(1, 60), st.integers(0, 150))
def test_sparsity_is_the_one_of_the_rule(count: int, begin: int, steps: int, step: int) -> None:
    """``index = int((step - begin) * count / steps)``, the last one from there on."""
    sparsity = tuple((index + 1) / 10 for index in range(count))
    found = Rampup(sparsity, begin, steps).at(step)
    if step < begin:
        assert found is None
    else:
        assert found == sparsity[min(int((step - begin) * count / steps), count - 1)]


@given(st.integers(1, 7), st.integers(0, 50), st.integers(1, 60))
def test_starts_are_where_the_sparsity_changes(count: int, begin: int, steps: int) -> None:
    rampup = Rampup(tuple((index + 1) / 10 for index in range(count)), begin, steps)
    changes = [step for step in range(begin, begin + steps + 1) if rampup.at(step) != rampup.at(step - 1)]
    assert rampup.starts() == [(step, rampup.at(step)) for step in changes]


def test_a_step_wants_the_program_of_its_sparsity() -> None:
    current = DeepGradientCompression(sparsity=(0.0, 0.5, 0.9999991, 0.9999992), rampup_begin_step=2, rampup_step=4)
    forms = [current.form(Clock(steps=step)) for step in range(8)]
    assert forms == ["dense", "dense", "dense", "sparsity 0.5", "sparsity 0.9999991", "", "", ""]


# --- the program -----------------------------------------------------------------------------------------------------


@pytest.fixture(params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[int]:
    """How many ranks there are; only this one exists, and its exchanges do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    yield request.param
    dist.destroy_process_group()


@pytest.fixture
def four_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64, bias=False), nn.Tanh(), nn.Linear(64, 4))


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


class Bare(nn.Module):
    """Parameters of given shapes, each of which gets itself as its gradient."""

    def __init__(self, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for place, shape in enumerate(shapes):
            self.register_parameter("abcdef"[place], nn.Parameter(torch.ones(shape, dtype=dtype)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((p.square().sum() for p in self.parameters()), x.sum()) / 2


def own_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)


def step_program(
    model: nn.Module, *passes: graphopt.Pass, x: torch.Tensor | None = None, loss: Callable[..., Any] = mean_square,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
) -> tuple[Program, Changed]:  # fmt: skip
    """A whole step rewritten by data parallelism and passes, and what the last of them did."""
    program = graphopt.capture(
        model, (torch.randn(8, 16) if x is None else x,), loss=loss, optimizer=optimizer(model.parameters(), lr=0.1)
    )
    records = Pipeline([DataParallel(), *passes]).run(program)
    return program, records[-1].changed


def compressed(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, **options: Any) -> Changed:
    """What the pass does to a model of bare parameters."""
    current = DeepGradientCompression(**options)
    return step_program(Bare(*shapes, dtype=dtype), current, x=torch.zeros(1, dtype=dtype), loss=own_loss)[1]


def calls(program: Program, target: Any) -> list[torch.fx.Node]:
    return [node for node in program.graph.nodes if node.target is target]


@pytest.mark.usefixtures("four_ranks")
def test_small_tensors_and_vectors_stay_dense_and_the_record_says_so() -> None:
    changed = compressed((127, 129), (128, 128), (20000,), (16384,), (1, 16384))
    assert sorted(changed.tensors) == ["b", "e"]
    assert changed.counts == {"sparse gradients": 2, "dense gradients": 3, "exchanges": 1}
    assert "dense, fewer than 16384 elements: a" in changed.lines
    assert {"dense, one dimension: c, d", "dense, one dimension: d, c"}.intersection(changed.lines)
    assert changed.lines[0] == (
        "2 of 5 gradients are exchanged sparsely over the 4 ranks of the group '0': 256 B sent per step and rank in "
        "place of 131.1 kB"
    )


@pytest.mark.usefixtures("four_ranks")
def test_data_parallelism_behind_it_finds_nothing_to_exchange() -> None:
    program, _ = step_program(small(), DeepGradientCompression(min_elements=1))
    (record,) = Pipeline([DataParallel()]).run(program)
    assert "the gradients of this program are exchanged already" in record.changed.reason


EDGES = {
    "float32": (torch.float32, "float32", lambda ranks: 1 - 1 / ranks),
    "bfloat16 gradients": (torch.bfloat16, "float32", lambda ranks: 1 - 1 / (2 * ranks)),
    "bfloat16 gradients and wire": (torch.bfloat16, "bfloat16", lambda ranks: 1 - 1 / (1.5 * ranks)),
    "bfloat16 wire": (torch.float32, "bfloat16", lambda ranks: 1 - 1 / (0.75 * ranks)),
}


@pytest.mark.sweep
@pytest.mark.parametrize("kind", list(EDGES))
def test_a_tensor_is_dense_where_sparse_exchange_takes_as_many_bytes(ranks: int, kind: str) -> None:
    """About where ranks times density is 1, for entries as long as two elements."""
    dtype, wire, edge = EDGES[kind]
    shape = (384, 128)  # a multiple of 3 · 2^14, so that the edges are whole numbers of entries
    at = edge(ranks)
    changed = compressed(shape, dtype=dtype, sparsity=(at,), wire=wire)
    assert "dense, dense exchange takes no more bytes: a" in changed.lines
    assert changed.counts == {"dense gradients": 1}
    above = compressed(shape, dtype=dtype, sparsity=(at + 0.001,), wire=wire)
    assert above.counts == {"sparse gradients": 1, "dense gradients": 0, "exchanges": 1}


@pytest.mark.usefixtures("four_ranks")
def test_the_record_says_which_sparsities_of_the_warm_up_are_dense() -> None:
    lines = compressed((128, 128), rampup_begin_step=3, rampup_step=50).lines
    assert any(
        line == "sparsity 0.999 here; 0.75 from step 3 (dense), 0.9375 from step 13, 0.984375 from step 23, "
        "0.996 from step 33, 0.999 from step 43"
        for line in lines
    )


@pytest.mark.sweep(but=("float16-6",))
@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize(("wire", "each"), [("float32", 8), ("bfloat16", 6), ("float16", 6)])
def test_what_is_sent_is_an_index_and_a_value_for_each_entry(wire: str, each: int) -> None:
    """0.1 % of a million elements: at least 250 times less than the dense exchange sends."""
    model = nn.Linear(1024, 1024, bias=False)
    program, _ = step_program(model, DeepGradientCompression(wire=wire), x=torch.randn(2, 1024))
    (gather,) = calls(program, ALL_GATHER)
    assert not calls(program, ALL_REDUCE)
    sent = value_of(gather.args[0]).numel()  # type: ignore[union-attr]
    assert sent == 1048 * each == packed_bytes([1048], getattr(torch, wire))
    assert value_of(gather).numel() == 4 * sent
    dense = 2 * 3 / 4 * 4 * 1024 * 1024
    assert dense / sent >= 250


@pytest.mark.sweep
@pytest.mark.usefixtures("four_ranks")
def test_the_entries_of_a_large_bucket_travel_in_messages_of_16_kib_or_more() -> None:
    """8,384 bytes for each tensor of a million elements: one in the small first bucket, then two and two, and one."""
    program, changed = step_program(
        Bare(*[(1024, 1024)] * 6), DeepGradientCompression(), x=torch.zeros(1), loss=own_loss
    )
    assert changed.counts["exchanges"] == 4
    sent = [value_of(node.args[0]).numel() for node in calls(program, ALL_GATHER)]  # type: ignore[union-attr]
    assert sent == [8384, 16768, 16768, 8384]


class _Gathers(TorchDispatchMode):
    """Counts the sparse exchanges and the all-reduces that run."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (ALL_GATHER, ALL_REDUCE) and type(args[0]) is torch.Tensor:  # not an example value
            self.count["gather" if func is ALL_GATHER else "reduce"] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("four_ranks")
def test_each_step_runs_as_many_sparse_exchanges_as_there_are_buckets() -> None:
    """Two dense steps, then two buckets of large tensors in every step, each beside an all-reduce of the rest of it."""
    model = small()
    current = DeepGradientCompression(sparsity=(0.5, 0.9, 0.99), rampup_begin_step=2, rampup_step=6, min_elements=1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    passes = [DataParallel(bucket_mb=0.01, first_bucket_mb=0.01), current]
    step = graphopt.optimize_step(model, optimizer, passes, loss=mean_square)
    found = []
    for _ in range(9):
        with _Gathers() as counted:
            step(torch.randn(8, 16))
        found.append((counted.count["gather"], counted.count["reduce"]))
    assert found == [(0, 2)] * 4 + [(2, 2)] * 5  # at 4 ranks half of the elements are no fewer bytes than all
    assert list(step.programs) == [
        f"update, {NAME}: dense", f"update, {NAME}: sparsity 0.5", f"update, {NAME}: sparsity 0.9", "update",
    ]  # fmt: skip
    plans = {label: exchange_plan(program).lines["0"] for label, program in step.programs.items()}
    gathers = {label: sum("all_gather" in line for line in plan) for label, plan in plans.items()}
    assert list(gathers.values()) == [0, 0, 2, 2]


@pytest.mark.usefixtures("four_ranks")
def test_tied_weights_are_exchanged_once() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[1].weight = model[0].weight
    program, changed = step_program(
        model, DeepGradientCompression(sparsity=(0.9,), min_elements=1000), x=torch.randn(2, 32)
    )
    assert changed.tensors == ("0.weight",)
    assert len([spec for _, spec in program.inputs_of("pass_state") if "residual" in spec.target]) == 1


class Sum(nn.Module):
    """Two matrices of which only the sum is used."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(torch.randn(40, 40)), nn.Parameter(torch.randn(40, 40))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.one + self.two)


@pytest.mark.usefixtures("four_ranks")
def test_one_gradient_of_two_parameters_is_exchanged_once_and_refused_with_weight_decay() -> None:
    options: dict[str, Any] = {"sparsity": (0.9,), "min_elements": 1000}
    _, changed = step_program(Sum(), DeepGradientCompression(**options), x=torch.randn(2, 40))
    assert changed.counts["exchanges"] == 1
    with pytest.raises(GraphoptError, match=r"'one' and 'two' get the same gradient .* weight_decay to the optimizer"):
        step_program(Sum(), DeepGradientCompression(weight_decay=0.1, **options), x=torch.randn(2, 40))


@pytest.mark.sweep(but=("options3",))
@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize(
    "options", [{}, {"sparsity": (0.0,)}, {"correction": "feedback"}, {"sparsity": (0.0,), "correction": "feedback"}]
)
def test_a_second_time_is_nothing(options: dict[str, Any]) -> None:
    current = DeepGradientCompression(**{"sparsity": (0.9,), "min_elements": 100, **options})
    program, _ = step_program(small(), current)
    before = program.to_text()
    changed = current.apply(program)
    assert not changed
    assert changed.reason
    assert program.to_text() == before


def test_one_process_has_nothing_to_exchange() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        _, changed = step_program(small(), DeepGradientCompression())
    finally:
        dist.destroy_process_group()
    assert not changed
    assert "one process" in changed.reason
