"""DeepGradientCompression with a bandwidth: what goes densely because that takes no more time, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import graphopt
from graphopt import GraphoptError, Pipeline, Program
from graphopt.analysis.costs.profiles import PROFILES
from graphopt.ir.ops.communication.groups import Group, find_group
from graphopt.ir.ops.communication.sparse import packed_bytes
from graphopt.passes import DataParallel, DeepGradientCompression
from graphopt.rewriting.distributed.choice import sparse_or_dense as choice
from graphopt.rewriting.distributed.choice.sparse_or_dense import Speeds
from graphopt.rewriting.distributed.prediction import measured_link
from graphopt.rewriting.distributed.prediction.compressed import Sparse
from graphopt.rewriting.distributed.prediction.link import Link
from graphopt.rewriting.distributed.prediction.measured_link import link_between, measure_link
from graphopt.rewriting.distributed.prediction.predict import predict_workload
from graphopt.rewriting.distributed.prediction.strategies import Dense
from graphopt.rewriting.distributed.prediction.volume import all_reduce
from graphopt.rewriting.distributed.prediction.workload import Rates
from graphopt.rewriting.distributed.sparse.sparse_exchange import WIRE_DTYPES, entries
from graphopt.rewriting.distributed.sparse.sparse_update import few_enough
from graphopt.rewriting.pass_ import Changed
from graphopt.runtime.state.state_dict import plain_state
from tests.support.exchanging import CPU, workload
from tests.support.training import mean_square

COPY, SELECT = 1e-10, 4e-9
SLOW, FAST = 1e3, 1e15


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The devices that are measured, one entry each time; what is found are the figures above."""
    asked: list[torch.device] = []

    def rates_of(device: torch.device) -> Rates:
        asked.append(device)
        return Rates(COPY, SELECT)

    monkeypatch.setattr(choice, "rates_of", rates_of)
    return asked


@pytest.fixture
def use_ranks() -> Iterator[Callable[[int], None]]:
    """Begins a process group of so many ranks, of which only this one exists; its exchanges do nothing."""

    def begin(count: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)

    yield begin
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def four_ranks(use_ranks: Callable[[int], None]) -> None:
    use_ranks(4)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def compressed(model: nn.Module, optimizer: Any = sgd, **options: Any) -> tuple[Program, Changed]:
    """A whole step with the pass, and what it did."""
    example = torch.randn(8, next(model.parameters()).shape[-1], dtype=next(model.parameters()).dtype)
    program = graphopt.capture(model, (example,), loss=mean_square, optimizer=optimizer(model))
    current = DeepGradientCompression(**{"min_elements": 1000, **options})
    records = Pipeline([DataParallel(), current]).run(program)
    return program, records[-1].changed


def two_sizes() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 300), nn.Tanh(), nn.Linear(300, 130, bias=False), nn.Tanh(), nn.Linear(130, 4))


# --- what is chosen --------------------------------------------------------------------------------------------------

EDGES = {
    "two ranks": (2, torch.float32, "float32", 0.98),
    "two ranks, few entries": (2, torch.float32, "float32", 0.999),
    "four ranks": (4, torch.float32, "float32", 0.9),
    "bfloat16": (4, torch.bfloat16, "bfloat16", 0.99),
    "bfloat16 wire": (3, torch.float32, "bfloat16", 0.75),
}


@pytest.mark.sweep(but=("bfloat16",))
@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("kind", list(EDGES))
def test_dense_exchange_begins_where_its_bytes_take_as_long_as_selecting(
    use_ranks: Callable[[int], None], kind: str
) -> None:
    """The bandwidth at which the bytes that are saved take as long as the work that is added."""
    ranks, dtype, wire, sparsity = EDGES[kind]
    use_ranks(ranks)
    elements = 128 * 192
    count = entries(elements, sparsity)
    sent = packed_bytes([count], WIRE_DTYPES[wire])
    saved = 2 * (ranks - 1) / ranks * elements * dtype.itemsize - (ranks - 1) * sent
    summed = ranks * (sent + 2 * count * 4)  # dense sums; or entries are sorted, and three passes are saved
    if few_enough(ranks, [count], [elements]):
        summed = ranks * 64 * sent - 3 * elements * dtype.itemsize
    added = elements * SELECT + (2 * sent + summed) * COPY
    for factor, sparse in ((0.999, True), (1.001, False)):
        options: dict[str, Any] = {"sparsity": (sparsity,), "wire": wire, "bandwidth": factor * saved / added}
        _, changed = compressed(nn.Linear(128, 192, bias=False, dtype=dtype), **options)
        assert changed.counts.get("sparse gradients", 0) == sparse


