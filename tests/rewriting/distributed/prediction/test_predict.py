"""The model of gradient exchange: its bytes are those of rewritten programs, its seconds obey what must hold."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import graphopt
from graphopt import GraphoptError, Pipeline, Program
from graphopt.ir.ops.communication.sparse import packed_bytes
from graphopt.passes import DataParallel, DeepGradientCompression, DiLoCo, LocalSGD
from graphopt.passes.compress_gradients import CompressGradients
from graphopt.rewriting.distributed.prediction import workload as workload_module
from graphopt.rewriting.distributed.prediction.advice import (
    MOST_RANKS,
    SHARE,
    faster_below,
    faster_up_to,
    plan_exchange,
)
from graphopt.rewriting.distributed.prediction.compressed import LowRank, Sparse
from graphopt.rewriting.distributed.prediction.link import Link, format_bandwidth, parse_bandwidth, parse_latency
from graphopt.rewriting.distributed.prediction.predict import STRATEGIES, Prediction, predict, predict_workload
from graphopt.rewriting.distributed.prediction.step_timeline import Message, Messages, simulate
from graphopt.rewriting.distributed.prediction.strategies import (
    Dense,
    Local,
    Outer,
    Sharded,
    ShardedParameters,
    Strategy,
)
from graphopt.rewriting.distributed.prediction.volume import (
    Volume,
    all_gather,
    all_reduce,
    broadcast,
    pays_sparse,
    reduce_scatter,
)
from graphopt.rewriting.distributed.prediction.workload import Rates, Workload, workload_of
from graphopt.runtime.ranks.exchange_plan import exchange_plan
from tests.support.costs import use_folder
from tests.support.exchanging import CPU, gradient, links, plain_step, step_with, wide, workload, workloads
from tests.support.properties import examples
from tests.support.training import captured, mean_square

COST = "a100-80gb"
PER_TENSOR = Dense(bucket_mb=0, first_bucket_mb=0)
ALL_WAYS = [
    *STRATEGIES.values(),
    Sparse(0.25),
    Sparse(0.01, torch.bfloat16),
    LowRank(4),
    Local(1),
    Dense(wire=torch.float16),
]

any_way = st.sampled_from(ALL_WAYS)
some_ranks = st.integers(2, 10_000)

# --- links as text ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10Mbit", 1.25e6), ("1Gbit", 1.25e8), ("1gbit", 1.25e8), ("1 Gbit/s", 1.25e8), ("100Gbps", 1.25e10),
        ("400Gb/s", 5e10), ("25GB/s", 2.5e10), ("1.5GBps", 1.5e9), ("1Gibit", 2**30 / 8), ("2MiB/s", 2**21),
        ("800bit/s", 100.0), (".5kbit", 62.5),
    ],
)  # fmt: skip
def test_bandwidths_are_bits_or_bytes(text: str, expected: float) -> None:
    assert parse_bandwidth(text) == expected


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("1G", "did you mean '1Gbit' or '1GB/s'?"),
        ("10", "did you mean '10bit' or '10B/s'?"),
        ("1Gb", "did you mean '1Gbit' or '1GB/s'?"),
        ("25GB", "did you mean '25Gbit' or '25GB/s'?"),
        ("1Gbyte/s", "did you mean '1GB/s'?"),
        ("1Gbits/sec", "did you mean '1Gbit'?"),
        ("0Mbit", "'0Mbit' is not a bandwidth above 0"),
        ("1ibit", "write 10Mbit, 1Gbit or 100Gbps"),
        ("fast", "write 10Mbit, 1Gbit or 100Gbps (bits per second), or 25GB/s (bytes per second)"),
        ("-1Gbit", "is not a bandwidth"),
        ("1e400Gbit", "is not a bandwidth"),
    ],
)
def test_what_is_no_bandwidth_is_an_error_that_says_what_was_meant(text: str, hint: str) -> None:
    with pytest.raises(GraphoptError, match=re.escape(hint)):
        parse_bandwidth(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("50us", 5e-5), ("50µs", 5e-5), ("1ms", 1e-3), (".1 s", 0.1), ("200ns", 2e-7), ("0", 0.0), ("0us", 0.0)],
)
def test_latencies(text: str, expected: float) -> None:
    assert parse_latency(text) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("50", "did you mean '50us' or '50ms'?"), ("50usec", "did you mean '50us'?"), ("1msec", "did you mean '1ms'?"),
        ("1min", "write 50us, 1ms or 0.1s"), ("soon", "'soon' is not a latency"), ("-1ms", "is not a latency"),
    ],
)  # fmt: skip
def test_what_is_no_latency_is_an_error(text: str, hint: str) -> None:
    with pytest.raises(GraphoptError, match=re.escape(hint)):
        parse_latency(text)


@given(st.floats(1.0, 1e13))
def test_bandwidths_are_written_as_they_are_read(bandwidth: float) -> None:
    assert parse_bandwidth(format_bandwidth(bandwidth)) == pytest.approx(bandwidth, rel=6e-3)


@pytest.mark.parametrize(
    "wrong",
    [(0.0, 0.0, "ring"), (math.inf, 0.0, "ring"), (1.0, -1.0, "ring"), (1.0, math.nan, "ring"), (1, 0, "rings")],
)
def test_a_link_needs_figures_that_make_sense(wrong: Any) -> None:
    with pytest.raises(GraphoptError, match=r"bandwidth|latency|did you mean 'ring'"):
        Link(*wrong)


def test_rounds_of_rings_and_trees() -> None:
    assert [Link(1, 0, "ring").rounds(n) for n in (1, 2, 4, 5, 10_000)] == [0, 1, 3, 4, 9_999]
    assert [Link(1, 0, "tree").rounds(n) for n in (1, 2, 4, 5, 10_000)] == [0, 1, 2, 3, 14]


# --- volumes ---------------------------------------------------------------------------------------------------------


def test_the_volumes_of_collectives() -> None:
    assert all_reduce(400, 4) == Volume(1, 400, 600, 600, 2)
    assert reduce_scatter(400, 4) == Volume(1, 400, 300, 300, 1)
    assert all_gather(100, 4) == Volume(1, 100, 300, 300, 1)
    assert broadcast(100, 4) == Volume(1, 100, 100, 100, 1, relayed=True)
    assert all_gather(100, 4) + reduce_scatter(400, 4) == Volume(2, 500, 600, 600, 2)
    assert [v(100, 1).received for v in (all_reduce, reduce_scatter, all_gather, broadcast)] == [0, 0, 0, 0]


def test_seconds_are_rounds_of_latency_and_bytes() -> None:
    link = Link(100.0, 0.5)
    assert all_reduce(400, 4).seconds(link, 4) == 2 * 3 * 0.5 + 6
    assert all_gather(100, 4).seconds(link, 4) == 3 * 0.5 + 3
    assert all_reduce(400, 4).seconds(replace(link, algorithm="tree"), 4) == 2 * 2 * 0.5 + 6


@pytest.mark.parametrize(("density", "ranks"), [(0.001, 1000), (0.01, 100), (0.25, 4), (0.0625, 16)])
def test_sparse_exchange_ends_where_ranks_times_density_is_one(density: float, ranks: int) -> None:
    """The published rule, for 4 bytes of index and 4 of value."""
    large = gradient(0, (1000, 1000), 1.0)
    entry = Sparse(density).entry_bytes([large])
    assert entry == 8 * round(density * 10**6)
    assert pays_sparse(large, entry, ranks - 1)
    assert not pays_sparse(large, entry, ranks)
    assert not pays_sparse(large, Sparse(density, torch.float16).entry_bytes([large]), math.ceil(ranks * 1.34))
    assert pays_sparse(large, Sparse(density, torch.float16).entry_bytes([large]), math.floor(ranks * 1.32))


@pytest.mark.parametrize(
    ("shape", "eligible"), [((128, 128), True), ((127, 129), False), ((16384,), False), ((64, 64, 2, 2), True)]
)
def test_small_gradients_and_vectors_stay_dense(shape: tuple[int, ...], eligible: bool) -> None:
    assert pays_sparse(gradient(0, shape, 1.0), 1, 2) is eligible
    kept = predict_workload(workload(shape), 2, Link(1e6), Sparse()).kept_dense
    assert len(kept) == (0 if eligible else 1)


def test_the_published_sizes_of_resnet50() -> None:
    """161 gradients in 6 buckets of 16 MB; at 0.1 % more than 250 times fewer bytes than dense with 4 ranks."""
    from examples.models import ResNet50

    with torch.device("meta"):
        parameters = list(ResNet50().parameters())
    made = workload(*(tuple(parameter.shape) for parameter in reversed(parameters)))
    dense = Dense(bucket_mb=16, first_bucket_mb=16).messages(made, 4).volume
    assert (dense.messages, dense.payload) == (6, 4 * 25_557_032)
    assert PER_TENSOR.messages(made, 4).volume.messages == 161
    sparse = Sparse().messages(made, 4)
    assert len(sparse.kept_dense) == 161 - 52
    selected = sparse.volume.payload - sum(kept.bytes for kept in sparse.kept_dense)
    assert selected == pytest.approx(8 * 0.001 * 0.9974 * 25_557_032, rel=2e-3)
    assert sum(g.bytes for g in made.gradients if g not in sparse.kept_dense) / selected > 499


# --- bytes of rewritten programs -------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[int]:
    """A process group of so many ranks of which only this one exists; its exchanges do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    yield request.param
    dist.destroy_process_group()


