"""ShardOptimizer: training as with DataParallel alone, an Nth of the optimizer's state, and states of all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import graphopt
from graphopt import GraphoptError, PassError, Pipeline, PipelineError
from graphopt.ir.node import Stage, value_of
from graphopt.ir.ops.communication.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER_SUM, WAIT
from graphopt.passes import ClipGradients, DataParallel, FuseUpdate, LocalSGD
from graphopt.passes.shard_optimizer import ShardOptimizer
from graphopt.rewriting.distributed.sharding.sharded_state import consolidate, split
from graphopt.rewriting.pass_ import Numerics
from graphopt.rewriting.shards import check_dense, shard_of, shard_state
from tests.support.ranks import run_ranks
from tests.support.training import OPTIMIZERS

# --- shards ----------------------------------------------------------------------------------------------------------


@given(st.integers(0, 100), st.integers(1, 9))
def test_every_element_is_in_one_shard(elements: int, ranks: int) -> None:
    shards = [shard_of(elements, rank, ranks) for rank in range(ranks)]
    covered = [element for first, length in shards for element in range(first, first + length)]
    assert covered == list(range(elements))
    lengths = [length for _, length in shards]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == math.ceil(elements / ranks)


def trained(*shapes: tuple[int, ...], layout: torch.memory_format = torch.contiguous_format) -> torch.optim.Optimizer:
    """An optimizer over parameters of these shapes after two steps."""
    torch.manual_seed(0)
    formats = [layout if len(shape) == 4 else torch.contiguous_format for shape in shapes]
    parameters = [nn.Parameter(torch.randn(s).to(memory_format=f)) for s, f in zip(shapes, formats, strict=True)]
    optimizer = torch.optim.AdamW(parameters)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return optimizer


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def assert_equal_states(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for index, kept in one["state"].items():
        for key, value in kept.items():
            assert torch.equal(value, other["state"][index][key])
            assert value.stride() == other["state"][index][key].stride()


@given(st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=4), st.integers(1, 5))
def test_a_state_that_is_split_and_put_together_is_the_same(shapes: list[tuple[int, ...]], ranks: int) -> None:
    optimizer = trained(*shapes)
    state = optimizer.state_dict()
    parts = [split(state, rank, ranks) for rank in range(ranks)]
    for index, parameter in enumerate(parameters_of(optimizer)):
        assert sum(part["state"][index]["exp_avg"].numel() for part in parts) == parameter.numel()
        assert all(part["state"][index]["step"] == 2 for part in parts)
    assert_equal_states(consolidate(parts, parameters_of(optimizer)), state)


def test_two_ranks_become_three() -> None:
    optimizer = trained((5, 4, 3, 3), (7,), (), layout=torch.channels_last)
    whole = optimizer.state_dict()
    two = [split(whole, rank, 2) for rank in range(2)]
    three = [split(consolidate(two, parameters_of(optimizer)), rank, 3) for rank in range(3)]
    assert [part["state"][1]["exp_avg"].numel() for part in three] == [3, 3, 1]
    assert_equal_states(consolidate(three, parameters_of(optimizer)), whole)


def test_states_that_do_not_fit_are_errors() -> None:
    optimizer = trained((5,), (3, 3))
    parts = [split(optimizer.state_dict(), rank, 2) for rank in range(2)]
    with pytest.raises(GraphoptError, match=r"rank 0's state 0/exp_avg has the shape \[2\]; its shard of 5 elements"):
        consolidate(parts[::-1], parameters_of(optimizer))
    with pytest.raises(GraphoptError, match="needs the state of every rank, got none"):
        consolidate([], [])
    with pytest.raises(GraphoptError, match="the state is of 2 parameters at least, and 1 are given"):
        consolidate(parts, parameters_of(optimizer)[:1])
    del parts[1]["state"][1]
    with pytest.raises(GraphoptError, match="the states of rank 0 and rank 1 are not of one optimizer"):
        consolidate(parts, parameters_of(optimizer))
    with pytest.raises(GraphoptError, match="there is no rank 2 of 2 ranks"):
        split(optimizer.state_dict(), 2, 2)


def test_full_state_is_cut_in_the_order_of_memory_and_shards_stay() -> None:
    optimizer = trained((4, 3), (2, 3, 2, 2), (), layout=torch.channels_last)
    parameters = {str(index): parameter for index, parameter in enumerate(parameters_of(optimizer))}
    shards = {name: shard_of(parameter.numel(), 1, 2) for name, parameter in parameters.items()}
    expected = split(optimizer.state_dict(), 1, 2)["state"]
    assert shard_state(optimizer, parameters, shards) == 6
    for index, parameter in enumerate(parameters.values()):
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[parameter][key], expected[index][key])
    assert shard_state(optimizer, parameters, shards) == 0
    with pytest.raises(GraphoptError, match=r"state 0/exp_avg has the shape \[6\], and this rank keeps 4 of the 12"):
        shard_state(optimizer, parameters, {"0": (0, 4)})


def test_parameters_with_gaps_are_refused_by_name() -> None:
    check_dense("weight", torch.randn(4, 6).t())
    with pytest.raises(GraphoptError, match=r"the parameter 'weight' .* does not fill its memory without gaps"):
        check_dense("weight", torch.randn(4, 6)[:, :3])


# --- the program -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[None]:
    """A process group of four ranks of which only the last one exists; its exchanges do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    yield
    dist.destroy_process_group()


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def uneven() -> nn.Module:
    """Parameters of 63, 9, 27, 3 and 1 elements."""
    return nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3, bias=False), nn.Linear(3, 1))