@pytest.mark.sweep(but=("momentum",))
@pytest.mark.usefixtures("four_ranks", "measured")
@pytest.mark.parametrize("correction", ["momentum", "feedback"])
def test_programs_at_both_ends_are_those_by_bytes_and_without_compression(correction: str) -> None:
    by_bytes, dense, slow, fast = (
        str(compressed(two_sizes(), correction=correction, **options)[0].graph)
        for options in ({}, {"sparsity": (0.0,)}, {"bandwidth": SLOW}, {"bandwidth": FAST})
    )
    assert slow == by_bytes
    assert fast == dense
    assert slow != fast


@pytest.mark.sweep
@pytest.mark.usefixtures("four_ranks", "measured")
def test_what_bytes_and_shapes_decide_is_decided_by_them_first() -> None:
    _, changed = compressed(two_sizes(), bandwidth="1kbit", sparsity=(0.75, 0.99), min_elements=20000)
    assert "dense, fewer than 20000 elements: 4.bias, 4.weight, 0.bias, 0.weight" in changed.lines
    assert "sparsity 0.99 here; 0.75 from step 0 (dense), 0.99 from step 50" in changed.lines
    assert changed.tensors == ("2.weight",)


@pytest.mark.usefixtures("four_ranks", "measured")
def test_the_record_lists_every_choice_with_both_times() -> None:
    """300 x 130 elements: 156 µs to select from and 24 µs to read and write; densely 62 µs, and 234 kB to receive."""
    _, changed = compressed(two_sizes(), sparsity=(0.999,), bandwidth="2Gbit")
    assert (
        "dense or sparse by time at 2 Gbit/s per rank, as given; selecting takes 4 ns an element, copying 0.1 ns a byte"
        in changed.lines
    )
    assert "sparse, sparse exchange is faster at 2 Gbit/s: 183 µs against 998 µs: 2.weight" in changed.lines
    assert changed.tensors == ("2.weight", "0.weight")
    program, changed = compressed(two_sizes(), sparsity=(0.999,), bandwidth=2e9)
    assert "dense, dense exchange is no slower at 16 Gbit/s: 179 µs against 180 µs: 2.weight" in changed.lines
    assert changed.counts == {"dense gradients": 5}
    assert "bandwidth=2000000000.0" in program.history[-1]


@pytest.mark.usefixtures("four_ranks", "measured")
def test_the_record_says_which_sparsities_of_the_warm_up_are_dense_by_time() -> None:
    """39,000 elements at 4 ranks: half of the bytes are saved at 0.875, and all but 0.4 % of them at 0.999."""
    lines = compressed(two_sizes(), sparsity=(0.875, 0.999), bandwidth=1e9)[1].lines
    assert any(line.startswith("sparsity 0.999 here; 0.875 from step 0 (dense), 0.999 from step 50") for line in lines)


@pytest.mark.sweep
@pytest.mark.usefixtures("four_ranks", "measured")
def test_feedback_that_goes_densely_altogether_does_nothing_and_says_why() -> None:
    _, changed = compressed(
        two_sizes(), lambda model: torch.optim.AdamW(model.parameters()), correction="feedback", bandwidth=FAST
    )
    assert not changed
    assert "dense exchange is no slower at 8000 Tbit/s" in changed.reason


# --- the rule --------------------------------------------------------------------------------------------------------

rates = st.builds(Rates, st.floats(1e-13, 1e-8), st.floats(1e-12, 1e-7))
shapes = st.tuples(st.integers(128, 2000), st.integers(128, 2000))
sparsities = st.floats(0.01, 0.9999)


@given(st.floats(1e3, 1e13), rates, shapes, sparsities, st.integers(2, 1000))
def test_seconds_are_those_of_the_dry_run(
    bandwidth: float, rates: Rates, shape: tuple[int, int], sparsity: float, ranks: int
) -> None:
    """The work and the exchange of a step that has this gradient alone."""
    found = Speeds(bandwidth, rates).seconds(torch.empty(shape, device="meta"), sparsity, torch.float32, ranks)
    made = workload(shape, rates=rates)
    for seconds, way in zip(found, (Dense(), Sparse(1 - sparsity)), strict=True):
        predicted = predict_workload(made, ranks, Link(bandwidth), way)
        if len(predicted.kept_dense) == 0:
            assert seconds == pytest.approx(predicted.work + predicted.alone)