ITEMSIZE = {"f32": 4, "bf16": 2, "u8": 1, "f64": 8, "i64": 8, "b8": 1}


def exchanged(program: Program, ranks: int) -> Volume:
    """What the collectives of a rewritten program put in and move, from the plan that ranks compare before they run."""
    found = Volume()
    for step in (step for steps in exchange_plan(program).lines.values() for step in steps):
        match = re.match(r"(\w+) to (\w+)\[([\d, ]*)\]", step)
        assert match is not None, step
        size = ITEMSIZE[match[2]] * math.prod(int(number) for number in match[3].split(",") if number)
        kinds: dict[str, Callable[[float, int], Volume]] = {"all_reduce": all_reduce, "broadcast": broadcast}
        if match[1] == "all_gather_into_tensor":
            found += all_gather(size / ranks, ranks)
        else:
            found += kinds[match[1]](size, ranks)
    return found


@pytest.mark.sweep(but=("2-options1-strategy1",))
@pytest.mark.parametrize(
    ("options", "strategy"),
    [
        ({}, Dense()),
        ({"bucket_mb": 0.05, "first_bucket_mb": 0.001}, Dense(bucket_mb=0.05, first_bucket_mb=0.001)),
        ({"bucket_mb": 0.0}, PER_TENSOR),
    ],
)
def test_dense_volumes_are_those_of_data_parallel(ranks: int, options: dict[str, float], strategy: Strategy) -> None:
    predicted = predict(plain_step(wide()), ranks, 1e9, strategy=strategy, cost=COST)
    found = exchanged(step_with(DataParallel(**options)), ranks)
    assert (predicted.messages, predicted.payload) == (found.messages, found.payload)
    assert predicted.received == pytest.approx(found.received, rel=1e-12)


