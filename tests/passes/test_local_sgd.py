"""LocalSGD and AdaptiveLocalSGD: when ranks exchange what, and that they come to the same parameters there."""

from __future__ import annotations

import math
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
from graphopt import GraphoptError, Pipeline, PipelineError
from graphopt.ir.node import info, value_of
from graphopt.ir.ops.communication.collectives import ALL_REDUCE, BROADCAST
from graphopt.passes import AdaptiveLocalSGD, DataParallel, LocalSGD
from graphopt.rewriting.distributed.local_steps import LOCAL, SYNCHRONOUS
from graphopt.rewriting.registry import find_pass
from graphopt.rewriting.text.spec import parse_passes
from graphopt.rewriting.training_pass import Clock
from tests.support.ranks import run_ranks

# --- the schedule ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"k_steps": 1}, "AAAAAAAA"),
        ({"k_steps": 4}, "LLLALLLA"),
        ({"k_steps": 3, "begin_step": 2}, "SSLLALLA"),
        ({"k_steps": 3, "begin_step": 2, "last_step": 6}, "SSLLALAA"),
        ({"k_steps": 4, "begin_step": 9}, "SSSSSSSS"),
        ({"k_steps": 2, "begin_step": 5, "last_step": 3}, "SSSSSLAL"),
        ({"k_steps": 16, "last_step": 7}, "LLLLLLLA"),
    ],
)
def test_steps_are_synchronous_then_local_with_an_average_at_the_end_of_each_interval(
    options: dict[str, int], expected: str
) -> None:
    letters = {SYNCHRONOUS: "S", LOCAL: "L", "": "A"}
    forms = [LocalSGD(**options).form(Clock(steps=number)) for number in range(len(expected))]
    assert "".join(letters[form] for form in forms) == expected


@given(st.integers(1, 9), st.integers(0, 9), st.integers(1, 40))
def test_an_interval_has_k_updates(k: int, begin: int, steps: int) -> None:
    averaged = [number for number in range(steps) if LocalSGD(k_steps=k, begin_step=begin).form(Clock(number)) == ""]
    assert averaged == list(range(begin + k - 1, steps, k))


class Losses:
    """A clock whose held loss is what a test says."""

    def __init__(self, losses: list[float], rates: list[float]) -> None:
        self.losses, self.rates = losses, rates
        self.clock = Clock(rates=lambda: (self.rates[self.clock.steps - 1],), state=self.loss)

    def loss(self, target: str) -> torch.Tensor:
        assert target == "adaptive-local-sgd/loss"
        return torch.tensor([self.losses[self.clock.steps - 1]], dtype=torch.float64)

    def averaged(self, schedule: AdaptiveLocalSGD) -> list[int]:
        """The numbers of the updates that average."""
        found = []
        for number in range(len(self.losses)):
            if schedule.form(self.clock) == "":
                found.append(number)
            self.clock.steps += 1
            schedule.advance(self.clock)
        return found


@pytest.mark.parametrize(
    ("options", "losses", "rates", "expected"),
    [
        # sqrt(0.25) * 4 = 2 from the second averaging on, sqrt(1/16) * 4 = 1 from the third on
        ({"init_k_steps": 4}, [4.0] * 4 + [1.0] * 4 + [0.25] * 4, [0.1] * 12, [3, 7, 9, 10, 11]),
        # a rate that falls to a quarter takes the interval to twice its length: sqrt(4 * 1) * 2 = 4
        ({"init_k_steps": 2}, [1.0] * 12, [0.4] * 3 + [0.1] * 9, [1, 3, 7, 11]),
        # never longer than max_k_steps, never shorter than 1
        ({"init_k_steps": 2, "max_k_steps": 3}, [1.0] * 2 + [100.0] * 8, [0.1] * 10, [1, 3, 6, 9]),
        ({"init_k_steps": 3}, [1.0] * 3 + [1e-9] * 7, [0.1] * 10, [2, 5, 6, 7, 8, 9]),
        # a loss that is not finite, is zero or negative, and a rate of zero leave the interval as it is
        ({"init_k_steps": 2}, [1.0, 1.0, 1.0, math.nan, 1.0, -1.0, 1.0, 0.0], [0.1] * 8, [1, 3, 5, 7]),
        ({"init_k_steps": 2}, [1.0] * 8, [0.1] * 3 + [0.0] * 5, [1, 3, 5, 7]),
        # where the first is not usable, the next one is the first
        ({"init_k_steps": 2}, [math.nan] * 2 + [4.0] * 2 + [1.0] * 5, [0.1] * 9, [1, 3, 5, 6, 7, 8]),
        # synchronous steps count for nothing; the last step averages whatever the interval
        ({"init_k_steps": 4, "begin_step": 3, "last_step": 8}, [1.0] * 12, [0.1] * 12, [6, 8, 10]),
    ],
)
def test_intervals_follow_loss_and_learning_rate(
    options: dict[str, int], losses: list[float], rates: list[float], expected: list[int]
) -> None:
    assert Losses(losses, rates).averaged(AdaptiveLocalSGD(**options)) == expected


