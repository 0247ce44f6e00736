"""Models after ``parallelize_module``, alone and with ``fully_shard`` around, trained by torch and with programs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from tests.support.fully_sharded import Case, Net, far_apart

__all__ = ["CASES", "MORE_CASES", "MORE_STEPS", "STEPS", "ParallelCase", "tensor_parallel", "torchs_far_apart"]


@dataclass(frozen=True)
class ParallelCase(Case):
    """One way to give a model to ``parallelize_module``, and passes.

    Attributes:
        plan: ``layers`` (local tensors between layers), ``sequence`` (norms and sums for parts of the sequence, local
            tensors between them) or ``loss`` (the same with distributed tensors between them, and logits by class).
        mesh: in two dimensions, of shards and of tensor parallelism; None for the latter alone.
    """

    plan: str = "loss"
    width: int = 12
    dropout: float = 0.0
    tokens: int = 8

    def batch_of(self, rank: int) -> int:
        """Which batch a rank has: the same one among those that share layers."""
        return 0 if self.mesh is None else rank // self.mesh[1]


CASES = {
    "sequence, tied, optimized before": ParallelCase(plan="sequence", tied=True, late=True),
    "loss, FitMemory, frozen": ParallelCase(frozen=True, passes="fit-memory{budget=90%}"),
}
"""Drop-in, by name."""

STEPS = {"loss, FitMemory": ParallelCase(passes="fit-memory{budget=90%}")}
"""Whole steps, by name."""

MORE_CASES = {
    "layers": ParallelCase(plan="layers"),
    "layers, rows that ranks do not divide": ParallelCase(plan="layers", width=9, passes="fit-memory{budget=90%}"),
    "dropout": ParallelCase(dropout=0.2, plan="layers", passes="recompute{checkpoints=blocks.*}"),
    "accumulated": ParallelCase(backwards=2),
    "loss, tied": ParallelCase(tied=True),
    "checkpoint": ParallelCase(checkpoint="inside", passes="fit-memory{budget=95%}"),
    "Recompute": ParallelCase(passes="recompute{checkpoints=blocks.*}"),
    "Offload": ParallelCase(passes="offload{tier=disk min-bytes=1}"),
}
"""More of the same, for `make sweep`."""

MORE_STEPS = {
    "sequence": ParallelCase(plan="sequence"),
    "accumulated, frozen": ParallelCase(backwards=2, frozen=True),
    "tied": ParallelCase(tied=True),
    "OffloadState": ParallelCase(passes="offload-state{min-bytes=1}"),
}


def tensor_parallel(case: Case, optimized: Callable[[nn.Module], nn.Module] = lambda model: model) -> nn.Module:
    """A model after ``parallelize_module``, and ``fully_shard`` in two dimensions, the same on every rank."""
    assert isinstance(case, ParallelCase)
    torch.manual_seed(0)
    model: Any = Net(case.width, case.tied, case.dropout)
    if case.late:
        model = optimized(model)
    mesh = init_device_mesh("cpu", case.mesh or (1, dist.get_world_size()), mesh_dim_names=("shards", "parts"))
    local = case.plan != "loss"
    if case.plan == "layers":
        for block in model.blocks:
            up = ColwiseParallel(use_local_output=case.width % mesh.size(1) == 0)
            parallelize_module(block, mesh["parts"], {"1": up, "3": RowwiseParallel()})
    else:
        rows = {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=local),
            "head": ColwiseParallel(
                input_layouts=Shard(1), output_layouts=Replicate() if local else Shard(-1), use_local_output=local
            ),
        }
        parallelize_module(model, mesh["parts"], rows)
        if case.tied:
            model.head.weight = model.embed.weight
        for block in model.blocks:
            plan = {
                "0": SequenceParallel(),
                "1": ColwiseParallel(input_layouts=Shard(1)),
                "3": RowwiseParallel(output_layouts=Shard(1), use_local_output=local),
            }
            parallelize_module(block, mesh["parts"], plan)
    model.blocks[0][1].weight.requires_grad_(not case.frozen)
    if case.checkpoint:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        model.blocks = nn.ModuleList(map(checkpoint_wrapper, model.blocks))
    if case.mesh is not None:
        options: dict[str, Any] = {"mesh": mesh["shards"]}
        if case.policy is not None:
            options["mp_policy"] = case.policy[0]
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
    return model if case.late else optimized(model)


def torchs_far_apart(case: ParallelCase, *, step: bool = False) -> dict[str, Any]:
    """``far_apart`` for a model after ``parallelize_module``."""
    with loss_parallel() if case.plan == "loss" else contextlib.nullcontext():
        return far_apart(case, step=step, make=tensor_parallel)
