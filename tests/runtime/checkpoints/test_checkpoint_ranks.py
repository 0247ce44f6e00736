"""Checkpoints of several ranks: what differs stays apart, and goes on bit for bit, also in other numbers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import nn

import graphopt
from graphopt import GraphoptError, checkpoint
from graphopt.passes import Recompute
from tests.support.ranks import run_ranks

TRAIN = """
import copy, pathlib
import torch.distributed.checkpoint as dcp
from torch import nn
import graphopt
from graphopt import GraphoptError, checkpoint
from graphopt.passes import (
    CompressGradients, DataParallel, DeepGradientCompression, DiLoCo, LocalSGD, MixedPrecision, ShardOptimizer
)

FOLDER = pathlib.Path({folder!r})
KINDS = {{
    "dgc": ([DeepGradientCompression(sparsity=(0.75,), rampup_step=1, min_elements=1)], {{}}),
    "powersgd": ([CompressGradients("powersgd", start_step=0, min_compression_rate=0.5)], {{"momentum": 0.9}}),
    "sharded": ([ShardOptimizer(), MixedPrecision("float16", init_scale=2.0**20)], {{"momentum": 0.9}}),
    "local": ([LocalSGD(k_steps=4)], {{"momentum": 0.9}}),
    "outer": ([DiLoCo(every=8, fragments=2, delay=2, sparsity=0.5)], {{"momentum": 0.9}}),
}}

def loss(model, x):
    return model(x).square().mean()

class Run:
    def __init__(self, kind, seed=0):
        torch.manual_seed(seed)
        passes, options = KINDS[kind]
        self.model = nn.Sequential(nn.Linear(7, 9), nn.Dropout(0.2), nn.Tanh(), nn.Linear(9, 5, bias=False))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, **options)
        passes = [DataParallel(), *passes]
        self.step = graphopt.optimize_step(self.model, self.optimizer, passes, loss=loss, verify=False)
        self.done = 0

    def __call__(self, steps):
        found = []
        for _ in range(steps):
            generator = torch.Generator().manual_seed(10 * self.done + rank)
            found.append(self.step(torch.randn(6, 7, generator=generator)).item())
            self.done += 1
        return found

    def all(self):
        state = [p.detach().clone() for p in self.model.parameters()]
        state += [v.clone() for kept in self.optimizer.state.values() for v in kept.values() if v is not None]
        return state + list(self.step.state_dict()["held"].values())

def same(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other))
"""

RESUMED = (
    TRAIN
    + """
said = {{}}
for kind in KINDS:
    run = Run(kind)
    torch.manual_seed(5 + rank)  # dropout differs from rank to rank
    run(6)
    folder, generator = FOLDER / kind, torch.get_rng_state()
    for format in ("dcp", "torch"):
        checkpoint.save(folder / format, {{"step": run.step, "done": run.done}}, format=format)
    whole = {{"model": run.model, "optimizer": run.optimizer, "step": run.step}}
    dcp.save(whole, checkpoint_id=folder / "raw")
    expected, fresh, used = run(4), Run(kind, seed=1), Run(kind, seed=2)
    used(6)  # as often as needed for the optimizer to have state
    for format, other in (("dcp", fresh), ("torch", used)):
        other.done = checkpoint.load(folder / format, {{"step": other.step, "done": None}})["done"]
        said[kind, format] = other(4) == expected and same(other.all(), run.all())
    if kind not in ("local", "outer"):  # whose parameters are each rank's own
        into = {{"model": used.model, "optimizer": used.optimizer, "step": used.step}}
        dcp.load(into, checkpoint_id=folder / "raw")
        torch.set_rng_state(generator)
        used.done = 6
        said[kind, "raw"] = used(4) == expected and same(used.all(), run.all())
    if kind in ("dgc", "sharded"):
        states = [None] * world
        dist.all_gather_object(states, (run.optimizer.state_dict(), run.step.state_dict()))
        names = [[key for kept in state["state"].values() for key in kept] for state, _ in states]
        try:
            used.optimizer.load_state_dict(states[1 - rank][0])
            used.step.load_state_dict(states[1 - rank][1])
            said[kind, "other"] = ""
        except GraphoptError as error:
            said[kind, "other"] = str(error)
    if kind == "sharded":
        plain = torch.optim.SGD(used.model.parameters(), lr=0.1, momentum=0.9)
        plain.load_state_dict(run.optimizer.state_dict())
        for p in plain.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        try:
            plain.step()
            said[kind, "plain"] = "went on"
        except RuntimeError as error:
            said[kind, "plain"] = "failed"

# one rank that cannot save
try:
    checkpoint.save(FOLDER / "odd", {{"odd": object() if rank else 1}})
    said["odd", "other"] = ""
except GraphoptError as error:
    said["odd", "other"] = str(error)