def test_the_first_loss_is_kept_for_a_resumed_run() -> None:
    schedule, whole = AdaptiveLocalSGD(init_k_steps=4), Losses([4.0] * 4 + [1.0] * 6, [0.1] * 10)
    assert whole.averaged(schedule) == [3, 7, 9]
    resumed = Losses([4.0] * 4 + [1.0] * 6, [0.1] * 10)
    resumed.losses = resumed.losses[:6]
    assert resumed.averaged(schedule) == [3]
    again = Losses([4.0] * 4 + [1.0] * 6, [0.1] * 10)
    again.clock.steps, again.clock.numbers = 6, dict(resumed.clock.numbers)
    found = []
    for number in range(6, 10):
        found += [number] if schedule.form(again.clock) == "" else []
        again.clock.steps += 1
        schedule.advance(again.clock)
    assert found == [7, 9]


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (LocalSGD, {"k_steps": 0}, "k_steps is a number of updates of at least 1, got 0"),
        (LocalSGD, {"begin_step": -1}, "begin_step is a number of updates of at least 0"),
        (LocalSGD, {"last_step": -1}, "last_step is the number of an update"),
        (AdaptiveLocalSGD, {"init_k_steps": 17}, r"between 1 and max_k_steps \(16\), got 17"),
        (AdaptiveLocalSGD, {"init_k_steps": 0}, "between 1 and max_k_steps"),
        (AdaptiveLocalSGD, {"begin_step": -2}, "begin_step is a number of updates of at least 0"),
        (AdaptiveLocalSGD, {"last_step": -1}, "last_step is the number of an update"),
    ],
)
def test_wrong_options_are_errors(cls: Any, options: dict[str, int], message: str) -> None:
    with pytest.raises(GraphoptError, match=message):
        cls(**options)


def test_combinations_that_make_no_sense_name_both_passes() -> None:
    with pytest.raises(PipelineError, match="'local-sgd' needs 'data-parallel'"):
        Pipeline([LocalSGD()])
    with pytest.raises(PipelineError, match="'local-sgd' and 'adaptive-local-sgd' cannot be used together"):
        Pipeline([DataParallel(), LocalSGD(), AdaptiveLocalSGD()])
    with pytest.raises(PipelineError, match="local-sgd rewrites the optimizer's update, which a drop-in model"):
        graphopt.optimize(nn.Linear(2, 2), [DataParallel(), LocalSGD()])


def test_options_as_text() -> None:
    local, adaptive = LocalSGD(k_steps=8, begin_step=100), AdaptiveLocalSGD(max_k_steps=4)
    assert str(local) == "local-sgd{k-steps=8 begin-step=100}"
    assert str(adaptive) == "adaptive-local-sgd{max-k-steps=4}"
    assert parse_passes(f"{local},{adaptive}", find_pass) == [local, adaptive]