@pytest.mark.sweep
@pytest.mark.parametrize("sparsity", [0.999, 0.75, 0.5])
@pytest.mark.parametrize("bucket_mb", [32.0, 0.05])
def test_sparse_volumes_are_those_of_deep_gradient_compression(ranks: int, sparsity: float, bucket_mb: float) -> None:
    """At sparsity 0.75 four ranks, at 0.5 two ranks, take as many bytes as densely, and are exchanged so."""
    strategy = Sparse(1 - sparsity, bucket_mb=bucket_mb)
    predicted = predict(plain_step(wide()), ranks, 1e9, strategy=strategy, cost=COST)
    compressed = DeepGradientCompression(sparsity=(sparsity,), momentum=0.9)
    found = exchanged(step_with(DataParallel(bucket_mb=bucket_mb), compressed), ranks)
    assert (predicted.messages, predicted.payload) == (found.messages, found.payload)
    assert predicted.received == pytest.approx(found.received, rel=1e-12)


@pytest.mark.sweep
@pytest.mark.parametrize("bucket_mb", [32.0, 0.05])
@pytest.mark.parametrize(
    ("compressed", "strategy"),
    [
        (CompressGradients("bf16"), Dense(wire=torch.bfloat16)),
        (CompressGradients("powersgd"), LowRank(1)),
        (CompressGradients("powersgd", rank=3), LowRank(3)),
    ],
    ids=str,
)
def test_compressed_volumes_are_those_of_compress_gradients(
    ranks: int, bucket_mb: float, compressed: CompressGradients, strategy: Strategy
) -> None:
    predicted = predict(plain_step(wide()), ranks, 1e9, strategy=replace(strategy, bucket_mb=bucket_mb), cost=COST)
    found = exchanged(step_with(DataParallel(bucket_mb=bucket_mb), compressed), ranks)
    assert (predicted.messages, predicted.payload) == (found.messages, found.payload)
    assert predicted.received == pytest.approx(found.received, rel=1e-12)


