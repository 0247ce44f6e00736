"""``ShardParameters``: each rank keeps its share of parameters, gradients and optimizer state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphopt
from graphopt import GraphoptError, PipelineError, TrainStep
from graphopt.passes import DataParallel, ShardParameters
from tests.support.ranks import run_ranks
from tests.support.training import mean_square

X = torch.linspace(-1, 1, 12 * 32).reshape(12, 32).cos()

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, fused=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "foreach": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, foreach=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01),
}


def model(layers: int = 3) -> nn.Sequential:
    """Linear layers, one without bias, a norm, a frozen layer, and odd sizes."""
    torch.manual_seed(0)
    middle = (module for _ in range(layers) for module in (nn.Linear(65, 65, bias=False), nn.GELU()))
    made = nn.Sequential(nn.Linear(32, 65), nn.GELU(), *middle, nn.LayerNorm(65), nn.Linear(65, 65), nn.Linear(65, 31))
    made[-2].requires_grad_(False)
    return made


def stepping(*passes: Any, make: str = "adamw", layers: int = 3) -> TrainStep:
    made = model(layers)
    trained = [parameter for parameter in made.parameters() if parameter.requires_grad]
    return graphopt.optimize_step(made, OPTIMIZERS[make](trained), [DataParallel(), *passes], loss=mean_square)


def sharded(**options: Any) -> ShardParameters:
    return ShardParameters(**{"min_bytes": 64, "cost": "roofline", **options})


def trained(step: TrainStep, rank: int, world: int, steps: int = 3, first: int = 0) -> list[torch.Tensor]:
    """Losses of some steps, then all parameters."""
    losses = [step(X[rank::world] * (number + 1)) for number in range(first, first + steps)]
    with step.whole_parameters():
        return [*losses, *(parameter.detach().clone() for parameter in step.model.parameters())]


PROLOGUE = """
import graphopt
from graphopt.passes import *
from tests.passes.test_shard_parameters import X, sharded, stepping, trained

def same(one, two):
    return all(map(torch.equal, one, two))
"""


def run(script: str, world: int, folder: Path) -> list[Any]:
    """What the ranks of a script say, which has to be the same on all of them."""
    said = run_ranks(PROLOGUE + script, world, folder / "store")
    assert all(other == said[0] for other in said)
    return said[0]


BESIDE = """
others = {
    "alone": [], "clip": [ClipGradients(0.1)], "O1": [MixedPrecision("bfloat16")],
    "O2": [MixedPrecision("bfloat16", level="O2")], "recompute": [Recompute("auto")],
    "state": [OffloadState(min_bytes=64, cost="roofline")],
}
def compare(make, name, more):
    one, two = (trained(stepping(shard, *more, make=make), rank, world) for shard in (sharded(), ShardOptimizer()))
    say([make, name, same(one, two)])
"""


def test_training_is_that_of_shard_optimizer_to_the_last_bit(tmp_path: Path) -> None:
    script = """
compare("adamw", "clip", others["clip"])
compare("momentum", "O2", others["O2"])
"""
    said = run(BESIDE + script, 3, tmp_path)
    assert [case[-1] for case in said] == [True] * 2


@pytest.mark.sweep
@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_optimizer_beside_every_pass(tmp_path: Path, world: int) -> None:
    script = """
for make in ("sgd", "momentum", "foreach", "adamw", "rmsprop"):
    for name, more in others.items():
        compare(make, name, more)
for make in ("sgd", "adamw", "rmsprop"):
    compare(make, "float16", [MixedPrecision("float16")])
"""
    said = run(BESIDE + script, world, tmp_path)
    assert len(said) == 33
    assert [case for case in said if not case[-1]] == []


def test_two_ranks_are_as_data_parallel_and_resident_bytes_are_an_nth(tmp_path: Path) -> None:
    script = """