@given(st.floats(1e3, 1e13), st.floats(1, 100), rates, shapes, sparsities, sparsities)
def test_slower_links_and_higher_sparsities_never_turn_to_dense_exchange(
    bandwidth: float, factor: float, rates: Rates, shape: tuple[int, int], one: float, other: float
) -> None:
    """So that the program of the last sparsity keeps whatever one before it keeps."""
    gradient = torch.empty(shape, device="meta")
    low, high = sorted((one, other))
    if not Speeds(bandwidth, rates).why_dense(gradient, low, torch.float32, 4):
        assert not Speeds(bandwidth, rates).why_dense(gradient, high, torch.float32, 4)
        dense, sparse = Speeds(bandwidth / factor, rates).seconds(gradient, low, torch.float32, 4)
        assert sparse < dense


# --- measuring -------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_what_work_costs_is_measured_once_for_a_group(
    use_ranks: Callable[[int], None], measured: list[torch.device]
) -> None:
    """Not at all by bytes alone; once for all programs and all bandwidths; again for another group."""
    use_ranks(4)
    compressed(two_sizes())
    assert measured == []
    model = two_sizes()
    current = DeepGradientCompression(
        sparsity=(0.8, 0.9), rampup_begin_step=1, rampup_step=2, min_elements=1000, bandwidth="1Mbit"
    )
    step = graphopt.optimize_step(model, sgd(model), [DataParallel(), current], loss=mean_square)
    for _ in range(4):
        step(torch.randn(8, 64))
    assert len(step.programs) == 3
    compressed(two_sizes(), bandwidth=FAST)
    assert measured == [CPU]
    use_ranks(2)
    compressed(two_sizes(), bandwidth=FAST)
    assert measured == [CPU, CPU]


@pytest.mark.usefixtures("four_ranks")
def test_costs_that_are_measured_here_are_sensible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphopt.rewriting.distributed.prediction.workload._SELECTED_FROM", 2**16)
    program = graphopt.capture(nn.Linear(2, 2), (torch.randn(3, 2),), loss=mean_square)
    found = choice.speeds_of(program, find_group(""), CPU, "1Gbit")
    assert found.bandwidth == 1.25e8
    assert not found.measured
    assert 0 < found.rates.copy < 1e-6
    assert 0 < found.rates.select < 1e-3


@pytest.mark.usefixtures("four_ranks")
def test_ranks_that_are_here_with_the_seconds_of_a_device_are_joined_by_its_links() -> None:
    """Also of a device whose profile says nothing of a network between hosts."""
    program = graphopt.capture(nn.Linear(2, 2), (torch.randn(3, 2),), loss=mean_square)
    assert PROFILES["l4"].network_bandwidth == 0
    assert link_between(program, find_group(""), CPU, "l4").bandwidth == PROFILES["l4"].peer_bandwidth


class Network:
    """A clock that goes on by what all-reduces would take on a link."""

    def __init__(self, link: Link, ranks: int) -> None:
        self.link, self.ranks, self.now = link, ranks, 0.0

    def all_reduce(self, tensor: torch.Tensor, **options: Any) -> None:
        del options
        self.now += all_reduce(tensor.numel() * tensor.element_size(), self.ranks).seconds(self.link, self.ranks)