def step_of(
    model: nn.Module, *passes: graphopt.Pass, make: Callable[..., torch.optim.Optimizer] = OPTIMIZERS["adamw"]
) -> graphopt.TrainStep:
    width = next(model.parameters()).shape[1]
    step = graphopt.optimize_step(model, make(model.parameters()), passes, loss=mean_square)
    return step.prepare(torch.randn(8, width))


def calls(program: graphopt.Program, target: Any) -> list[torch.fx.Node]:
    return list(program.graph.find_nodes(op="call_function", target=target))


@pytest.mark.usefixtures("four_ranks")
def test_the_optimizer_s_state_is_this_rank_s_shard() -> None:
    step = step_of(uneven(), DataParallel(), ShardOptimizer())
    sizes = {s.target: tuple(value_of(n).shape) for n, s in step.program.inputs_of("state")}
    assert {name: size for name, size in sizes.items() if name.endswith("exp_avg")} == {
        "0.weight/exp_avg": (15,), "0.bias/exp_avg": (0,), "2.weight/exp_avg": (6,), "3.weight/exp_avg": (0,),
        "3.bias/exp_avg": (0,),
    }  # fmt: skip
    record = step.records[-1]
    assert record.changed.counts == {"parameters sharded": 5, "reduce-scatters": 1, "all-gathers": 1}
    assert record.changed.lines[0] == (
        "each of the 4 ranks of the group '0' keeps 188 B of 844 B of the optimizer's state, and updates its shard of "
        "5 parameters"
    )
    (again,) = Pipeline([DataParallel(), ShardOptimizer()]).run(step.program)[1:]
    assert again.changed.reason == "the update of this program is sharded already"


@pytest.mark.usefixtures("four_ranks")
def test_gradients_are_scattered_beside_backward_and_parameters_gathered_behind_the_update() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
    program = step_of(model, DataParallel(bucket_mb=0.004, first_bucket_mb=0.001), ShardOptimizer()).program
    place = {node: index for index, node in enumerate(program.graph.nodes)}
    assert not calls(program, ALL_REDUCE)
    scatters, gathers = calls(program, REDUCE_SCATTER_SUM), calls(program, ALL_GATHER)
    assert len(scatters) == len(gathers) == 3
    backward = max(place[node] for node in program.phase_nodes(graphopt.Phase.BACKWARD))
    update = max(place[node] for node in program.phase_nodes(graphopt.Phase.UPDATE))
    assert [place[node] < backward for node in scatters] == [True, True, False]
    waits = [place[user] for node in scatters for user in node.users if user.target is WAIT]
    starts = [place[node] for node in scatters]
    assert all(
        start < wait < following for start, wait, following in zip(starts, waits, [*starts[1:], update], strict=True)
    )
    assert min(place[node] for node in gathers) > update
    elements = sum(parameter.numel() for parameter in model.parameters())
    assert 4 * sum(value_of(node).numel() for node in scatters) == elements
    assert sum(value_of(node).numel() for node in gathers) == elements


@pytest.mark.sweep
@pytest.mark.usefixtures("four_ranks")
def test_the_peak_falls_by_the_share_of_the_state() -> None:
    def model() -> nn.Module:
        return nn.Sequential(*(nn.Linear(128, 128) for _ in range(4)))

    buckets = DataParallel(bucket_mb=0.05, first_bucket_mb=0.05)
    plain, sharded = (step_of(model(), *passes).program for passes in ([buckets], [buckets, ShardOptimizer()]))
    size = 4 * sum(parameter.numel() for parameter in model().parameters())
    saved = plain.memory().peak_bytes - sharded.memory().peak_bytes
    assert saved > 0.9 * 2 * size * 3 / 4, "but for a part of a bucket"
    resident = [program.memory().resident_bytes for program in (plain, sharded)]
    assert resident[0] - resident[1] == 2 * size * 3 // 4


