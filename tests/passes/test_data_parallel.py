"""DataParallel: parameters equal those of torch's DistributedDataParallel, and what the program exchanges when."""

from __future__ import annotations

from collections.abc import Iterator
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
from examples.models import ResNet50
from graphopt import GraphoptError, Pipeline, Program
from graphopt.ir.node import Phase, info, value_of
from graphopt.ir.ops.communication.collectives import ALL_REDUCE, BROADCAST, WAIT
from graphopt.passes import DataParallel, FuseUpdate, Recompute
from graphopt.rewriting.distributed.dense.buckets import Item, pack
from tests.support.ranks import run_ranks
from tests.support.sweeping import sweeping

SMALL = DataParallel(bucket_mb=0.01, first_bucket_mb=0.001)

# --- buckets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "first", "count"), [(16, None, 6), (25, 1, 5), (1, None, 35), (4, None, 19)])
def test_the_gradients_of_a_resnet50_make_as_many_buckets_as_published(
    limit: int, first: int | None, count: int
) -> None:
    with torch.device("meta"):
        parameters = list(ResNet50().parameters())
    items = [Item(str(i), p.numel() * 4, i) for i, p in enumerate(reversed(parameters))]
    assert len(items) == 161
    assert len(pack(items, limit * 2**20, first and first * 2**20)) == count


items = st.builds(Item, st.just("x"), st.integers(0, 100), st.integers(0, 50), st.sampled_from("ab"))


@given(st.lists(items), st.integers(0, 200), st.none() | st.integers(0, 200))
def test_every_gradient_is_in_one_bucket_with_others_of_its_kind(
    found: list[Item], limit: int, first: int | None
) -> None:
    buckets = pack(found, limit, first)
    packed = [item for bucket in buckets for item in bucket.items]
    assert sorted(packed, key=lambda item: (item.ready, str(item.key), item.bytes)) == sorted(
        found, key=lambda item: (item.ready, str(item.key), item.bytes)
    )
    for bucket in buckets:
        assert len({item.key for item in bucket.items}) == 1
        assert [item.ready for item in bucket.items] == sorted(item.ready for item in bucket.items)
        assert bucket.bytes - bucket.items[-1].bytes < max(1, limit)
    assert [bucket.ready for bucket in buckets] == sorted(bucket.ready for bucket in buckets)


# --- the program -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[None]:
    """A process group of four ranks of which only this one exists; its exchanges do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def small() -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.BatchNorm1d(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4)
    )


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def step_program(model: nn.Module, *passes: graphopt.Pass) -> Program:
    """A whole step with AdamW, rewritten by passes of the step stage."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    program = graphopt.capture(model, (torch.randn(8, 16),), loss=mean_square, optimizer=optimizer)
    Pipeline(passes).run(program)
    return program


def calls(program: Program, target: Any) -> list[torch.fx.Node]:
    return [node for node in program.graph.nodes if node.target is target]


def positions(program: Program) -> dict[torch.fx.Node, int]:
    return {node: index for index, node in enumerate(program.graph.nodes)}


def test_without_a_process_group_the_error_says_what_to_do() -> None:
    model = small()
    step = graphopt.optimize_step(
        model, torch.optim.SGD(model.parameters(), lr=0.1), [DataParallel()], loss=mean_square
    )
    with pytest.raises(GraphoptError, match="init_process_group"):
        step(torch.randn(8, 16))


@pytest.mark.usefixtures("four_ranks")
def test_exchanges_start_beside_backward_and_are_waited_for_in_front_of_the_update() -> None:
    program = step_program(small(), DataParallel(bucket_mb=0.01, first_bucket_mb=0.001, buffers="local"))
    place = positions(program)
    starts, waits = calls(program, ALL_REDUCE), calls(program, WAIT)
    backward = [place[node] for node in program.phase_nodes(Phase.BACKWARD)]
    update = min(place[node] for node in program.phase_nodes(Phase.UPDATE) if len(node.all_input_nodes) > 8)
    assert len(starts) == len(waits) == 3
    assert [place[start] < max(backward) for start in starts] == [True, True, False]
    assert all(max(backward) < place[wait] < update for wait in waits)