say([[*key, value] for key, value in said.items()])
say(names)
"""
)


Resumed = tuple[Path, list[dict[tuple[str, str], object]]]


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Resumed:
    """The folder that two ranks have left, and what they said."""
    folder = tmp_path_factory.mktemp("ranks")
    ranks = run_ranks(RESUMED.format(folder=str(folder)), 2, folder / "store")
    assert [set(names) for names in ranks[0][1]] == [
        {"momentum_buffer", f"momentum_buffer@rank{rank}of2"} for rank in range(2)
    ]
    return folder, [{(one, other): value for one, other, value in said[0]} for said in ranks]


@pytest.mark.sweep(cases=("dgc",))
@pytest.mark.parametrize("kind", ["dgc", "powersgd", "sharded", "local"])
def test_each_rank_goes_on_bit_for_bit(resumed: Resumed, kind: str) -> None:
    for said in resumed[1]:
        assert said[kind, "dcp"] is said[kind, "torch"] is said.get((kind, "raw"), True) is True


def test_what_is_anothers_is_refused(resumed: Resumed) -> None:
    for rank, said in enumerate(resumed[1]):
        other = 1 - rank
        assert f"the shard of rank {other} of 2, and this is rank {rank} of 2" in str(said["sharded", "other"])
        assert f"is rank {other}'s; this is rank {rank}" in str(said["dgc", "other"])
        assert said["sharded", "plain"] == "failed"
        assert "cannot be made: rank 1: a checkpoint cannot hold the object at /odd" in str(said["odd", "other"])


def model_and_step() -> tuple[nn.Sequential, graphopt.TrainStep]:
    model = nn.Sequential(nn.Linear(7, 9), nn.Dropout(0.2), nn.Tanh(), nn.Linear(9, 5, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = graphopt.optimize_step(model, optimizer, [Recompute("0")], loss=lambda model, x: model(x).square().mean())
    return model, step


@pytest.mark.parametrize("format", ["dcp", "torch"])
def test_two_ranks_become_one(resumed: Resumed, format: str) -> None:
    """Shards are put together; what one rank cannot go on from is named."""
    folder, _ = resumed
    model, step = model_and_step()
    checkpoint.load(folder / "sharded" / format, {"step": step, "done": None})
    for parameter in model.parameters():
        assert step.optimizer.state[parameter]["momentum_buffer"].shape == parameter.shape
    with pytest.raises(GraphoptError, match="'loss-scale/scale' is kept by no pass here"):
        step(torch.randn(6, 7))
    with pytest.raises(GraphoptError, match=r"model/0\.weight differs between rank 0 and rank 1 .*step\.synchronize"):
        checkpoint.load(folder / "local" / format, {"step": step, "done": None})


OTHER_NUMBER = (
    TRAIN
    + """
said = {{}}
for kind in ("sharded", "dgc"):
    run = Run(kind, seed=3)
    done = checkpoint.load(FOLDER / kind / "dcp", {{"step": run.step}})["done"]
    run.done = done
    found = run(3)
    flat = torch.cat([p.detach().flatten() for p in run.model.parameters()])
    others = [torch.empty_like(flat) for _ in range(world)]
    dist.all_gather(others, flat)
    said[kind] = [done, len(found), all(torch.equal(flat, other) for other in others), sum(
        v.numel() for kept in run.optimizer.state.values() for v in kept.values() if v is not None
    )]
say(said)
"""
)


@pytest.mark.sweep
def test_two_ranks_become_three(resumed: Resumed) -> None:
    folder, _ = resumed
    ranks = run_ranks(OTHER_NUMBER.format(folder=str(folder)), 3, folder / "three")
    assert all(said[0][kind][:3] == [6, 3, True] for said in ranks for kind in ("sharded", "dgc"))
    assert sum(said[0]["sharded"][3] for said in ranks) == 7 * 9 + 9 + 9 * 5


KILLED = (
    TRAIN
    + """
import os, random, threading

def trained(folder, steps):
    run = Run("local")
    torch.manual_seed(5 + rank)
    if any(folder.glob("checkpoint-????????")):
        run.done = checkpoint.load(folder, {{"step": run.step, "done": None}})["done"]
    before = run.done
    while run.done < steps:
        run(1)
        if steps > 1000:
            checkpoint.save(folder, {{"step": run.step, "done": run.done}}, format={format!r})
        if run.done == before + 3 and steps > 1000:
            threading.Timer({seconds!r} + 0.02 * rank, os.kill, (os.getpid(), 9)).start()
    return run

run = trained(FOLDER / "killed", {steps!r})
generator, reference = torch.get_rng_state(), Run("local")
torch.manual_seed(5 + rank)
reference(run.done)
alike = [same(run.all(), reference.all()), torch.equal(torch.get_rng_state(), generator)]
expected = reference(5)
torch.set_rng_state(generator)
say([run.done, *alike, run(5) == expected])
"""
)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("format", "seed"),
    [
        ("dcp", 0),
        *(pytest.param(format, seed, marks=pytest.mark.sweep) for format in ("dcp", "torch") for seed in range(1, 5)),
    ],
)
def test_ranks_that_are_killed_at_any_moment_go_on(tmp_path: Path, format: str, seed: int) -> None:
    """One rank a little before the other, so that one may wait in an exchange."""
    seconds = random.Random(seed).random() * 0.3
    fill = {"folder": str(tmp_path), "format": format, "seconds": seconds}
    run_ranks(KILLED.format(**fill, steps=100_000), 2, tmp_path / "one", codes=[-9, -9])
    found = [said[0] for said in run_ranks(KILLED.format(**fill, steps=0), 2, tmp_path / "two")]
    assert found[0][0] == found[1][0] >= 3
    assert [said[1:] for said in found] == [[True, True, True]] * 2