# --- the program -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[None]:
    """A process group of four ranks of which only this one exists; its exchanges do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 4))


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def exchanged(program: graphopt.Program) -> list[int]:
    """The elements of every exchange, in order."""
    return [value_of(node).numel() for node in program.graph.nodes if node.target in (ALL_REDUCE, BROADCAST)]


@pytest.mark.usefixtures("four_ranks")
def test_each_kind_of_step_exchanges_what_it_has_to() -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = graphopt.optimize_step(
        model, optimizer, [DataParallel(bucket_mb=0.001), LocalSGD(k_steps=2, begin_step=2)], loss=mean_square
    )
    for _ in range(6):
        step(torch.randn(8, 16))
    found = {name: exchanged(program) for name, program in step.programs.items()}
    total = sum(parameter.numel() for parameter in model.parameters())
    assert list(found) == [
        "first update, local-sgd: synchronous", "update, local-sgd: synchronous", "update, local-sgd: local", "update",
    ]  # fmt: skip
    assert found["update, local-sgd: local"] == []
    buffers = 64
    assert sum(found["update, local-sgd: synchronous"]) == total + buffers
    assert sum(found["update"]) == total + buffers
    assert found["first update, local-sgd: synchronous"] == found["update, local-sgd: synchronous"]


@pytest.mark.usefixtures("four_ranks")
def test_the_record_says_what_is_averaged_and_how_much_travels() -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    program = graphopt.capture(model, (torch.randn(8, 16),), loss=mean_square, optimizer=optimizer)
    _, record = Pipeline([DataParallel(), LocalSGD(average_state=True)]).run(program)
    total = 4 * sum(parameter.numel() for parameter in model.parameters())
    assert record.changed.counts == {"gradients kept local": 6, "tensors averaged": 12}
    assert record.changed.lines[0] == (
        f"12 tensors are averaged over 4 ranks: {2 * total / 1000:.1f} kB per averaging and rank"
    )
    (again,) = Pipeline([DataParallel(), LocalSGD(average_state=True)]).run(program)[1:]
    assert "no gradients are exchanged in this program" in again.changed.reason


@pytest.mark.sweep
@pytest.mark.usefixtures("four_ranks")
def test_the_average_stands_behind_every_write_of_the_update() -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    program = graphopt.capture(model, (torch.randn(8, 16),), loss=mean_square, optimizer=optimizer)
    Pipeline([DataParallel(), LocalSGD()]).run(program)
    place = {node: index for index, node in enumerate(program.graph.nodes)}
    (averaged,) = [n for n in place if n.target is ALL_REDUCE and info(n).origin.startswith("local-sgd")]
    assert place[averaged] > max(place[node] for node in program.phase_nodes(graphopt.Phase.UPDATE))
    assert program.memory().peak_bytes > 0


# --- several processes -----------------------------------------------------------------------------------------------

SCRIPT = """
import copy
from torch import nn
import graphopt
from graphopt.passes import AdaptiveLocalSGD, ClipGradients, DataParallel, FuseUpdate, LocalSGD, MixedPrecision

def build(norm=False):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16) if norm else nn.Tanh(), nn.Linear(16, 4))

def loss(model, x, y):
    return nn.functional.cross_entropy(model(x), y)

def batch(number, bad=()):
    generator = torch.Generator().manual_seed(100 * number + rank)
    x = torch.randn(8, 8, generator=generator)
    return (x * torch.inf if number in bad else x), torch.randint(4, (8,), generator=generator)

def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)

def gathered(tensors):
    flat = torch.cat([tensor.detach().double().flatten() for tensor in tensors])
    found = [torch.empty_like(flat) for _ in range(world)]
    dist.all_gather(found, flat)
    return found

def same(tensors):
    mine, *others = gathered(tensors)
    return all(torch.equal(mine, other) for other in others)

def off(one, other):
    return max(((a - b).abs().max() / b.abs().max().clamp(min=1e-30)).item() for a, b in zip(one, other))

def copies(model):
    return [tensor.detach().clone() for tensor in model.parameters()]

class Run:
    def __init__(self, *passes, norm=False, make=sgd, bad=(), backend="eager"):
        self.model = build(norm)
        self.optimizer = make(self.model)
        self.bad = bad
        passes = [DataParallel(), *passes]
        self.step = graphopt.optimize_step(
            self.model, self.optimizer, passes, loss=loss, backend=backend, verify=False
        )
        self.losses, self.agreed, self.after, self.done = [], [], [], 0

    def __call__(self, steps):
        for number in range(self.done, self.done + steps):
            self.losses.append(float(self.step(*batch(number, self.bad))))
            self.agreed.append(same(self.model.parameters()))
            self.after.append(copies(self.model))
        self.done += steps
        return self

said = {}

# every step averages: momentum SGD on the mean gradient
one, dense = Run(LocalSGD(k_steps=1))(20), Run()(20)
said["k = 1"] = [all(one.agreed), max(off(a, b) for a, b in zip(one.after, dense.after))]

# torch's own: gradients are exchanged until step 5, then parameters behind every third step
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as hooks
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

model = build()
parallel = nn.parallel.DistributedDataParallel(model)
parallel.register_comm_hook(
    hooks.PostLocalSGDState(None, dist.group.WORLD, 5, post_local_gradient_allreduce=False), hooks.post_localSGD_hook
)
theirs = PostLocalSGDOptimizer(sgd(model), PeriodicModelAverager(period=3, warmup_steps=7))
wanted = []
for number in range(12):
    loss(parallel, *batch(number)).backward()
    theirs.step()
    theirs.zero_grad()
    wanted.append(copies(model))