one, two = stepping(sharded(), make="foreach"), stepping(make="foreach")
say(same(trained(one, rank, world, 20), trained(two, rank, world, 20)))
memory, plain = one.program.memory(), two.program.memory()
batch = X[rank::world].numel() * 4
small = sum(p.numel() * 4 for p in two.model.parameters() if p.numel() * 4 < 64)
state = sum(p.numel() * 4 for p in two.model.parameters() if p.requires_grad)
parameters = sum(p.numel() * 4 for p in two.model.parameters())
say([memory.resident_bytes - batch, (parameters + state) / world * 1.01 + small])
say(memory.peak_bytes < plain.peak_bytes)
peak = graphopt.measure_peak(lambda: one(X[rank::world])).allocated_peak_bytes
largest = max(parameter.numel() for parameter in two.model.parameters()) * 4
say([peak, memory.allocated_peak_bytes, 3 * largest])
"""
    for equal, (resident, allowed), lower, (measured, predicted, slack) in run_ranks(
        PROLOGUE + script, 2, tmp_path / "store"
    ):
        assert equal
        assert resident <= allowed
        assert lower
        assert abs(predicted - measured) < slack  # gloo gives back its buffers, as large as a parameter, when it likes


@pytest.mark.sweep
def test_accumulation_and_sizes_that_change(tmp_path: Path) -> None:
    script = """
one, two = stepping(sharded()), stepping(ShardOptimizer())
for step in (one, two):
    step.accumulate(2)
say(same(trained(one, rank, world, 6), trained(two, rank, world, 6)))
one, two = stepping(sharded()), stepping(ShardOptimizer())
rows = [8, 5, 6, 8]
losses = [[step(X[:count] * (rank + 1)) for count in rows] for step in (one, two)]
say(same(*losses))
say(one.evaluate(X).item() == two.evaluate(X).item())
"""
    assert run(script, 2, tmp_path) == [True, True, True]


@pytest.mark.sweep
def test_fit_memory_plans_around_gathers(tmp_path: Path) -> None:
    script = """
torch.manual_seed(0)
batch = torch.randn(256, 32)
one, two = stepping(sharded(), layers=6), stepping(ShardOptimizer(), layers=6)
one(batch)
budget = one.program.memory().peak_bytes * 7 // 10
fitted = stepping(sharded(), FitMemory(budget, cost="roofline"), layers=6)
say(same([fitted(batch) for _ in range(3)], [two(batch) for _ in range(3)]))
say([program.memory().peak_bytes <= budget for program in fitted.programs.values()])
say(fitted.records[-1].changed.counts["recomputed"] > 0)
try:
    stepping(sharded(), FitMemory(1000, cost="roofline"), layers=6)(batch)
except graphopt.GraphoptError as error:
    say("no plan fits" in str(error))
"""
    assert run(script, 2, tmp_path) == [True, [True, True], True, True]


GATHERS = """
from graphopt.rewriting.distributed.prediction.link import Link
from graphopt.rewriting.distributed.prediction import measured_link

def with_link(bandwidth):
    measured_link.measure_link = lambda group, device: Link(bandwidth)

def gathers(step):
    return sum("all_gather" in str(node.target) for node in step.program.graph.nodes)

torch.manual_seed(0)
batch = torch.randn(256, 32)
expected = [*map(stepping(ShardOptimizer(), layers=6), [batch] * 3)]
"""


def test_parameters_stay_between_two_calls_in_the_bytes_that_they_may_add(tmp_path: Path) -> None:
    script = """
with_link(1e9)
peaks = []
for keep in ("auto", "20kB", 2**20):
    step = stepping(sharded(keep=keep), layers=6)
    say(same([*map(step, [batch] * 3)], expected))
    peaks.append(step.program.memory().peak_bytes)
    say([peaks[-1] - peaks[0], gathers(step)])