@pytest.mark.usefixtures("four_ranks")
def test_every_gradient_is_exchanged_once_and_the_update_reads_the_mean() -> None:
    model = small()
    program = step_program(model, SMALL)
    named = program.names()
    reduced = [node for node in calls(program, torch.ops.aten.as_strided.default) if info(node).phase is Phase.SYNC]
    for name, parameter in model.named_parameters():
        mean = named[f"{name}~"]
        assert mean in reduced
        assert value_of(mean).shape == parameter.shape
    count = sum(value_of(start).numel() for start in calls(program, ALL_REDUCE))
    assert count == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.usefixtures("four_ranks")
def test_tied_and_frozen_parameters() -> None:
    model = small()
    model[3].requires_grad_(False)
    model[5].weight = nn.Parameter(torch.randn(4, 64))
    tied = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    tied[1].weight = tied[0].weight
    assert sum(value_of(s).numel() for s in calls(step_program(tied, SMALL), ALL_REDUCE)) == 16 * 16 + 2 * 16
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sum(value_of(s).numel() for s in calls(step_program(model, SMALL), ALL_REDUCE)) == trained


@pytest.mark.usefixtures("four_ranks")
def test_dtypes_never_share_a_bucket() -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 8).double())
    model.forward = lambda x: model[1](model[0](x).double())  # type: ignore[method-assign]
    starts = calls(step_program(model, DataParallel()), ALL_REDUCE)
    assert sorted(str(value_of(start).dtype) for start in starts) == ["torch.float32", "torch.float64"]


@pytest.mark.sweep
@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize(("buffers", "op", "count"), [("broadcast", BROADCAST, 1), ("mean", ALL_REDUCE, 4)])
def test_buffers_are_exchanged_in_one_piece(buffers: str, op: Any, count: int) -> None:
    program = step_program(small(), DataParallel(bucket_mb=0.01, first_bucket_mb=0.001, buffers=buffers))
    assert len(calls(program, op)) == count


@pytest.mark.sweep
@pytest.mark.usefixtures("four_ranks")
def test_parameters_of_another_group_travel_on_their_own() -> None:
    pair = dist.new_group([0, 1]).group_name
    program = step_program(small(), DataParallel(groups=(f"3.*={pair}",), buffers="local"))
    starts = {start.args[2]: start for start in calls(program, ALL_REDUCE)}
    assert {name: value_of(start).numel() for name, start in starts.items()} == {
        pair: 64 * 64 + 64,
        "0": 16 * 64 + 64 + 64 + 64 + 64 * 4 + 4,
    }
    divided = {name: start.args[0].args[1] for name, start in starts.items()}  # type: ignore[union-attr]
    assert divided == {pair: 1 / 2, "0": 1 / 4}


@pytest.mark.usefixtures("four_ranks")
def test_a_group_for_parameters_that_do_not_exist_is_an_error() -> None:
    with pytest.raises(GraphoptError, match=r"'experts\.\*' names no parameter"):
        step_program(small(), DataParallel(groups=("experts.*=0",)))
    with pytest.raises(GraphoptError, match="entries GLOB=GROUP"):
        DataParallel(groups=("experts",))


@pytest.mark.sweep
@pytest.mark.usefixtures("four_ranks")
def test_the_record_says_what_was_fused() -> None:
    program = graphopt.capture(small(), (torch.randn(8, 16),), loss=mean_square, stage="joint")
    (record,) = Pipeline([SMALL]).run(program)
    assert record.changed.counts == {"gradients exchanged": 8, "all-reduces": 3, "buffers": 2}
    assert record.changed.lines[0].startswith("8 all-reduces -> 3: 22.5 kB per step and rank over the 4 ranks")


@pytest.mark.usefixtures("four_ranks")
def test_a_second_time_is_nothing() -> None:
    program = step_program(small(), SMALL)
    before = program.to_text()
    (record,) = Pipeline([SMALL]).run(program)
    assert "the gradients of this program are exchanged already" in record.changed.reason
    assert program.to_text().splitlines()[2:] == before.splitlines()[2:]


@pytest.mark.usefixtures("four_ranks")
def test_accumulated_gradients_are_exchanged_once() -> None:
    torch.manual_seed(0)
    model = small()
    step = graphopt.optimize_step(model, torch.optim.AdamW(model.parameters()), [SMALL], loss=mean_square)
    step.accumulate(3)
    for _ in range(6):
        step(torch.randn(8, 16))
    variants = step._latest().variants
    exchanged = {key[0]: len(calls(compiled.program, ALL_REDUCE)) for key, compiled in variants.items()}
    assert exchanged == {"begin": 0, "middle": 0, "first update": 3, "update": 3}