@pytest.mark.sweep(but=("4-32.0",))
@pytest.mark.parametrize("bucket_mb", [32.0, 0.05])
def test_local_volumes_are_those_of_local_sgd_over_its_interval(ranks: int, bucket_mb: float) -> None:
    predicted = predict(plain_step(wide()), ranks, 1e9, strategy=Local(4, bucket_mb=bucket_mb), cost=COST)
    found = exchanged(step_with(DataParallel(bucket_mb=bucket_mb), LocalSGD(k_steps=4)), ranks)
    assert (predicted.messages, predicted.payload) == (found.messages / 4, found.payload / 4)
    assert predicted.received == pytest.approx(found.received / 4, rel=1e-12)


@pytest.mark.sweep(but=("4-options2",))
@pytest.mark.parametrize("options", [{}, {"bits": 16}, {"bits": 8}, {"bits": 4}, {"sparsity": 0.99}])
def test_outer_volumes_are_those_of_diloco_over_its_interval(ranks: int, options: dict[str, Any]) -> None:
    predicted = predict(plain_step(wide()), ranks, 1e9, strategy=Outer(4, **options), cost=COST)
    found = exchanged(step_with(DataParallel(), DiLoCo(every=4, **options)), ranks)
    assert (predicted.messages, predicted.payload) == (found.messages / 4, found.payload / 4)
    assert predicted.received == pytest.approx(found.received / 4, rel=1e-12)


@pytest.mark.sweep
def test_a_drop_in_program_is_predicted_too(ranks: int) -> None:
    model = wide()
    program = graphopt.capture(model, (torch.randn(8, 64),))
    predicted = predict(program, ranks, 1e9, strategy="fused", cost=COST)
    Pipeline([DataParallel()]).run(program)
    assert predicted.payload == exchanged(program, ranks).payload


@pytest.mark.sweep
def test_programs_that_exchange_already_are_refused(ranks: int) -> None:
    with pytest.raises(GraphoptError, match=r"exchanged already \('.*' by data-parallel.*: plan the program without"):
        predict(step_with(DataParallel()), ranks, 1e9, cost=COST)


# --- workloads -------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_gradients_are_ready_as_backward_makes_them() -> None:
    program = plain_step(wide())
    found = workload_of(program, COST)
    assert {g.name for g in found.gradients} == {name for name, _ in wide().named_parameters()}
    assert [g.place for g in found.gradients] == sorted(g.place for g in found.gradients)
    moments = [g.ready for g in found.gradients]
    assert moments == sorted(moments)
    assert found.forward < moments[0] < moments[-1] <= found.backward
    assert found.gradients[-1].name.startswith("0.")
    assert found.update > 0
    assert found.buffers == (2 * 300 * 4,)
    assert found.compute == pytest.approx(sum(graphopt_seconds(program)))


def graphopt_seconds(program: Program) -> list[float]:
    from graphopt.analysis.costs.cost import PROFILES, op_seconds

    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    return op_seconds(calls, method="roofline", profile=PROFILES[COST])


@pytest.mark.sweep
def test_selection_is_measured_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_folder(tmp_path, monkeypatch)
    runs: list[torch.device] = []
    monkeypatch.setattr(workload_module, "_SELECTED_FROM", 2**16)
    measure = workload_module._selection_seconds
    monkeypatch.setattr(workload_module, "_selection_seconds", lambda device: runs.append(device) or measure(device))
    program = captured(nn.Linear(4, 4), torch.zeros(2, 4))
    one, other = workload_of(program), workload_of(program)
    assert runs == [CPU]
    assert one.rates == other.rates
    assert 0 < one.rates.select < 1e-3
    assert 0 < one.rates.copy < 1e-6


