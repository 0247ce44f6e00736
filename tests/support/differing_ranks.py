"""What two ranks do that differ in one step; ``tests/runtime/ranks/test_agreement.py`` runs it in two processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import graphopt
from graphopt.passes import (
    AdaptiveLocalSGD,
    ClipGradients,
    CompressGradients,
    DataParallel,
    DeepGradientCompression,
    DiLoCo,
    FitMemory,
    FuseUpdate,
    LocalSGD,
    MixedPrecision,
    ShardOptimizer,
    ShardParameters,
)

PIPELINES: dict[str, list[graphopt.Pass]] = {
    "data-parallel": [DataParallel()],
    "drop-in": [DataParallel()],
    "accumulated": [DataParallel()],
    "shard-parameters": [DataParallel(), ShardParameters(min_bytes=16)],
    "local-sgd": [DataParallel(), LocalSGD(1)],
    "shard-optimizer": [DataParallel(), ShardOptimizer()],
    "measured buckets": [DataParallel(bucket_mb="auto")],
    "deep-gradient-compression": [DataParallel(), DeepGradientCompression(min_elements=16)],
    "compress-gradients": [DataParallel(), CompressGradients()],
    "adaptive-local-sgd": [DataParallel(), AdaptiveLocalSGD()],
    "diloco": [DataParallel(), DiLoCo(every=1)],
    "fused, clipped, low precision": [DataParallel(), FuseUpdate(), ClipGradients(1.0), MixedPrecision()],
    "budget and shards": [DataParallel(), ShardParameters(min_bytes=16), FitMemory(20_000)],
}


class Layers(nn.Module):
    """Two layers of the same shape, run in an order that the caller sets, then a third."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.order: tuple[str, ...] = ("a", "b")
        self.broken = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.broken:
            raise LookupError("no such batch")
        for name in self.order:
            x = torch.relu(getattr(self, name)(x))
        return self.last(x)


def branch(model: Layers, which: int) -> None:
    """Another branch, with tensors of the same shapes."""
    model.order = ("a",) if which == 0 else ("b",)


def order(model: Layers, which: int) -> None:
    """The same layers, one in the place of the other."""
    model.order = ("a", "b") if which == 0 else ("b", "a")


def frozen(model: Layers, which: int) -> None:
    """A layer that is trained or not."""
    model.a.requires_grad_(which == 0)


def broken(model: Layers, which: int) -> None:
    """A forward that raises."""
    model.broken = which == 1


def same(model: Layers, which: int) -> None:
    """Nothing: only the sizes of batches differ."""


SITUATIONS: dict[str, tuple[Callable[[Layers, int], None], str]] = {
    "another branch": (branch, "01r0"),
    "another branch, new to one rank": (branch, "0r00"),
    "another order": (order, "01r0"),
    "frozen on one rank": (frozen, "01r0"),
    "frozen, new to one rank": (frozen, "0r00"),
    "a forward that raises": (broken, "00r0"),
    "another size": (same, "00r0"),
}
"""How a model differs, and what each call is: 0 and 1 on all ranks, or r for what differs on the second one."""

ALLOWED = {(pipeline, "another order") for pipeline in ("local-sgd", "adaptive-local-sgd", "diloco")}
"""Parameters are exchanged in their own order there, whichever way their gradients came about."""


def train(rank: int, pipeline: str, situation: str) -> dict[str, Any]:
    """Make the calls of a situation; what came of it on this rank."""
    change, calls = SITUATIONS[situation]
    torch.manual_seed(0)
    model = Layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    call, whole = _trained(pipeline, model, optimizer)
    said: dict[str, Any] = {"error": "", "ranks": [], "unchanged": True}
    for number, which in enumerate(calls):
        mine = rank if which == "r" else int(which)
        change(model, mine)
        x = torch.randn(8 + 3 * (which == "r") * rank, 16, generator=torch.Generator().manual_seed(10 * number + rank))
        before = whole()
        try:
            call(x)
        except (graphopt.GraphoptError, LookupError) as error:
            said["error"], said["ranks"] = f"{type(error).__name__}: {error}", list(getattr(error, "ranks", ()))
            said["unchanged"] = bool(torch.equal(before, whole()))
    said["parameters"] = whole().double().sum().item()
    return said


def _trained(
    pipeline: str, model: Layers, optimizer: torch.optim.Optimizer
) -> tuple[Callable[[torch.Tensor], None], Callable[[], torch.Tensor]]:
    """Makes one update, and gives all parameters in one tensor."""

    def parameters() -> torch.Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).clone()

    if pipeline == "drop-in":
        optimized = graphopt.optimize(model, PIPELINES[pipeline])

        def update(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            # an optimized model is another object, with the attributes that it was made with
            optimized.order, optimized.broken = model.order, model.broken
            optimized(x).square().mean().backward()
            optimizer.step()

        return update, parameters
    step = graphopt.optimize_step(model, optimizer, PIPELINES[pipeline], loss=lambda m, x: m(x).square().mean())
    batches = 2 if pipeline == "accumulated" else 1
    step.accumulate(batches)

    def updates(x: torch.Tensor) -> None:
        for _ in range(batches):
            step(x)

    def whole() -> torch.Tensor:
        with step.whole_parameters():
            return parameters()

    return updates, whole