later = Run(LocalSGD(k_steps=3, begin_step=5, last_step=11))(12)
said["post-local"] = later.agreed
said["post-local, until it begins"] = max(off(a, b) for a, b in zip(later.after[:5], dense.after[:5]))
said["post-local, torch's own"] = max(off(a, b) for a, b in zip(later.after[:11], wanted[:11]))

# updates as early as they can be, and clipped gradients
early = Run(LocalSGD(k_steps=3, begin_step=5, last_step=11), FuseUpdate())(12)
said["fused updates"] = max(off(a, b) for a, b in zip(early.after, later.after))
compiled = Run(LocalSGD(k_steps=3, begin_step=5, last_step=11), backend=lambda module, inputs: module.forward)(12)
said["a compiler"] = max(off(a, b) for a, b in zip(compiled.after, later.after))
said["fused updates, records"] = [str(record.changed) for record in early.step.records]
clipped = Run(LocalSGD(k_steps=2), ClipGradients(0.01))(2)
mine = build()
theirs = sgd(mine)
for number in range(2):
    loss(mine, *batch(number)).backward()
    nn.utils.clip_grad_norm_(mine.parameters(), 0.01)
    theirs.step()
    theirs.zero_grad()
    if number == 0:
        said["own gradients are clipped"] = off(clipped.after[0], copies(mine))

# synchronize in the middle of an interval: the mean, and training goes on
run = Run(LocalSGD(k_steps=4))(2)
mean = sum(gathered(run.model.parameters())) / world
run.step.synchronize()
found = gathered(run.model.parameters())
said["synchronize"] = [run.agreed[-1], torch.equal(found[0], found[1]), off([found[rank]], [mean])]
said["synchronize, and on"] = run(2).agreed[-1]

# what else is averaged
def buffers(run):
    return same(b for b in run.model.buffers() if b.is_floating_point())

def momenta(run):
    return same(run.optimizer.state[p]["momentum_buffer"] for p in run.model.parameters())

run = Run(LocalSGD(k_steps=2), norm=True)
said["buffers"] = [buffers(run(1)) for _ in range(4)]
said["momentum"] = [momenta(run(1)) for _ in range(2)]
run = Run(LocalSGD(k_steps=2, average_state=True))
said["averaged momentum"] = [momenta(run(1)) for _ in range(4)]
run.step.synchronize()
run(1).step.synchronize()
said["averaged momentum, synchronize"] = [same(run.model.parameters()), momenta(run)]

# an interval that follows the loss
run = Run(AdaptiveLocalSGD(init_k_steps=3, begin_step=2))
schedule = torch.optim.lr_scheduler.StepLR(run.optimizer, 5, 0.5)
rates = []
for number in range(24):
    rates.append(run.optimizer.param_groups[0]["lr"])
    run(1)
    schedule.step()
said["adaptive"] = [run.losses, rates, run.agreed]
run = Run(AdaptiveLocalSGD(init_k_steps=2), bad={1} if rank else ())(3)
said["adaptive, no number"] = run.step.state_dict()["numbers"]

# loss scaling: one rank's gradients are not finite
run = Run(LocalSGD(k_steps=3), MixedPrecision(dtype="float16"), bad={4} if rank else ())(6)
held = run.step.state_dict()["held"]
kept = [off(run.after[number], run.after[number - 1]) == 0 for number in range(1, 6)]
said["skipped"] = [kept, float(held["loss-scale/scale"]), run.agreed]

# copies in low precision
run = Run(LocalSGD(k_steps=2), MixedPrecision(level="O2"))
follows = []
for number in range(4):
    run(1)
    follows.append(all(
        torch.equal(run.step._store[f"low-precision/{name}"], parameter.bfloat16())
        for name, parameter in run.model.named_parameters() if name.endswith("weight")
    ))
said["copies"] = [follows, run.agreed]

# a run that stops in the middle of an interval, and one that goes on
for name, passes in (("local", [LocalSGD(k_steps=4)]), ("adaptive", [AdaptiveLocalSGD(init_k_steps=3)])):
    whole, second = Run(*passes)(5), Run(*passes)
    second.model.load_state_dict(whole.model.state_dict())
    second.optimizer.load_state_dict(copy.deepcopy(whole.optimizer.state_dict()))
    second.step.load_state_dict(whole.step.state_dict())
    second.done = 5
    whole(7)
    second(7)
    said[f"resumed, {name}"] = [off(a, b) for a, b in zip(second.after, whole.after[5:])]