"""
    said = run(GATHERS + script, 2, tmp_path)
    assert said[::2] == [True] * 3
    (_, most), (some, fewer), (more, fewest) = said[1::2]
    assert 0 < some <= 20_000 < more <= 2**20
    assert most > fewer > fewest == 14  # each of them once


@pytest.mark.sweep
def test_a_budget_leaves_no_more_room_than_keep(tmp_path: Path) -> None:
    script = """
with_link(1e9)
for keep in ("auto", 0, "20kB"):
    step = stepping(sharded(keep=keep), FitMemory("2MB", cost="roofline"), layers=6)
    say(same([*map(step, [batch] * 3)], expected))
    say([step.program.memory().peak_bytes, gathers(step)])
"""
    for said in run_ranks(PROLOGUE + GATHERS + script, 2, tmp_path / "store"):
        assert said[::2] == [True] * 3
        (most, fewest), (none, many), (some, fewer) = said[1::2]
        assert none < some <= none + 20_000 < most <= 2_000_000
        assert fewest == 14 < fewer < many


@pytest.mark.sweep
def test_fit_memory_weighs_gathers_against_what_runs_again(tmp_path: Path) -> None:
    script = """
with_link(5e5)
peak = 1_326_320
for share in (70, 80, 90, 100, 105, 110):
    budget = peak * share // 100
    step = stepping(sharded(), FitMemory(budget, cost="roofline"), layers=6)
    say(same([*map(step, [batch] * 3)], expected))
    say([program.memory().peak_bytes <= budget for program in step.programs.values()])
    waits = next(line for record in step.records for line in record.changed.lines if "the computation waits" in line
                 and "around this plan" in line)
    say([step.records[-1].changed.counts.get("recomputed", 0), gathers(step), waits.split()[-4]])
"""
    said = run(GATHERS + script, 2, tmp_path)
    assert said[::3] == [True] * 6
    assert said[1::3] == [[True, True]] * 6
    found = said[2::3]
    assert [gathered for _, gathered, _ in found] == [14] * 6  # 23 without room for them
    again = [number for number, *_ in found]
    assert again == sorted(again, reverse=True)
    assert again[-1] == 0
    assert again[3] > 0  # at the peak of the unmodified program nothing has to, and gathering takes longer


def test_a_budget_that_cannot_be_met_is_refused_on_all_ranks(tmp_path: Path) -> None:
    script = """