def test_other_cost_models_take_selection_by_its_bytes() -> None:
    rates = workload_of(captured(nn.Linear(4, 4), torch.zeros(2, 4)), COST).rates
    assert rates.select == pytest.approx(7 * 4 * rates.copy)


def test_what_cannot_be_predicted_is_an_error() -> None:
    program = captured(nn.Linear(4, 4), torch.zeros(2, 4))
    frozen = nn.Linear(4, 4).requires_grad_(False)
    without = captured(nn.Sequential(frozen), torch.zeros(2, 4, requires_grad=True))
    forward = graphopt.capture(nn.Linear(4, 4), (torch.zeros(2, 4),), stage="forward")
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: predict(forward, 2, 1e9, cost=COST), "capture the stage joint or step"),
        (lambda: predict(without, 2, 1e9, cost=COST), "there is nothing to exchange"),
        (lambda: predict(program, 1, 1e9, cost=COST), "2 ranks or more, got 1"),
        (lambda: predict(program, 2, "1G", cost=COST), "did you mean '1Gbit'"),
        (lambda: predict(program, 2, 1e9, "1", cost=COST), "did you mean '1us'"),
        (lambda: predict(program, 2, 1e9, strategy="fusd", cost=COST), "did you mean 'fused'"),
        (lambda: predict(program, 2, 1e9, strategy="?", cost=COST), "the ways are per-tensor, fused"),
        (lambda: predict(program, 2, 1e9, cost="a100"), "did you mean 'a100-40gb', 'a100-80gb'"),
        (lambda: Sparse(0.0), "above 0 and below 1, got 0.0"),
        (lambda: Sparse(1.0), "exchange densely"),
        (lambda: Local(0), "k_steps is a number of steps of at least 1"),
        (lambda: LowRank(0), "rank is a whole number of at least 1"),
    ]
    for run, message in wrong:
        with pytest.raises(GraphoptError, match=re.escape(message)):
            run()


# --- timelines -------------------------------------------------------------------------------------------------------


def of_seconds(seconds: float) -> Volume:
    """A message that takes so many seconds at one byte per second."""
    return Volume(1, seconds, seconds, seconds, 0)


ONE = Link(1.0)


def test_exchanges_hide_beside_backward_and_queue_on_the_network() -> None:
    messages = [Message(of_seconds(2), ready=1.0), Message(of_seconds(3), ready=2.0), Message(of_seconds(1), ready=4.0)]
    line = simulate(Messages(tuple(messages)), ONE, 2, backward=4.0, update=1.0)
    assert line.spans == ((1, 3), (3, 6), (6, 7))
    assert (line.step, line.compute, line.alone, line.exposed, line.work) == (8, 5, 6, 3, 0)


def test_what_ends_before_backward_is_not_waited_for() -> None:
    line = simulate(Messages((Message(of_seconds(2), ready=1.0),)), ONE, 2, backward=4.0, update=1.0)
    assert (line.step, line.exposed) == (5, 0)


def test_work_around_exchanges_delays_what_follows() -> None:
    messages = [
        Message(of_seconds(1), ready=1.0, before=0.5, after=0.25), Message(of_seconds(1), ready=2.0, before=0.5),
    ]  # fmt: skip
    line = simulate(Messages(tuple(messages)), ONE, 2, backward=2.0)
    assert line.spans == ((1.5, 2.5), (3.0, 4.0))
    assert (line.work, line.step, line.exposed) == (1.25, 4.0, 0.75)


def test_what_follows_the_update_is_exposed() -> None:
    late = (Message(of_seconds(2), before=0.5, after=0.25), Message(of_seconds(1)))
    line = simulate(Messages(late=late), ONE, 2, backward=2.0, update=1.0)
    assert line.spans == ((3.5, 5.5), (5.75, 6.75))
    assert (line.step, line.exposed, line.work) == (6.75, 3, 0.75)


def test_second_messages_are_made_of_the_first() -> None:
    second = (Message(of_seconds(1), before=0.5, after=0.25), Message(of_seconds(2), before=0.5))
    line = simulate(Messages((Message(of_seconds(3), ready=1.0),), second), ONE, 2, backward=2.0, update=1.0)
    assert line.spans == ((1, 4), (4.5, 5.5), (5.5, 7.5))
    assert (line.step, line.work, line.exposed) == (8.5, 1.25, 4.25)