@pytest.mark.sweep
@pytest.mark.usefixtures("four_ranks")
def test_recomputation_and_fused_updates_go_with_it() -> None:
    program = step_program(small(), SMALL, FuseUpdate())
    assert len(calls(program, ALL_REDUCE)) == 3
    model = graphopt.optimize(small(), [Recompute(("0", "3")), SMALL], example_inputs=(torch.randn(8, 16),))
    assert len(calls(model.program, ALL_REDUCE)) == 3  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"bucket_mb": -1.0}, {"first_bucket_mb": -0.5}, {"buffers": "brodcast"}])
def test_wrong_options_are_errors(options: dict[str, Any]) -> None:
    with pytest.raises(GraphoptError, match=f"{next(iter(options))} is "):
        DataParallel(**options)


# --- several processes -----------------------------------------------------------------------------------------------

TRAIN = """
from torch import nn
import graphopt
from graphopt import GraphoptError
from graphopt.passes import DataParallel, Recompute

def build(seed=0, norm=nn.BatchNorm1d):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), norm(64), nn.Linear(64, 64, bias=False), nn.GELU(), nn.Linear(64, 4)
    )

def loss(model, x, y):
    return nn.functional.cross_entropy(model(x), y)

def batch(number, size=8):
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(size, 16, generator=generator), torch.randint(4, (size,), generator=generator)

def optimizer_of(model, kind):
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

# Two ranks add in the same order in any buckets. With more, gloo's order depends on where in its bucket a number
# lies, so both get a bucket for each tensor; find_unused_parameters keeps DistributedDataParallel from one at first.
ALONE = 1e-6
theirs_in = dict(bucket_cap_mb=0.01) if world == 2 else dict(bucket_cap_mb=ALONE, find_unused_parameters=True)
small = DataParallel(bucket_mb=0.01, first_bucket_mb=0.001) if world == 2 else DataParallel(ALONE, ALONE)

def theirs(kind, steps, every=1, buckets=theirs_in, norm=nn.BatchNorm1d):
    model = build(0, norm)
    parallel = nn.parallel.DistributedDataParallel(model, **buckets)
    optimizer = optimizer_of(model, kind)
    for number in range(steps):
        if number % every == every - 1:
            (loss(parallel, *batch(number)) / every).backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            with parallel.no_sync():
                (loss(parallel, *batch(number)) / every).backward()
    return model

def whole(kind, steps, every=1, passes=(), buckets=small, norm=nn.BatchNorm1d):
    model = build(rank, norm)
    step = graphopt.optimize_step(model, optimizer_of(model, kind), [buckets, *passes], loss=loss).accumulate(every)
    for number in range(steps):
        step(*batch(number))
    return model

def drop_in(kind, steps):
    model = build(rank)
    parallel, optimizer = graphopt.optimize(model, [small]), optimizer_of(model, kind)
    for number in range(steps):
        loss(parallel, *batch(number)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model

def off(one, other):
    # DistributedDataParallel hands out the buffers of rank 0 at the next call only
    names = {name for name, _ in (one.named_parameters() if rank else one.state_dict().items())}
    return max(
        ((a - b).abs().max() / b.abs().max().clamp(min=1e-30)).item()
        for (name, a), b in zip(one.state_dict().items(), other.state_dict().values())
        if name in names and a.is_floating_point()
    )

def apart(one, other):
    # the distance of all parameters, relative to their length
    first, second = (torch.cat([p.detach().double().flatten() for p in m.parameters()]) for m in (one, other))
    return ((first - second).norm() / second.norm()).item()

def same_on_all(model):
    flat = torch.cat([tensor.double().flatten() for tensor in model.parameters()])
    found = [torch.empty_like(flat) for _ in range(world)]
    dist.all_gather(found, flat)
    return all(torch.equal(flat, other) for other in found)

"""

