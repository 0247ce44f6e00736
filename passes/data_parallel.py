"""Data parallelism: every gradient becomes its mean over the ranks, exchanged in fused buckets beside backward."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast, final

import torch
import torch.distributed as dist
from torch import nn

from graphopt.errors import GraphoptError, did_you_mean
from graphopt.exchange.reduce import Exchange, exchange_buffers, exchange_gradients, final_gradients
from graphopt.groups import Group, find_group
from graphopt.pipeline import Changed, Numerics, Pass, PassStage
from graphopt.program import Phase, Program, info
from graphopt.values import format_bytes, storage_bytes

__all__ = ["DataParallel"]

_ORIGIN = "data-parallel"
_MIB = 2**20

_BUFFERS = {
    "broadcast": "every rank gets those of rank 0",
    "mean": "every rank gets their mean",
    "local": "each rank keeps its own",
}


@final
@dataclass(frozen=True)
class DataParallel(Pass):
    """Replace each parameter's gradient by its mean over the ranks of a group.

    Gradients are packed into buckets in the order in which backward makes them final; a bucket's all-reduce starts as
    soon as the bucket is complete, while backward goes on, and is waited for where the update (or the end of a drop-in
    backward) first needs it. In a whole step with ``accumulate(n)``, gradients are exchanged once, when all batches are
    in; a drop-in model exchanges at every backward.

    Every rank has to capture the same program: what is exchanged is compared before the first step. Rank 0 gives its
    parameters and buffers to the others before that, and from then on they stay equal on all ranks. With two ranks the
    sums are those of ``DistributedDataParallel`` to the last bit; with more, gloo and NCCL may add in another order in
    buckets of other sizes.

    Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020 (arXiv 2006.15704).

    Args:
        bucket_mb: a bucket is closed by the gradient that takes it to so many MiB; 0 exchanges each on its own.
        first_bucket_mb: the same of the first bucket, which begins the exchange early.
        group: name of the process group (``group.group_name``); empty for the default group.
        buffers: what becomes of buffers that forward updates (BatchNorm's statistics): ``broadcast`` gives every rank
            those of rank 0, ``mean`` their mean, ``local`` leaves each rank its own.
        broadcast: whether rank 0 gives its parameters and buffers to the others before the first step.

    Raises:
        GraphoptError: where torch.distributed is not initialised, and where there is no such group.
    """

    name: ClassVar[str] = "data-parallel"
    stage: ClassVar[PassStage] = "joint"
    also: ClassVar[tuple[PassStage, ...]] = ("step",)
    numerics: ClassVar[Numerics] = "changes"

    bucket_mb: float = 32.0
    first_bucket_mb: float = 1.0
    group: str = ""
    buffers: str = "broadcast"
    broadcast: bool = True

    def __post_init__(self) -> None:
        for name in ("bucket_mb", "first_bucket_mb"):
            if getattr(self, name) < 0:
                raise GraphoptError(f"{name} is a number of MiB of at least 0, got {getattr(self, name)}")
        if self.buffers not in _BUFFERS:
            raise GraphoptError(
                f"buffers is one of {', '.join(_BUFFERS)}, got {self.buffers!r}{did_you_mean(self.buffers, _BUFFERS)}"
            )

    def prepare(self, model: nn.Module) -> None:
        """Give every rank the parameters and buffers of rank 0."""
        group = find_group(self.group)
        if self.broadcast and group.size > 1:
            with torch.no_grad():
                for tensor in (*model.parameters(), *model.buffers()):
                    dist.broadcast(tensor.detach(), group_src=0, group=group.handle)

    def concerns(self, program: Program) -> bool:
        """In a whole step the gradients are exchanged at the step stage, when all batches are in."""
        return program.stage == "step" or program.lower is None

    def apply(self, program: Program) -> Changed:
        """See the class; rewrites the step program, or the joint program of a drop-in model."""
        if any(info(node).origin.startswith(_ORIGIN) for node in program.phase_nodes(Phase.SYNC)):
            return Changed(reason="the gradients of this program are exchanged already")
        group = find_group(self.group)
        if group.size == 1:
            return Changed(reason=f"the group {group.name!r} has one process")
        gradients = final_gradients(program)
        if not gradients:
            return Changed(reason="no parameter gets a gradient")
        done = exchange_gradients(
            program, gradients, group,
            limit=int(self.bucket_mb * _MIB), first=int(self.first_bucket_mb * _MIB), origin=_ORIGIN,
        )  # fmt: skip
        names = []
        if self.buffers != "local":
            names = exchange_buffers(program, group, cast(Any, self.buffers), _ORIGIN)
        changed = _report(done, len(gradients), group)
        more = (f"{len(names)} buffers: {_BUFFERS[self.buffers]}",) if names else ()
        return replace(changed, counts={**changed.counts, "buffers": len(names)}, lines=(*changed.lines, *more))


def _report(done: list[Exchange], count: int, group: Group) -> Changed:
    total = sum(storage_bytes(exchange.start.meta["val"]) for exchange in done)
    line = (
        f"{count} all-reduces -> {len(done)}: {format_bytes(total)} per step and rank over the {group.size} ranks of "
        f"the group {group.name!r}"
    )
    sizes = ", ".join(format_bytes(storage_bytes(exchange.start.meta["val"])) for exchange in done)
    return Changed(
        counts={"gradients exchanged": count, "all-reduces": len(done)},
        lines=(line, f"buckets in the order in which they start: {sizes}"),
    )