def test_computation_waits_for_what_it_reads() -> None:
    """From 1.0 on for the first to arrive at 3.0, for the second until 5.0, and the exchange behind is late by that."""
    messages = [
        Message(of_seconds(3), needed=1.0), Message(of_seconds(2), needed=1.5), Message(of_seconds(1), ready=1.75),
    ]  # fmt: skip
    line = simulate(Messages(tuple(messages)), ONE, 2, backward=2.0)
    assert line.spans == ((0.0, 3.0), (3.0, 5.0), (5.25, 6.25))
    assert (line.step, line.exposed) == (6.25, 2.0 + 1.5 + 0.75)
    early = simulate(Messages((Message(of_seconds(1), needed=1.5),)), ONE, 2, backward=2.0)
    assert (early.step, early.exposed) == (2.0, 0.0)


def test_sharded_parameters_are_gathered_in_front_of_what_reads_them() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    program = graphopt.capture(model, (torch.randn(4, 256),), loss=mean_square, optimizer=optimizer)
    made = workload_of(program, "roofline")
    weight, bias = 256 * 256 * 4, 256 * 4
    found = predict_workload(made, 4, Link(1e9), ShardedParameters())
    assert found.received == pytest.approx(
        0.75 * (3 * weight + 2 * (weight + bias) + 2 * bias)
    )  # not read behind input
    once = predict_workload(made, 4, Link(1e9), ShardedParameters(stay=True))
    assert once.received == pytest.approx(0.75 * (2 * weight + 2 * (weight + bias) + 2 * bias))  # one gather less
    slow = predict_workload(made, 4, Link(1e5), ShardedParameters())
    assert slow.step == pytest.approx(slow.alone, rel=0.01)
    assert found.step < slow.step


def test_a_sharded_update_runs_in_pieces() -> None:
    made = workload((100, 100), update=0.8)
    dense, sharded = (predict_workload(made, 8, Link(1e12), strategy) for strategy in (Dense(), Sharded()))
    assert sharded.received == pytest.approx(dense.received)
    assert sharded.alone == pytest.approx(dense.alone)
    assert dense.step - sharded.step == pytest.approx(0.7, rel=1e-3)
    elsewhere = replace(made, gradients=tuple(replace(g, device=torch.device("cuda")) for g in made.gradients))
    assert predict_workload(elsewhere, 8, Link(1e12), Sharded()).alone == pytest.approx(dense.alone)


def test_sgd_updates_the_entries_that_arrive_where_they_are_few() -> None:
    """The vector is updated as a whole; the sums of the others take the time of their entries."""
    made = workload((1000, 1000), (1000, 999), (1000,), update=0.5, rates=Rates(1e-9, 0.0))
    for adds, density, share in ((True, 0.001, 1 / 2000), (True, 0.02, 1.0), (False, 0.001, 1.0)):
        found = Sparse(density).messages(replace(made, adds=adds), 2)
        assert found.update == pytest.approx(share)
    few, dense = (predict_workload(replace(made, adds=adds), 2, Link(1e9), Sparse()) for adds in (True, False))
    sent = packed_bytes([1000, 999])
    assert dense.work - few.work == pytest.approx((3 * 1_999_000 * 4 + 2 * 2 * 1_999 * 4 - 2 * 63 * sent) * 1e-9)
    assert few.step < dense.step
    assert few.sent == dense.sent


def test_a_local_step_is_the_mean_of_its_interval() -> None:
    made = workload((100, 100), (100,), buffers=(50,))
    once, tenth = (predict_workload(made, 4, Link(1e5), Local(k)) for k in (1, 10))
    assert once.payload == 4 * 10_100 + 50
    for figure in ("messages", "payload", "sent", "received", "alone", "exposed", "work"):
        assert getattr(tenth, figure) == pytest.approx(getattr(once, figure) / 10)
    assert tenth.step - tenth.compute == pytest.approx((once.step - once.compute) / 10)


# --- what holds for any workload -------------------------------------------------------------------------------------


@given(workloads(), some_ranks, links, any_way, st.floats(1, 100))
def test_more_bandwidth_is_never_slower(
    made: Workload, ranks: int, link: Link, strategy: Strategy, factor: float
) -> None:
    slow = predict_workload(made, ranks, link, strategy)
    fast = predict_workload(made, ranks, replace(link, bandwidth=link.bandwidth * factor), strategy)
    assert fast.step <= slow.step
    assert fast.alone <= slow.alone


