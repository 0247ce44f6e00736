"""A model in DistributedDataParallel, trained by itself and optimized, and where the two differ."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import graphopt

__all__ = ["CASES", "differences"]

CASES: dict[str, dict[str, Any]] = {
    "FitMemory": {"passes": "fit-memory{budget=99%}"},
    "unused parameters": {"unused": True, "find_unused_parameters": True},
    "a static graph": {"unused": True, "static_graph": True},
    "a communication hook, views of buckets": {"hook": True, "gradient_as_bucket_view": True},
    "no_sync": {"accumulate": 2},
    "join": {"join": True},
}
"""By name: ``passes``, ``unused`` parameters, a ``hook``, how many batches to ``accumulate``, whether ranks ``join``,
and what else DistributedDataParallel takes."""


class _Net(nn.Module):
    def __init__(self, unused: bool, norm: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.dropout = nn.Dropout(0.1)
        if unused:
            self.never = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.dropout(F.gelu(self.norm(self.up(x)))))


def _made(case: Mapping[str, Any]) -> DistributedDataParallel:
    own = {key: value for key, value in case.items() if key not in ("passes", "unused", "hook", "accumulate", "join")}
    torch.manual_seed(0)
    model = DistributedDataParallel(_Net(bool(case.get("unused")), norm=not case.get("join")), **own)
    if case.get("hook"):
        model.register_comm_hook(None, fp16_compress_hook)
    return model


def _train(model: DistributedDataParallel, case: Mapping[str, Any]) -> DistributedDataParallel:
    """Some batches, one more on the second rank where ranks join."""
    rank, every = dist.get_rank(), int(case.get("accumulate", 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    generator = torch.Generator().manual_seed(rank)
    with model.join() if case.get("join") else contextlib.nullcontext():
        for number in range(4 + (rank if case.get("join") else 0)):
            torch.manual_seed(10 * number + rank)
            last = (number + 1) % every == 0
            with contextlib.nullcontext() if last else model.no_sync():
                model(torch.randn(6, 8, generator=generator)).square().mean().backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
    return model


def differences(case: Mapping[str, Any]) -> list[str]:
    """Parameters and buffers that an optimized model has otherwise than DistributedDataParallel by itself."""
    logging.getLogger("graphopt").setLevel(logging.ERROR)
    theirs = _train(_made(case), case)
    ours = _train(graphopt.optimize(_made(case), case.get("passes", ())), case)
    assert type(ours) is DistributedDataParallel
    assert len(ours.module.records) == len([case["passes"]] if "passes" in case else [])
    one, other = theirs.state_dict(), ours.state_dict()
    assert list(one) == list(other)
    return [name for name in one if not torch.equal(one[name], other[name])]
