"""Dimensions of a ``DeviceMesh`` as groups: by name in every pass, and parameters sharded along one of two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks

PROLOGUE = """
from torch.distributed.device_mesh import init_device_mesh
import graphopt
from graphopt import GraphoptError
from graphopt.passes import *
from graphopt.ir.ops.communication.groups import find_group
from tests.passes.test_shard_parameters import OPTIMIZERS, X, model, trained
from tests.support.training import mean_square

def stepping(*passes, make="adamw", data=DataParallel()):
    made = model()
    optimizer = OPTIMIZERS[make]([p for p in made.parameters() if p.requires_grad])
    return graphopt.optimize_step(made, optimizer, [data, *passes], loss=mean_square)

def sharded(**options):
    return ShardParameters(**{"min_bytes": 64, "cost": "roofline", **options})

def same(one, two):
    return all(map(torch.equal, one, two))

def off(one, two):
    return max(((a - b).norm() / b.norm().clamp(min=1e-12)).item() for a, b in zip(one, two))

def same_on_all(tensors):
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    found = [torch.empty_like(flat) for _ in range(world)]
    dist.all_gather(found, flat)
    return all(torch.equal(flat, other) for other in found)

def message(call):
    try:
        call()
    except GraphoptError as error:
        return str(error)
"""


def run(script: str, world: int, folder: Path) -> list[list[Any]]:
    return run_ranks(PROLOGUE + script, world, folder / "store")


HYBRID = """
mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
hybrid = dict(group="shard", replicas="replicate")
"""


def test_shards_along_one_dimension_are_summed_up_along_the_other(tmp_path: Path) -> None:
    """As on all ranks, within rounding; a rank keeps half of what it would have alone."""
    script = (
        HYBRID
        + """
more = [ClipGradients(0.1)]
steps = [stepping(shard, *more) for shard in (sharded(**hybrid), ShardOptimizer(**hybrid))] + [stepping(*more)]
one, two, plain = (trained(step, rank, world, 5) for step in steps)
say([same(one, two), off(one[5:], plain[5:]), same_on_all(one[5:])])
memory, whole = steps[0].program.memory(), steps[2].program.memory()
state = sum(p.numel() * 4 for p in steps[2].model.parameters() if p.requires_grad)
parameters = sum(p.numel() * 4 for p in steps[2].model.parameters())
small = sum(p.numel() * 4 for p in steps[2].model.parameters() if p.numel() * 4 < 64)
batch = X[rank::world].numel() * 4
say([memory.resident_bytes - batch, (parameters + 2 * state) / 2 * 1.01 + small])
plan = [str(node.target) for node in steps[0].program.graph.nodes]
say([sum("reduce_scatter" in op for op in plan), sum("all_reduce" in op for op in plan)])
"""
    )
    for *trained, (resident, allowed), (scattered, summed) in run(script, 4, tmp_path):
        for equal, distance, everywhere in trained:
            assert equal
            assert distance < 1e-5
            assert everywhere
        assert resident <= allowed
        assert summed == scattered + 1 >= 2  # and the norm


@pytest.mark.sweep
def test_it_goes_with_other_passes(tmp_path: Path) -> None:
    script = (
        HYBRID
        + """
others = {
    "O2": [MixedPrecision("bfloat16", level="O2")], "float16": [MixedPrecision("float16")],
    "recompute": [Recompute("auto")], "fit": [FitMemory("100%", cost="roofline")],
    "state": [OffloadState(min_bytes=64, cost="roofline")],
}
for name, more in others.items():
    one, two = (trained(stepping(shard(**hybrid), *more), rank, world) for shard in (sharded, ShardOptimizer))
    say([name, same(one, two), same_on_all(one[3:])])
one, two = stepping(sharded(**hybrid)), stepping(ShardOptimizer(**hybrid))
for step in (one, two):
    step.accumulate(2)
one, two = trained(one, rank, world, 6), trained(two, rank, world, 6)
say(["accumulated", same(one, two), same_on_all(one[6:])])
"""
    )
    for said in run(script, 4, tmp_path):
        assert [case for case in said if case[1:] != [True, True]] == []
        assert len(said) == 6


@pytest.mark.sweep
def test_a_run_goes_on_from_its_checkpoint_and_gives_a_whole_state(tmp_path: Path) -> None:
    script = (
        HYBRID
        + f"""
folder = {str(tmp_path / "saved")!r}
whole = trained(stepping(sharded(**hybrid)), rank, world, 6)
first = stepping(sharded(**hybrid))
trained(first, rank, world, 3)
graphopt.checkpoint.save(folder, first)
second = stepping(sharded(**hybrid))
graphopt.checkpoint.load(folder, second)
say(same(trained(second, rank, world, 3, first=3)[3:], whole[6:]))
state = second.full_state_dict()
with second.whole_parameters():
    shown = {{name: p.detach().clone() for name, p in second.model.named_parameters()}}