@given(workloads(), st.lists(some_ranks, min_size=2, max_size=6), st.sampled_from([0.25, 0.01, 0.001]))
def test_more_ranks_never_receive_fewer_bytes(made: Workload, counts: list[int], density: float) -> None:
    """Sparse exchange turns dense where it would take more, so that it never takes more than that either."""
    for strategy in (Sparse(density), Sparse(density, torch.bfloat16)):
        volumes = [strategy.messages(made, count).volume.received for count in sorted(counts)]
        assert all(one <= other * (1 + 1e-9) + 1 for one, other in pairwise(volumes))


@given(workloads(), some_ranks, links)
def test_fused_is_never_more_messages_and_never_other_bytes(made: Workload, ranks: int, link: Link) -> None:
    fused, single = (predict_workload(made, ranks, link, strategy) for strategy in (Dense(), PER_TENSOR))
    assert fused.messages <= single.messages
    assert fused.payload == single.payload
    assert fused.alone <= single.alone * (1 + 1e-9)


@given(workloads(), some_ranks, links, any_way)
def test_a_step_lies_between_its_computation_and_all_of_it_in_a_row(
    made: Workload, ranks: int, link: Link, strategy: Strategy
) -> None:
    found = predict_workload(made, ranks, link, strategy)
    least = made.backward if isinstance(strategy, Sharded) else found.compute
    assert least * (1 - 1e-9) <= found.step <= (found.compute + found.work + found.alone) * (1 + 1e-9)
    assert found.exposed <= found.alone * (1 + 1e-9)
    if not isinstance(strategy, Sharded):
        assert found.step == pytest.approx(found.compute + found.work + found.exposed)


@given(workloads(), some_ranks, links)
def test_local_sgd_tends_to_no_exchange_at_all(made: Workload, ranks: int, link: Link) -> None:
    steps = [predict_workload(made, ranks, link, Local(10**power)).step for power in range(13)]
    assert all(one >= other for one, other in pairwise(steps))
    extra = steps[0] - made.compute
    assert steps[-1] - made.compute <= 1e-9 * made.compute + 1e-9 * extra


@given(workloads(), links)
@examples(15)
def test_thousands_of_ranks_are_no_harder_than_two(made: Workload, link: Link) -> None:
    for strategy in ALL_WAYS:
        found = predict_workload(made, 10_000, link, strategy)
        assert all(math.isfinite(value) for value in (found.step, found.alone, found.received))


# --- advice ----------------------------------------------------------------------------------------------------------

LARGE = workload(*[(1000, 1000)] * 8, rates=Rates(1e-11, 2e-9))
"""32 MB of gradients beside 3.5 seconds of computation, of which two are backward."""


def advice(bandwidth: str, ranks: int = 4, made: Workload = LARGE, **options: Any) -> tuple[str, str]:
    plan = plan_exchange(made, ranks, Link(parse_bandwidth(bandwidth), 5e-5), **options)
    return plan.best.strategy.by, " ".join(plan.reasons)


def test_on_a_fast_network_dense_exchange_is_hidden() -> None:
    by, reasons = advice("10Gbit")
    assert by == "DataParallel()"
    assert "moves 48.0 MB per step and rank" in reasons
    assert "every rank gets the mean of all gradients" in reasons


def test_on_slower_networks_less_is_sent() -> None:
    chosen = [advice(text)[0] for text in ("4Gbit", "1Gbit", "100Mbit", "10Mbit")]
    powersgd = 'CompressGradients("powersgd")'
    assert chosen == ["DataParallel()", 'CompressGradients("bf16")', powersgd, powersgd]
    _, reasons = advice("10Mbit")
    assert re.search(r"dense, fused: [\d.]+ times its step; it moves 48.0 MB", reasons)
    assert re.search(r"what changes training less takes longer: bfloat16 \(×[\d.]+\)", reasons)