@given(st.floats(1e3, 1e12), st.floats(0, 1e-2), st.integers(2, 64))
def test_a_link_is_measured_as_it_is(bandwidth: float, latency: float, ranks: int) -> None:
    """In less than a second from 10 Mbit/s on, beside the latency of at most 60 collectives."""
    network = Network(Link(bandwidth, latency), ranks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend", lambda group: "gloo")
        patch.setattr(dist, "all_reduce", network.all_reduce)
        patch.setattr("graphopt.rewriting.distributed.prediction.measured_link.time.perf_counter", lambda: network.now)
        found = measure_link(Group("0", 0, ranks, None), CPU)
    assert found.bandwidth == pytest.approx(bandwidth, rel=1e-3)
    assert found.latency == pytest.approx(latency, abs=4 / bandwidth + 1e-9)
    if bandwidth >= 1.25e6:
        assert network.now < 1 + 60 * 2 * (ranks - 1) * latency


@pytest.mark.sweep
@pytest.mark.usefixtures("four_ranks", "measured")
def test_a_group_that_moves_nothing_cannot_be_measured() -> None:
    message = r"group '0' has the backend 'fake', which moves nothing.* give the bandwidth as a figure, such as '1Gbit'"
    with pytest.raises(GraphoptError, match=message):
        compressed(two_sizes(), bandwidth="measured")


def test_one_rank_has_no_link(use_ranks: Callable[[int], None]) -> None:
    use_ranks(1)
    with pytest.raises(GraphoptError, match="'0' has one rank, and no link to measure"):
        measure_link(find_group(""), CPU)
    changed = compressed(two_sizes(), bandwidth="measured")[1]
    assert "one process" in changed.reason


def test_without_a_process_group_the_error_says_so() -> None:
    with pytest.raises(GraphoptError, match=r"there is no process group: call torch.distributed.init_process_group"):
        compressed(two_sizes(), bandwidth="measured")


# --- resuming --------------------------------------------------------------------------------------------------------


def step_at(bandwidth: str | float) -> graphopt.TrainStep:
    torch.manual_seed(0)
    model = two_sizes()
    current = DeepGradientCompression(sparsity=(0.99,), rampup_step=1, min_elements=1000, bandwidth=bandwidth)
    return graphopt.optimize_step(model, sgd(model), [DataParallel(), current], loss=mean_square)


def trained(bandwidth: float) -> dict[str, Any]:
    step = step_at(bandwidth)
    step(torch.randn(8, 64))
    return step.state_dict()


@pytest.mark.sweep
@pytest.mark.usefixtures("four_ranks", "measured")
def test_a_state_whose_residuals_would_be_lost_is_refused() -> None:
    """A run that chooses otherwise than the saved one does not drop what is waiting; the first call says so."""
    step = step_at(FAST)
    step.load_state_dict(trained(SLOW))
    with pytest.raises(GraphoptError, match=r"(?s)the state of passes does not fit.*residual/0.weight"):
        step(torch.randn(8, 64))
    running = step_at(FAST)
    running(torch.randn(8, 64))
    with pytest.raises(GraphoptError, match=r"(?s)the state of passes does not fit.*residual/0.weight"):
        running.load_state_dict(trained(SLOW))


@pytest.mark.usefixtures("four_ranks", "measured")
def test_a_dense_state_goes_on_sparsely_with_its_momentum() -> None:
    """Nothing waits in a run that exchanged densely: residuals begin at 0."""
    state = trained(FAST)
    step = step_at(SLOW)
    step.load_state_dict(state)
    step.prepare(torch.randn(8, 64))
    held = plain_state(step.state_dict())["held"]
    assert {name for name in held if "/residual/" in name} == {
        "deep-gradient-compression/residual/0.weight", "deep-gradient-compression/residual/2.weight",
    }  # fmt: skip
    assert not any(tensor.any() for name, tensor in held.items() if "/residual/" in name)
    assert all(torch.equal(held[name], tensor) for name, tensor in plain_state(state)["held"].items())


def measure_as(monkeypatch: pytest.MonkeyPatch, bandwidth: float) -> None:
    """Be a new process, whose ranks measure this bandwidth."""
    monkeypatch.setattr(measured_link, "measure_link", lambda group, device: Link(bandwidth, 0.0))
    monkeypatch.setattr(measured_link, "_agreed", WeakKeyDictionary())


@pytest.mark.sweep
@pytest.mark.usefixtures("four_ranks", "measured")
@pytest.mark.parametrize(("then", "now", "sparse"), [(SLOW, FAST, 2), (FAST, SLOW, 0)])
def test_a_run_that_continues_chooses_by_what_was_measured_when_it_began(
    monkeypatch: pytest.MonkeyPatch, then: float, now: float, sparse: int
) -> None:
    batch = torch.randn(8, 64)
    measure_as(monkeypatch, then)
    whole = step_at("measured")
    whole(batch)
    state = whole.state_dict()
    assert sum("/residual/" in name for name in state["held"]) == sparse
    measure_as(monkeypatch, now)
    anew = step_at("measured").prepare(batch)
    assert sum("/residual/" in name for name in anew.state_dict()["held"]) == 2 - sparse
    continued = step_at("measured")
    continued.load_state_dict(state)
    continued.prepare(batch)
    assert continued.state_dict()["numbers"] == state["numbers"]
    assert all(torch.equal(state["held"][name], held) for name, held in continued.state_dict()["held"].items())
    assert continued.program.to_text() == whole.program.to_text()


@pytest.mark.sweep
@pytest.mark.usefixtures("four_ranks", "measured")
def test_a_bandwidth_that_is_given_counts_more_than_a_measured_one_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_as(monkeypatch, FAST)
    step = step_at("measured")
    step(torch.randn(8, 64))
    other = step_at(SLOW)
    other.load_state_dict(step.state_dict())
    other.prepare(torch.randn(8, 64))
    assert sum("/residual/" in name for name in other.state_dict()["held"]) == 2