say(said)
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks said."""
    store: Path = tmp_path_factory.mktemp("ranks") / "store"
    return [found[0] for found in run_ranks(SCRIPT, 2, store)]


@pytest.mark.sweep
def test_averaging_at_every_step_is_training_on_the_mean_gradient(said: list[dict[str, Any]]) -> None:
    for found in said:
        same, difference = found["k = 1"]
        assert same
        assert difference < 1e-6


@pytest.mark.sweep
def test_ranks_differ_between_two_averages_and_are_identical_there(said: list[dict[str, Any]]) -> None:
    for found in said:
        assert found["post-local"] == [True] * 5 + [False, False, True, False, False, True] + [True]


@pytest.mark.sweep
def test_until_it_begins_training_is_that_of_data_parallelism(said: list[dict[str, Any]]) -> None:
    assert [found["post-local, until it begins"] for found in said] == [0.0, 0.0]


@pytest.mark.sweep
def test_training_equals_that_of_torch_s_averager(said: list[dict[str, Any]]) -> None:
    """Of the same schedule, on each rank, between averages too."""
    assert all(found["post-local, torch's own"] < 1e-6 for found in said)


@pytest.mark.sweep
def test_updates_may_run_early(said: list[dict[str, Any]]) -> None:
    for found in said:
        assert found["fused updates"] == 0
        assert found["fused updates, records"][-1].endswith("updates moved, 1 list op split")


@pytest.mark.sweep
def test_a_compiler_backend_averages_what_the_update_has_left(said: list[dict[str, Any]]) -> None:
    assert [found["a compiler"] for found in said] == [0.0, 0.0]


@pytest.mark.sweep
def test_local_steps_clip_the_rank_s_own_gradients(said: list[dict[str, Any]]) -> None:
    assert all(found["own gradients are clipped"] < 1e-6 for found in said)


@pytest.mark.sweep
def test_synchronize_brings_the_mean_of_the_ranks(said: list[dict[str, Any]]) -> None:
    for found in said:
        before, after, difference = found["synchronize"]
        assert not before
        assert after
        assert difference < 1e-6
        assert found["synchronize, and on"]


@pytest.mark.sweep
def test_buffers_are_exchanged_at_averaging_steps_only(said: list[dict[str, Any]]) -> None:
    assert [found["buffers"] for found in said] == [[False, True, False, True]] * 2


@pytest.mark.sweep
def test_momentum_is_averaged_where_it_is_asked_for(said: list[dict[str, Any]]) -> None:
    for found in said:
        assert found["momentum"] == [False, False]
        assert found["averaged momentum"] == [False, True, False, True]
        assert found["averaged momentum, synchronize"] == [True, True]


@pytest.mark.sweep
def test_the_interval_is_the_published_rule_s_on_the_mean_loss(said: list[dict[str, Any]]) -> None:
    (one, rates, agreed), (other, _, _) = (found["adaptive"] for found in said)
    mean = [(a + b) / 2 for a, b in zip(one, other, strict=True)]
    due, interval, averaged = 2 + 3 - 1, 3, []
    first: tuple[float, float] | None = None
    for number in range(24):
        if number == due:
            averaged.append(number)
            first = first or (mean[number], rates[number])
            wanted = math.sqrt(first[1] / rates[number] * mean[number] / first[0]) * 3
            interval = min(max(1, math.ceil(wanted)), 16)
            due = number + interval
    assert [number for number in range(24) if agreed[number]] == [0, 1, *averaged]
    assert interval > 3


@pytest.mark.sweep
def test_a_loss_that_is_no_number_leaves_the_interval(said: list[dict[str, Any]]) -> None:
    for found in said:
        numbers = found["adaptive, no number"]
        assert numbers["adaptive-local-sgd/interval"] == 2
        assert numbers["adaptive-local-sgd/due"] == 3
        assert "adaptive-local-sgd/first loss" not in numbers


@pytest.mark.sweep
def test_a_step_is_skipped_on_all_ranks_or_on_none(said: list[dict[str, Any]]) -> None:
    for found in said:
        kept, scale, agreed = found["skipped"]
        assert kept == [False, False, False, True, False]
        assert scale == 65536 / 2
        assert agreed == [False, False, True, False, False, True]


@pytest.mark.sweep
def test_copies_in_low_precision_follow_the_mean(said: list[dict[str, Any]]) -> None:
    for found in said:
        assert found["copies"] == [[True] * 4, [False, True, False, True]]


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["local", "adaptive"])
def test_a_resumed_run_is_the_same_to_the_last_bit(said: list[dict[str, Any]], name: str) -> None:
    assert all(found[f"resumed, {name}"] == [0.0] * 7 for found in said)