SCRIPT = (
    TRAIN
    + """
said = {}
for kind in ("sgd", "adamw") if swept else ():
    reference = theirs(kind, 20)
    for name, model in (("whole step", whole(kind, 20)), ("drop-in", drop_in(kind, 20))):
        said[f"{kind}, {name}"] = [off(model, reference), same_on_all(model)]
recomputed = whole("sgd", 20, passes=[Recompute(("0", "3"))])
said["recomputed"] = [off(recomputed, theirs("sgd", 20)), same_on_all(recomputed)]
accumulated = whole("sgd", 12, every=3)
said["accumulated"] = [off(accumulated, theirs("sgd", 12, every=3)), same_on_all(accumulated)]
for kind in ("sgd", "adamw") if swept else ("sgd",):
    in_usual_buckets = dict(buckets={}, norm=nn.LayerNorm)
    said[f"{kind}, usual buckets"] = off(
        whole(kind, 20, buckets=DataParallel(), norm=nn.LayerNorm), theirs(kind, 20, **in_usual_buckets)
    )
    said[f"{kind}, batch normalisation"] = apart(whole(kind, 20, buckets=DataParallel()), theirs(kind, 20, buckets={}))

model = build()
step = graphopt.optimize_step(model, optimizer_of(model, "sgd"), [small], loss=loss)
for number in range(4):
    step(*batch(number, size=8 if number < 3 or rank else 5))  # the last batch of rank 0 is smaller
said["a smaller batch"] = same_on_all(model)

other = nn.Sequential(nn.Linear(16, 4 + rank))
try:
    graphopt.optimize(other, [DataParallel(broadcast=False)], example_inputs=(torch.randn(8, 16),))
    said["other model"] = ""
except GraphoptError as error:
    said["other model"] = str(error)
say(said)
dist.barrier()
if world == 2:
    if rank == 1:
        os._exit(7)
    try:
        step(*batch(9))
        say("ran")
    except RuntimeError as error:
        say(str(error))
os._exit(0)
"""
)


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.sweep)])
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, list[Any]]:
    """How many ranks there are, and what each said."""
    world: int = request.param
    store: Path = tmp_path_factory.mktemp("ranks") / "store"
    return world, run_ranks(
        f"swept = {sweeping(request)}\n{SCRIPT}", world, store, codes=[0, 7] if world == 2 else None
    )


WAYS = ["sgd, whole step", "sgd, drop-in", "adamw, whole step", "adamw, drop-in", "recomputed", "accumulated"]


@pytest.mark.sweep(but=("2-accumulated",))
@pytest.mark.parametrize("way", WAYS)
def test_training_equals_distributed_data_parallel(said: tuple[int, list[Any]], way: str) -> None:
    """Parameters and buffers after 20 steps, to the last bit where ranks are added up in the same order."""
    _, ranks = said
    for found, *_ in ranks:
        difference, same = found[way]
        assert same
        assert difference == 0


@pytest.mark.parametrize("kind", ["sgd", pytest.param("adamw", marks=pytest.mark.sweep)])
def test_in_the_usual_buckets_parameters_equal_those_of_distributed_data_parallel_within_rounding(
    said: tuple[int, list[Any]], kind: str
) -> None:
    """With two ranks to the last bit. With four gloo adds in an order that depends on the place in a bucket, and the
    two do not lay out their buckets alike. Batch normalisation under SGD makes single entries drift by more."""
    world, ranks = said
    for found, *_ in ranks:
        largest, batch_normalisation = found[f"{kind}, usual buckets"], found[f"{kind}, batch normalisation"]
        assert largest <= (0 if world == 2 else 1e-6)
        assert batch_normalisation <= (0 if world == 2 else 1e-6)


def test_one_rank_alone_may_get_a_smaller_batch(said: tuple[int, list[Any]]) -> None:
    assert all(found["a smaller batch"] for found, *_ in said[1])


def test_ranks_with_other_models_are_told_before_the_first_step(said: tuple[int, list[Any]]) -> None:
    for found, *_ in said[1]:
        assert "the ranks of the group '0' do not run the same program in this call: rank 1 " in found["other model"]
        assert "first difference: exchange 0 is 'all_reduce to f32[85]" in found["other model"]


def test_a_rank_that_dies_is_an_error_on_the_others(said: tuple[int, list[Any]]) -> None:
    world, ranks = said
    assert len(ranks[0]) == (2 if world == 2 else 1)  # of four ranks none dies
    if world == 2:
        assert ranks[0][1] != "ran"
        assert "onnection" in ranks[0][1]