def test_gradients_without_low_rank_are_sent_sparsely() -> None:
    """Matrices of four columns have no low rank that saves a half, whatever the number of their rows."""
    made = workload(*[(250_000, 2)] * 8, rates=Rates(1e-11, 2e-9))
    assert advice("10Mbit", made=made, k_steps=(2,))[0] == "DeepGradientCompression()"
    by, reasons = advice("10Mbit", made=made, ranks=2000, k_steps=(4, 2))
    assert by == "LocalSGD(k_steps=4)"
    assert "of the ways that exchange at every step, bfloat16 is the fastest" in reasons


def test_what_changes_training_less_is_taken_where_little_is_lost() -> None:
    plan = plan_exchange(LARGE, 4, Link(parse_bandwidth("4Gbit")))
    assert plan.best is plan.dense
    fastest = min(
        (found for found in plan.predictions if not isinstance(found.strategy, Sharded)), key=lambda found: found.step
    )
    assert 1 < plan.dense.step / fastest.step <= 1.05
    assert any("would be the fastest" in line for line in plan.reasons)
    assert any(line.startswith("ShardOptimizer() would take 3.2") for line in plan.reasons)


def test_every_warm_up_density_is_predicted() -> None:
    plan = plan_exchange(LARGE, 8, Link(1e7), density=0.004)
    densities = [found.strategy.density for found in plan.predictions if isinstance(found.strategy, Sparse)]
    assert densities == [0.25, 0.0625, 0.015625, 0.004]
    assert plan.of(Sparse(0.25)).received == plan.dense.received
    assert plan.of(Sparse(0.25)).kept_dense == LARGE.gradients
    assert plan.sparse.kept_dense == ()
    assert plan.sparse.strategy.by == "DeepGradientCompression(sparsity=(0.75, 0.9375, 0.984375, 0.996,))"
    assert plan.equal_bytes == 250


@given(workloads(), st.integers(2, 600), links, st.sampled_from([Sparse(), LowRank(), Dense(wire=torch.bfloat16)]))
@examples(20)
def test_break_even_bandwidths_are_where_the_faster_one_changes(
    made: Workload, ranks: int, link: Link, strategy: Strategy
) -> None:
    def faster(bandwidth: float) -> bool:
        at = replace(link, bandwidth=bandwidth)
        ours, dense = (predict_workload(made, ranks, at, other).step for other in (strategy, Dense()))
        return ours < dense

    below = faster_below(made, ranks, link, strategy)
    if below is None:
        assert not faster(100.0)
    elif below == math.inf:
        assert faster(1e14)
    else:
        assert faster(below)
        assert not faster(below * 1.0011)


def test_break_even_ranks_are_where_the_faster_one_changes() -> None:
    link = Link(1e6, 5e-5)
    most = faster_up_to(LARGE, 4, link, Sparse())
    assert most is not None
    steps = [
        [predict_workload(LARGE, n, link, strategy).step for strategy in (Sparse(), Dense())] for n in (most, most + 1)
    ]
    assert steps[0][0] < steps[0][1]
    assert steps[1][0] >= steps[1][1]
    assert 900 < most < 1000 == plan_exchange(LARGE, 4, link).equal_bytes
    assert faster_up_to(LARGE, 2000, link, Sparse()) is None
    assert faster_up_to(LARGE, 4, link, Local()) == MOST_RANKS


def test_the_intervals_named_for_local_sgd_are_the_smallest() -> None:
    plan = plan_exchange(LARGE, 4, Link(parse_bandwidth("50Mbit")))
    assert plan.overtaking_steps is not None
    assert plan.overtaking_steps > 1

    def local(k: int) -> Prediction:
        return predict_workload(plan.workload, 4, plan.link, Local(k))

    assert local(plan.overtaking_steps).step < plan.dense.step <= local(plan.overtaking_steps - 1).step
    enough = plan.enough_steps
    assert local(enough).step - LARGE.compute <= SHARE * LARGE.compute * (1 + 1e-9)
    assert local(enough - 1).step - LARGE.compute > SHARE * LARGE.compute


def test_without_any_waiting_no_interval_is_faster() -> None:
    made = workload((100, 100), (1, 1))
    free = replace(made, gradients=tuple(replace(g, ready=0.0) for g in made.gradients))
    plan = plan_exchange(free, 2, Link(1e12))
    assert (plan.overtaking_steps, plan.enough_steps) == (None, 1)
    assert plan.equal_bytes is None
    assert plan.best is plan.dense
