"""Batches that are distributed, and models where only plain ones are taken, are refused by name, with the way out."""

from __future__ import annotations

from pathlib import Path

from tests.support.ranks import run_ranks

SCRIPT = """
import graphopt
from torch import nn
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

mesh, x = dist.init_device_mesh("cpu", (world,)), torch.randn(4, 8)

def made():
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

def step(model, batch=x):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return graphopt.optimize_step(model, optimizer, loss=lambda model, x: model(x).square().mean())(batch)

def said(call):
    try:
        call()
    except graphopt.CaptureError as error:
        return str(error)
    return "nothing"

split = parallelize_module(made(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
for call in (
    lambda: graphopt.largest_batch(split, lambda size: (torch.randn(size, 8),), budget="1GB"),
    lambda: graphopt.optimize(made())(distribute_tensor(x, mesh, [Replicate()])),
    lambda: step(made(), distribute_tensor(x, mesh, [Replicate()])),
):
    say(said(call))
"""


def test_they_are_refused_by_name(tmp_path: Path) -> None:
    for found in run_ranks(SCRIPT, 2, tmp_path / "store"):
        assert "'0.weight' is a DTensor" in found[0]
        assert "before parallelize_module" in found[0]
        assert all("batch.to_local()" in message for message in found[1:])