say(rank != 0 or all(torch.equal(state["model"][name], shown[name]) for name in shown))
say(rank != 0 or [tuple(v["exp_avg"].shape) for v in state["optimizer"]["state"].values()]
    == [tuple(p.shape) for p in second.model.parameters() if p.requires_grad])
"""
    )
    assert run(script, 4, tmp_path) == [[True, True, True]] * 4


@pytest.mark.sweep
def test_another_number_of_ranks_goes_on_and_another_division_is_refused(tmp_path: Path) -> None:
    save = (
        HYBRID
        + f"""
step = stepping(ShardOptimizer(**hybrid))
trained(step, rank, world, 3)
graphopt.checkpoint.save({str(tmp_path / "saved")!r}, step)
state = step.full_state_dict()
say(rank != 0 or state["optimizer"]["state"][1]["exp_avg"].flatten().tolist())
say(sorted(step.optimizer.state_dict()["state"][0])[:2])
other = stepping(ShardOptimizer())
say(message(lambda: graphopt.checkpoint.load({str(tmp_path / "saved")!r}, other)))
"""
    )
    said = run(save, 4, tmp_path)
    for rank, (_, names, refused) in enumerate(said):
        assert names == ["exp_avg", f"exp_avg@rank{rank % 2}of2"]
        assert f"is shard {rank % 2} of 2, and this step's passes divide it into 4: load it with the group=" in refused
    load = f"""
step = stepping({{}})
trained(step, rank, world, 1)
graphopt.checkpoint.load({str(tmp_path / "saved")!r}, step)
state = step.full_state_dict()
say(rank != 0 or state["optimizer"]["state"][1]["exp_avg"].flatten().tolist())
trained(step, rank, world, 2, first=3)
say(same_on_all([p.detach() for p in step.model.parameters()]))
"""
    for number, shard in ((1, ""), (2, "ShardOptimizer()"), (3, "")):
        folder = tmp_path / str(number)
        folder.mkdir()
        for rank, (moment, everywhere) in enumerate(run(load.format(shard), number, folder)):
            assert rank or moment == said[0][0]
            assert everywhere


@pytest.mark.sweep
def test_a_dimension_is_a_group_by_its_name(tmp_path: Path) -> None:
    """Whose own name differs from rank to rank; with one rank in it there is nothing to do along it."""
    script = """
mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("data", "tensor"))
say([find_group("tensor").name == mesh["tensor"].get_group().group_name, find_group("tensor").ranks])
one, two = (trained(stepping(s, make="foreach"), rank, world) for s in (sharded(), sharded(replicas="tensor")))
say(same(one, two))
say(str(stepping(PartitionCheckpoints(group="tensor")).prepare(X).records[-1].changed.reason))
say([message(lambda: find_group(name)) for name in ("tenser", "data")])
init_device_mesh("cpu", (1, world), mesh_dim_names=("tensor", "other"))
say(find_group("tensor").ranks)
"""
    for rank, (found, equal, reason, (near, whole), again) in enumerate(run(script, 2, tmp_path)):
        assert found == [True, [rank]]
        assert equal
        assert "has one process" in reason
        assert "did you mean 'tensor'" in near
        assert "its meshes' dimensions tensor (" in whole
        assert "one that has all ranks is the default group, without a name" in whole
        assert again == [rank]


def test_a_dimension_of_two_meshes_is_refused_where_its_ranks_differ(tmp_path: Path) -> None:
    script = """
init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "shard"))
say(find_group("shard").ranks)
init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "other"))
say(message(lambda: find_group("shard")))
"""
    for rank, (ranks, refused) in enumerate(run(script, 4, tmp_path)):
        assert ranks == [rank // 2 * 2, rank // 2 * 2 + 1]
        other = [rank % 2, rank % 2 + 2]
        assert f"several meshes have a dimension 'shard', in which this process is with the ranks {ranks}" in refused
        assert f"and {other}: give the dimensions names of their own" in refused


@pytest.mark.sweep
def test_groups_that_are_no_grid_are_refused(tmp_path: Path) -> None:
    script = (
        HYBRID
        + """
crossed = [dist.new_group(ranks) for ranks in ([0, 3], [1, 2])][rank in (1, 2)]
wrong = {
    "without": sharded(group="shard"), "twice": sharded(group="shard", replicas="shard"),
    "crossed": sharded(group="shard", replicas=crossed.group_name),
    "part": ShardOptimizer(group="shard", replicas="replicate"),
}
for name, shard in wrong.items():
    data = DataParallel(group="shard") if name == "part" else DataParallel()
    say(message(lambda: stepping(shard, data=data).prepare(X[rank::world])))
"""
    )
    for without, twice, crossed, part in run(script, 4, tmp_path):
        assert "the same group=, or shard-parameters replicas=, the dimension of a DeviceMesh" in without
        for message in (twice, crossed, part):
            assert "are no grid of" in message
            assert "take two dimensions of one DeviceMesh that has all of them" in message