@pytest.mark.usefixtures("four_ranks")
def test_what_reads_a_gradient_in_full_is_refused() -> None:
    @dataclass(frozen=True)
    class Reads(graphopt.Pass):
        name: ClassVar[str] = "reads"
        stage: ClassVar[Stage] = "step"
        numerics: ClassVar[Numerics] = "changes"
        after: ClassVar[tuple[str, ...]] = ("data-parallel",)

        def apply(self, program: graphopt.Program) -> graphopt.Changed:
            gradient = program.names()["0.weight~"]
            common: dict[str, Any] = {"before": next(iter(gradient.users)), "phase": graphopt.Phase.UPDATE}
            flipped = program.insert(torch.ops.aten.flip.default, (gradient, [0]), origin="reads", **common)
            program.insert(torch.ops.aten.copy_.default, (gradient, flipped), origin="reads", **common)
            return graphopt.Changed({"flipped": 1})

    with pytest.raises(PassError, match=r"\(reads\) reads the whole gradient of '0\.weight'"):
        step_of(uneven(), DataParallel(), Reads(), ShardOptimizer())


def shrink(parameters: list[torch.Tensor]) -> None:
    for parameter in parameters:
        parameter.div_(parameter.norm() + 1)


def all_together(parameters: list[torch.Tensor]) -> None:
    norm = torch.stack([gradient.norm() for parameter in parameters if (gradient := parameter.grad) is not None]).norm()
    for parameter in parameters:
        parameter.sub_(parameter.grad / norm)


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize(
    ("update", "why"),
    [
        (shrink, "div_ writes to a parameter, a gradient or state as a whole, of which each rank keeps a shard"),
        (all_together, "stack takes several parameters together"),
    ],
)
def test_optimizers_that_mix_elements_in_other_ways_are_refused(update: Any, why: str) -> None:
    class Mixing(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            update(self.param_groups[0]["params"])

    with pytest.raises(GraphoptError, match=f"Mixing cannot be sharded, since its update takes .* have shards: {why}"):
        step_of(uneven(), DataParallel(), ShardOptimizer(), make=Mixing)


@pytest.mark.sweep
@pytest.mark.usefixtures("four_ranks")
def test_groups_have_to_be_one() -> None:
    two = dist.new_group([2, 3])
    with pytest.raises(PassError, match="give data-parallel and shard-optimizer the same group="):
        step_of(uneven(), DataParallel(), ShardOptimizer(group=two.group_name))
    with pytest.raises(PassError, match="shard-optimizer works on one group of ranks"):
        step_of(uneven(), DataParallel(groups=(f"0.*={two.group_name}",)), ShardOptimizer())
    alone = dist.new_group([3])
    with pytest.raises(PassError, match=r"the gradient of '0\.weight' is not exchanged"):
        step_of(uneven(), DataParallel(groups=(f"0.*={alone.group_name}",)), ShardOptimizer())
    step = step_of(uneven(), DataParallel(group=alone.group_name), ShardOptimizer(group=alone.group_name))
    assert step.records[-1].changed.reason == f"the group {alone.group_name!r} has one process"


@pytest.mark.usefixtures("four_ranks")
def test_a_program_that_was_not_traced_for_shards_is_refused() -> None:
    model = uneven()
    program = graphopt.capture(
        model, (torch.randn(8, 7),), loss=mean_square, optimizer=OPTIMIZERS["sgd"](model.parameters())
    )
    with pytest.raises(PassError, match=r"the update of '3\.bias' in this program is that of all of its elements"):
        Pipeline([DataParallel(), ShardOptimizer()]).run(program)


def test_combinations_that_make_no_sense_name_both_passes() -> None:
    with pytest.raises(PipelineError, match="'shard-optimizer' needs 'data-parallel'"):
        Pipeline([ShardOptimizer()])
    with pytest.raises(PipelineError, match="'local-sgd' and 'shard-optimizer' cannot be used together"):
        Pipeline([DataParallel(), LocalSGD(), ShardOptimizer()])
    with pytest.raises(PipelineError, match="shard-optimizer rewrites the optimizer's update, which a drop-in model"):
        graphopt.optimize(nn.Linear(2, 2), [DataParallel(), ShardOptimizer()])
    names = [p.name for p in Pipeline([ShardOptimizer(), ClipGradients(1.0), FuseUpdate(), DataParallel()]).passes]
    assert names.index("clip-gradients") < names.index("shard-optimizer") < names.index("fuse-update")


# --- several processes -----------------------------------------------------------------------------------------------

TRAIN = """
import copy
from torch import nn
import graphopt
from graphopt import GraphoptError
from graphopt.rewriting.distributed.sharding.sharded_state import consolidate, split
from graphopt.passes import ClipGradients, DataParallel, FuseUpdate, MixedPrecision
from graphopt.passes.shard_optimizer import ShardOptimizer

class Model(nn.Module):
    # of 56, 8, 8, 64, 8, 24, 3 and 1 elements; one weight is used twice, one bias is frozen, one number stands alone
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(7, 8, bias=False), nn.BatchNorm1d(8)
        self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8)
        self.third.weight = self.second.weight
        self.third.bias.requires_grad_(False)
        self.last, self.extra = nn.Linear(8, 3), nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return self.last(self.third(self.second(self.norm(self.first(x)).tanh()).tanh()))

def loss(model, x, y, factor):
    return nn.functional.cross_entropy(model(x), y) + model.extra * factor

def batch(number, bad=()):
    generator = torch.Generator().manual_seed(100 * number + rank)
    factor = torch.tensor(float("inf") if number in bad else 0.1)
    return torch.randn(6, 7, generator=generator), torch.randint(3, (6,), generator=generator), factor

def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True)

def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)

def adagrad(parameters):
    return torch.optim.Adagrad(parameters, lr=0.05, fused=True)

def rmsprop(parameters):
    return torch.optim.RMSprop(parameters, lr=0.01, foreach=True)

def copies(model):
    return [parameter.detach().clone() for parameter in model.parameters()]

def off(one, other):
    return max(((a - b).abs().max() / b.abs().max().clamp(min=1e-30)).item() for a, b in zip(one, other))

def same(tensors):
    flat = torch.cat([tensor.detach().double().flatten() for tensor in tensors])
    found = [torch.empty_like(flat) for _ in range(world)]
    dist.all_gather(found, flat)
    return all(torch.equal(flat, other) for other in found)

def elements(optimizer):
    return sum(v.numel() for kept in optimizer.state.values() for key, v in kept.items() if key != "step")

class Run:
    def __init__(self, *passes, make=sgd, bad=(), every=1, backend="eager"):
        self.model, self.bad, self.done = Model(), bad, 0
        self.optimizer = make([p for p in self.model.parameters() if p.requires_grad])
        buckets = DataParallel(bucket_mb=0.0003, first_bucket_mb=0.0001) if world == 2 else DataParallel()
        passes = [buckets, *passes]
        self.step = graphopt.optimize_step(
            self.model, self.optimizer, passes, loss=loss, backend=backend, verify=False
        )
        self.step.accumulate(every)

    def __call__(self, steps):
        for number in range(self.done, self.done + steps):
            self.step(*batch(number, self.bad))
        self.done += steps
        return self

def pair(*passes, steps=8, **options):
    whole, shards = Run(*passes, **options)(steps), Run(ShardOptimizer(), *passes, **options)(steps)
    return whole, shards, [off(copies(shards.model), copies(whole.model)), same(shards.model.state_dict().values())]

said = {}
"""

TWO = (
    TRAIN
    + """
def counted(whole, shards):
    full, mine = elements(whole.optimizer), elements(shards.optimizer)
    return [mine * world - full, len(shards.optimizer.state)]

for make, passes in ((sgd, ()), (adamw, ()), (adagrad, (ClipGradients(0.01, norm_type=float("inf")),))):
    whole, shards, said[make.__name__] = pair(*passes, make=make, steps=20)
    said[make.__name__] += counted(whole, shards)

more = MixedPrecision(level="O2"), FuseUpdate(), ClipGradients(max_value=0.001)
said["low precision, fused updates, clipped by value, accumulated"] = pair(*more, every=3, steps=9)[2]
said["clipped, with a compiler"] = pair(ClipGradients(0.1), backend=lambda module, inputs: module.forward)[2]

for make in (sgd, adamw):
    bad = {0, 3} if rank else ()
    whole, shards, said[f"skipped, {make.__name__}"] = pair(MixedPrecision(dtype="float16"), make=make, bad=bad)
    counts = [float(kept.get("step", 6)) for kept in shards.optimizer.state.values()]
    scale = float(shards.step.state_dict()["held"]["loss-scale/scale"])
    said[f"skipped, {make.__name__}"] += [scale, counts == [6.0] * 8]

# resumed: from what this rank has saved, and from the state of a run that was not sharded
whole, first, said["rmsprop"] = pair(make=rmsprop, steps=5)
said["rmsprop"] += counted(whole, first)
states = [None] * world
dist.all_gather_object(states, first.optimizer.state_dict())
merged = consolidate(states, [p for group in whole.optimizer.param_groups for p in group["params"]])
expected = whole.optimizer.state_dict()
said["consolidated"] = all(
    torch.equal(value, expected["state"][index][key])
    for index, kept in merged["state"].items() for key, value in kept.items()
) and merged["state"].keys() == expected["state"].keys()
resumed = {}
for name, source in (("own", first), ("whole", whole)):
    second = resumed[name] = Run(ShardOptimizer(), make=rmsprop)
    second.model.load_state_dict(source.model.state_dict())
    second.optimizer.load_state_dict(copy.deepcopy(source.optimizer.state_dict()))
    second.step.load_state_dict(first.step.state_dict())
    second.done = 5
    second(4)
whole(4)
for name, run in resumed.items():
    said[f"resumed, {name}"] = [off(copies(run.model), copies(whole.model)), elements(run.optimizer)]
first.optimizer.load_state_dict(whole.optimizer.state_dict())
try:
    first(1)
    said["whole state too late"] = ""
except GraphoptError as error:
    said["whole state too late"] = str(error)
say(said)
"""
)

FOUR = (
    TRAIN
    + """
said["sgd"] = pair(make=sgd, steps=20)[2]
say(said)
"""
)

ROUNDING = 1e-5
"""Fused kernels on a CPU round the last elements of a tensor, which fill no vector, differently from the others."""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks said."""
    store: Path = tmp_path_factory.mktemp("ranks") / "store"
    return [found[0] for found in run_ranks(TWO, 2, store)]


@pytest.mark.sweep
@pytest.mark.parametrize(("make", "limit"), [("sgd", 0), ("rmsprop", 0), ("adamw", ROUNDING), ("adagrad", ROUNDING)])
def test_training_equals_data_parallelism_with_half_of_the_state(
    two: list[dict[str, Any]], make: str, limit: float
) -> None:
    """To the last bit where the optimizer's kernels are; parameters and buffers are the same on both ranks."""
    surplus = 0
    for found in two:
        difference, agreed, more, count = found[make]
        assert difference <= limit
        assert agreed
        assert count == 8
        surplus += more
    assert surplus == 0, "shards of both ranks together are the whole state"


@pytest.mark.sweep
def test_it_goes_with_other_passes(two: list[dict[str, Any]]) -> None:
    way = "low precision, fused updates, clipped by value, accumulated"
    assert [found[way] for found in two] == [[0.0, True]] * 2


@pytest.mark.sweep
def test_norms_are_those_of_all_shards_also_where_a_compiler_takes_the_program(two: list[dict[str, Any]]) -> None:
    for found in two:
        difference, agreed = found["clipped, with a compiler"]
        assert difference < 1e-6
        assert agreed


@pytest.mark.sweep
@pytest.mark.parametrize(("make", "limit"), [("sgd", 0), ("adamw", ROUNDING)])
def test_all_ranks_skip_where_one_shard_is_not_finite(two: list[dict[str, Any]], make: str, limit: float) -> None:
    """The gradient of one element is infinite, and only one rank has it; the first step is one of them."""
    for found in two:
        difference, *others = found[f"skipped, {make}"]
        assert difference <= limit
        assert others == [True, 65536 / 4, True]


@pytest.mark.sweep
def test_the_shards_of_all_ranks_are_the_whole_state(two: list[dict[str, Any]]) -> None:
    assert all(found["consolidated"] for found in two)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["own", "whole"])
def test_a_resumed_run_is_the_same_to_the_last_bit(two: list[dict[str, Any]], name: str) -> None:
    assert [found[f"resumed, {name}"][0] for found in two] == [0.0, 0.0]
    assert two[0]["resumed, own"] == two[0]["resumed, whole"], "a whole state is cut"


@pytest.mark.sweep
def test_a_whole_state_that_comes_too_late_is_an_error(two: list[dict[str, Any]]) -> None:
    for found in two:
        assert "/square_avg has the shape [" in found["whole state too late"]
        assert "a whole state has to be loaded before the first step" in found["whole state too late"]


@pytest.mark.sweep
def test_four_ranks_agree(tmp_path: Path) -> None:
    for (found,) in run_ranks(FOUR, 4, tmp_path / "store"):
        difference, agreed = found["sgd"]
        assert difference <= 1e-6
        assert agreed
