"""Layers of which each rank has its own part, with collectives in autograd functions: captured so, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import run_ranks

PROLOGUE = """
import graphopt
import torch.distributed._functional_collectives as collectives
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from graphopt.passes import *

def summed(x):
    return collectives.wait_tensor(collectives.all_reduce(x, "sum", GROUP))

class Shared(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x.view_as(x))
    backward = staticmethod(lambda ctx, gradient: summed(gradient))

class Summed(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: summed(x))
    backward = staticmethod(lambda ctx, gradient: gradient)

class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x
    backward = staticmethod(lambda ctx, gradient: gradient)

class Part(nn.Module):
    \"\"\"This rank's columns of one product and rows of the next.\"\"\"
    def __init__(self, share, add):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)
        self.share, self.add = share, add

    def forward(self, x):
        return x + self.add(self.down(torch.relu(self.up(self.share(x)))))

def made(share=Shared.apply, add=Summed.apply):
    torch.manual_seed(rank)
    return nn.Sequential(*(Part(share, add) for _ in range(3)))

def loss(model, x):
    return model(x).square().mean()

def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)

def as_eager(passes, **options):
    plain, model = made(**options), made(**options)
    optimizer, step = adam(plain), graphopt.optimize_step(model, adam(model), passes, loss=loss)
    same = []
    for number in range(3):
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(SEED + number))
        expected = loss(plain, x)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        same.append(torch.equal(step(x), expected))
    same += [torch.equal(*pair) for pair in zip(model.parameters(), plain.parameters())]
    return all(same), step
"""


def test_training_is_eagers_and_passes_see_the_collectives(tmp_path: Path) -> None:
    """However the functions are called."""
    script = """
GROUP, SEED = dist.group.WORLD, 0
ways = {"taken before": {}, "called": {"share": lambda x: Shared.apply(x), "add": lambda x: Summed.apply(x)}}
for way in ways.values():
    for passes in ([], [Recompute("auto")], [FitMemory("90%", cost="roofline")],
                   [Recompute("auto"), PartitionCheckpoints(min_bytes=1)]):
        same, step = as_eager(passes, **way)
        say([same, sum("all_reduce" in str(node.target) for node in step.program.graph.nodes)])
say(step.records[-1].changed.counts)
"""
    for *trained, counts in run_ranks(PROLOGUE + script, 2, tmp_path / "store"):
        assert [same for same, _ in trained] == [True] * 8
        assert {number for _, number in trained} == {5}  # three of forward; the input gets no gradient
        assert counts == {"partitioned": 1}


@pytest.mark.sweep
def test_one_dimension_of_a_mesh_has_parts_and_the_other_one_batches(tmp_path: Path) -> None:
    script = """
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
GROUP, SEED = mesh["tensor"].get_group(), mesh.get_local_rank("data") * 100
rank = mesh.get_local_rank("tensor")
plain, model = made(), made()
passes = [DataParallel(group="data"), Recompute("auto"), PartitionCheckpoints(group="tensor", min_bytes=1)]
optimizer, step = adam(plain), graphopt.optimize_step(model, adam(model), passes, loss=loss)
for number in range(3):
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(SEED + number))
    optimizer.zero_grad()
    loss(plain, x).backward()
    for parameter in plain.parameters():
        parameter.grad.mul_(0.5)
        dist.all_reduce(parameter.grad, group=mesh["data"].get_group())
    optimizer.step()
    step(x)
say(all(torch.equal(*pair) for pair in zip(model.parameters(), plain.parameters())))
say({record.name: record.changed.counts for record in step.records}["partition-checkpoints"])
"""
    for same, counts in run_ranks(PROLOGUE + script, 4, tmp_path / "store"):
        assert same
        assert counts == {"partitioned": 1}


def test_a_collective_that_writes_into_its_argument_is_refused_with_the_way_out(tmp_path: Path) -> None:
    script = """
GROUP, SEED = dist.group.WORLD, 0
try:
    as_eager([], add=InPlace.apply)
except graphopt.CaptureError as error:
    say(str(error))
"""
    for (message,) in run_ranks(PROLOGUE + script, 2, tmp_path / "store"):
        assert "a collective that writes into its argument (dist.all_reduce(x))" in message
        assert "torch.distributed._functional_collectives" in message