for share in (38, 25):
    try:
        stepping(sharded(), FitMemory(1_326_320 * share // 100, cost="roofline"), layers=6)(torch.randn(256, 32))
    except graphopt.GraphoptError as error:
        say("no plan fits into" in str(error))
        say(any("the largest tensors" in note for note in error.__notes__))
"""
    said = run(script, 2, tmp_path)
    assert said[::2] == [True, True]
    assert said[1] is True


@pytest.mark.sweep
def test_what_is_cast_before_it_is_read_is_gathered_in_fewer_bytes(tmp_path: Path) -> None:
    script = """
torch.manual_seed(rank)
batch = torch.randn(256, 32)
for level in ("O1", "O2"):
    cast = MixedPrecision("bfloat16", level=level)
    other = stepping(ShardOptimizer(), cast, layers=4)
    expected = [other(batch) for _ in range(3)]
    for more in ([], [FitMemory("70%", cost="roofline")]):
        step = stepping(sharded(), cast, *more, layers=4)
        say(same([step(batch) for _ in range(3)], expected))
        sent = {}
        for node in step.program.graph.nodes:
            if "all_gather" in str(node.target):
                value = node.meta["val"]
                sent[str(value.dtype)] = sent.get(str(value.dtype), 0) + value.numel()
        say(sent["torch.bfloat16"] > 10 * sent["torch.float32"])
"""
    assert run(script, 2, tmp_path) == [True] * 8


@pytest.mark.sweep
def test_no_rank_has_more_than_one_tensor_whole_where_all_are_saved_or_put_together(tmp_path: Path) -> None:
    script = f"""
step, other = stepping(sharded(min_bytes=1024), layers=20), stepping(ShardOptimizer(), layers=20)
expected = trained(other, rank, world)
trained(step, rank, world)
parameters = sum(p.numel() * 4 for p in step.model.parameters())
peak = graphopt.measure_peak(lambda: graphopt.checkpoint.save({str(tmp_path / "run")!r}, step)).allocated_peak_bytes
say(peak < 0.6 * parameters)
again = stepping(sharded(min_bytes=1024), layers=20)
again(X[rank::world])
graphopt.checkpoint.load({str(tmp_path / "run")!r}, again)
say([type(p) is torch.nn.Parameter for p in again.model.parameters()].count(True))
whole = step.full_state_dict()
if rank == 0:
    plain = torch.optim.AdamW([p for p in other.model.parameters() if p.requires_grad])
    plain.load_state_dict(whole["optimizer"])
    say(same(expected[3:], [whole["model"][name] for name in other.model.state_dict()]))
    say(all(kept["exp_avg"].shape == p.shape for p, kept in plain.state.items()))
else:
    say(whole == {{}})
    say(True)
say(same(trained(step, rank, world, 1, 3), trained(again, rank, world, 1, 3)))
"""
    small = 5  # biases, and the norm
    assert run(script, 2, tmp_path) == [True, small, True, True, True]


@pytest.mark.sweep
def test_checkpoints_go_over_to_other_passes_and_other_numbers_of_ranks(tmp_path: Path) -> None:
    save = f"""
step = stepping(sharded())
trained(step, rank, world)
graphopt.checkpoint.save({str(tmp_path / "run")!r}, step)
say(torch.cat([value.double().flatten() for value in trained(step, rank, world, 2, 3)[2:]]).sum().item())
again = stepping(sharded())
graphopt.checkpoint.load({str(tmp_path / "run")!r}, again)
say(torch.cat([value.double().flatten() for value in trained(again, rank, world, 2, 3)[2:]]).sum().item())
other = stepping(ShardOptimizer())
graphopt.checkpoint.load({str(tmp_path / "run")!r}, other)
say(torch.cat([value.double().flatten() for value in trained(other, rank, world, 2, 3)[2:]]).sum().item())
"""
    said = run(save, 2, tmp_path)
    assert said[0] == said[1] == said[2]
    load = f"""
step = stepping(sharded())
graphopt.checkpoint.load({str(tmp_path / "run")!r}, step)
say(step.steps)
with step.whole_parameters():
    say(sum(parameter.double().sum().item() for parameter in step.model.parameters()))
step(X[rank::world])
graphopt.checkpoint.load({str(tmp_path / "run")!r}, step)
with step.whole_parameters():
    say(sum(parameter.double().sum().item() for parameter in step.model.parameters()))
"""
    (tmp_path / "more").mkdir()
    steps, one, two = run(load, 3, tmp_path / "more")
    assert steps == 3
    assert one == two


@pytest.mark.sweep
def test_what_is_changed_inside_is_kept(tmp_path: Path) -> None:
    script = """
one, two = stepping(sharded()), stepping(ShardOptimizer())
for step in (one, two):
    step(X[rank::world])
    with step.whole_parameters(), torch.no_grad():
        step.model[0].weight.mul_(0.5)
        step.model[2].weight = torch.nn.Parameter(torch.full_like(step.model[2].weight, 0.01))
    step.optimizer.add_param_group({"params": [step.model[2].weight]})
say(same([one(X[rank::world])], [two(X[rank::world])]))
"""
    assert run(script, 2, tmp_path) == [True]


@pytest.mark.sweep
def test_reading_a_parameter_without_memory_is_an_error_with_its_name(tmp_path: Path) -> None:
    script = """
import copy
step = stepping(sharded())
step(X[rank::world])
model = step.model
for what in (lambda: model(X), lambda: model[0].weight + 1, lambda: model[0].weight.sum(), lambda: model[0].weight.data,
             lambda: model.state_dict(), lambda: copy.deepcopy(model), lambda: model[0].weight.detach(),
             lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) or model[0].weight.tolist()):
    try:
        what()
        say("nothing")
    except graphopt.GraphoptError as error:
        say("'0.weight'" in str(error) and "with step.whole_parameters()" in str(error))
weight = model[0].weight
say([list(weight.shape), str(weight.dtype), weight.requires_grad, weight.numel(), "0.weight" in repr(weight),
     isinstance(weight, torch.nn.Parameter)])
with step.whole_parameters():
    say(list(model(X).shape))
    try:
        step(X[rank::world])
    except graphopt.GraphoptError as error:
        say("call it outside" in str(error))
    say(type(model[0].weight) is torch.nn.Parameter)
say(torch.equal(step(X[rank::world]).isfinite(), torch.tensor(True)))
"""
    said = run(script, 2, tmp_path)
    assert said == [*[True] * 8, [[65, 32], "torch.float32", True, 2080, True, True], [12, 31], True, True, True]


@pytest.mark.sweep
def test_one_rank_changes_nothing(tmp_path: Path) -> None:
    script = """
step = stepping(sharded())
say(same(trained(step, 0, 1), trained(stepping(), 0, 1)))
say("one process" in step.records[-1].changed.reason)
"""
    assert run(script, 1, tmp_path) == [True, True]


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(PipelineError, match="data-parallel"):
        graphopt.Pipeline([ShardParameters()])
    with pytest.raises(PipelineError, match="shard-optimizer"):
        graphopt.Pipeline("data-parallel,shard-optimizer,shard-parameters")
    with pytest.raises(GraphoptError, match="min_bytes"):
        ShardParameters(min_bytes=-1)
    with pytest.raises(GraphoptError, match="a100"):
        ShardParameters(cost="a1000")
    for keep, told in (("much", "keep='much'"), (-1, "at least 0, got -1"), (True, "got True"), (None, "got None")):
        with pytest.raises(GraphoptError, match=told):
            ShardParameters(keep=keep)


@pytest.mark.sweep
def test_parameters_in_shards_are_not_moved_to_a_disk(tmp_path: Path) -> None:
    script = """
one = stepping(sharded(), OffloadState(("optimizer", "parameters"), min_bytes=64, cost="roofline"))
say(same(trained(one, rank, world), trained(stepping(ShardOptimizer()), rank, world)))
say(any("each rank keeps a shard of it" in line for record in one.records for line in record.changed.lines))
"""
    assert run(script, 2, tmp_path) == [True, True]


@pytest.mark.sweep
def test_an_update_that_reads_whole_parameters_is_refused(tmp_path: Path) -> None:
    script = """
import dataclasses
@dataclasses.dataclass(frozen=True)
class Shrink(graphopt.Pass):
    name, stage, numerics = "shrink", "step", "changes"

    def apply(self, program):
        weight = next(node for node, spec in program.inputs_of("parameter") if spec.target.endswith("weight"))
        given = {"before": program.output_node, "phase": graphopt.Phase.UPDATE, "origin": self.name}
        program.insert(torch.ops.aten.mul_.Scalar, (weight, 0.5), **given)
        return graphopt.Changed({"parameters": 1})

try:
    stepping(Shrink(), sharded())(X[rank::world])
except graphopt.GraphoptError as error:
    say("(shrink) reads the whole parameter" in str(error) and "leave that pass or shard-parameters out" in str(error))
"""
    assert run(script, 2, tmp_path) == [True]


@pytest.mark.sweep
def test_a_program_is_read_from_its_description(tmp_path: Path) -> None:
    script = """
step = stepping(sharded()).prepare(X[rank::world])
program = step.program
again = graphopt.Program.from_json(program.to_json())
say(again.to_text() == program.to_text())
say(again.memory().resident_bytes == program.memory().resident_bytes)
say(again.pass_state == program.pass_state)
"""
    assert run(script, 2, tmp_path) == [True, True, True]
