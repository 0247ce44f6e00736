"""Data parallelism: every gradient becomes its mean over the ranks, exchanged in fused buckets beside backward."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast, final

import torch
import torch.distributed as dist
from torch import fx, nn

from graphopt.errors import GraphoptError, did_you_mean
from graphopt.ir.names import match_names
from graphopt.ir.node import Phase, value_of
from graphopt.ir.ops.communication.collectives import WAIT
from graphopt.ir.ops.communication.groups import Group, find_group
from graphopt.ir.ops.values import storage_bytes
from graphopt.ir.program import Program
from graphopt.ir.words.written_units import counted, format_bytes
from graphopt.rewriting.distributed.choice.bucket_choice import BucketChoice, choose_buckets
from graphopt.rewriting.distributed.dense.all_reduce import (
    Exchange,
    exchange_buffers,
    exchange_gradients,
    final_gradients,
)
from graphopt.rewriting.pass_ import Changed, Numerics, PassStage
from graphopt.rewriting.training_pass import TrainingPass

__all__ = ["DataParallel"]

_ORIGIN = "data-parallel"
_AUTO, _DEFAULT = "auto", 32.0
_NUMBER = re.compile(r"\d+(\.\d+)?")

_BUFFERS = {
    "broadcast": "every rank gets those of rank 0",
    "mean": "every rank gets their mean",
    "local": "each rank keeps its own",
}


@final
@dataclass(frozen=True)
class DataParallel(TrainingPass):
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
        bucket_mb: a bucket is closed by the gradient that takes it to so many MiB; 0 exchanges each on its own. With
            ``auto`` the ranks measure latency and bandwidth of their link once, and take the size of 0.25 to 128 MiB
            with which the dry run (``graphopt plan --world-size``) expects the fastest step.
        first_bucket_mb: the same of the first bucket, which begins the exchange early.
        group: name of the process group (``group.group_name``), or of a dimension of a ``DeviceMesh``; empty for the
            default group.
        groups: parameters that another group exchanges, as ``GLOB=GROUP`` (``experts.**=7``); of several that match a
            parameter the last one counts.
        buffers: what becomes of buffers that forward updates (BatchNorm's statistics): ``broadcast`` gives every rank
            those of rank 0, ``mean`` their mean, ``local`` leaves each rank its own.
        broadcast: whether rank 0 gives its parameters and buffers to the others before the first step.

    Raises:
        GraphoptError: where torch.distributed is not initialised, and where there is no such group.

    Example:
        >>> str(graphopt.Pipeline([DataParallel(bucket_mb=25.0)]))
        'data-parallel{bucket-mb=25.0}'
    """

    name: ClassVar[str] = "data-parallel"
    stage: ClassVar[PassStage] = "joint"
    also: ClassVar[tuple[PassStage, ...]] = ("step",)
    numerics: ClassVar[Numerics] = "changes"

    bucket_mb: float | str = _DEFAULT
    first_bucket_mb: float = 1.0
    group: str = ""
    groups: tuple[str, ...] = ()
    buffers: str = "broadcast"
    broadcast: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.bucket_mb, str) and self.bucket_mb != _AUTO:
            number = f": write {self.bucket_mb}" if _NUMBER.fullmatch(self.bucket_mb) else ""
            raise GraphoptError(
                f"bucket_mb is a number of MiB of at least 0, or 'auto', got {self.bucket_mb!r}{number}"
            )
        for name in ("bucket_mb", "first_bucket_mb"):
            value = getattr(self, name)
            if value != _AUTO and value < 0:
                raise GraphoptError(f"{name} is a number of MiB of at least 0, got {value}")
        odd = next((entry for entry in self.groups if not all(entry.rpartition("=")[::2])), None)
        if odd is not None:
            raise GraphoptError(f"groups holds entries GLOB=GROUP, such as 'experts.**=7', got {odd!r}")
        if self.buffers not in _BUFFERS:
            raise GraphoptError(
                f"buffers is one of {', '.join(_BUFFERS)}, got {self.buffers!r}{did_you_mean(self.buffers, _BUFFERS)}"
            )

    def prepare(self, model: nn.Module) -> None:
        """Give every rank of a group the parameters of the group's rank 0, and buffers likewise.

        Parameters without memory, of which each rank has a shard, are equal already.
        """
        parameters = dict(model.named_parameters())
        groups = self._groups(parameters)
        if not self.broadcast:
            return
        with torch.no_grad():
            for tensor, group in (
                *((parameters[name], group) for name, group in groups.items()),
                *((buffer, find_group(self.group)) for buffer in model.buffers()),
            ):
                if group.size > 1 and tensor.untyped_storage().nbytes():
                    dist.broadcast(tensor.detach(), group_src=0, group=group.handle)

    def _groups(self, parameters: Mapping[str, Any]) -> dict[str, Group]:
        """The group that exchanges each parameter, by the parameter's name."""
        found = dict.fromkeys(parameters, find_group(self.group))
        for entry in self.groups:
            pattern, _, name = entry.rpartition("=")
            found |= dict.fromkeys(match_names([pattern], parameters, "parameter"), find_group(name))
        return found

    def concerns(self, program: Program) -> bool:
        """In a whole step the gradients are exchanged at the step stage, when all batches are in."""
        return program.stage == "step" or program.lower is None

    def apply(self, program: Program) -> Changed:
        """See the class; rewrites the step program, or the joint program of a drop-in model."""
        if any(node.target is WAIT for node in program.phase_nodes(Phase.SYNC)):
            return Changed(reason="the gradients of this program are exchanged already")
        groups = self._groups({spec.target: node for node, spec in program.inputs_of("parameter")})
        if all(group.size == 1 for group in groups.values()):
            return Changed(reason=f"the group {find_group(self.group).name!r} has one process")
        gradients = {name: node for name, node in final_gradients(program).items() if groups[name].size > 1}
        if not gradients:
            return Changed(reason="no parameter gets a gradient")
        chosen = self._buckets(program, gradients)
        done = exchange_gradients(program, gradients, groups, chosen.sizes, origin=_ORIGIN)
        buffers = self._exchange_buffers(program)
        changed = _report(done, len(gradients))
        more = [chosen.line] if chosen.line else []
        more += [f"{counted(len(buffers), 'buffers')}: {_BUFFERS[self.buffers]}"] if buffers else []
        return replace(changed, counts={**changed.counts, "buffers": len(buffers)}, lines=(*changed.lines, *more))

    def _buckets(self, program: Program, gradients: Mapping[str, fx.Node]) -> BucketChoice:
        """How large buckets become; those of other groups (``groups``) as those of the pass's own."""
        group = find_group(self.group)
        if not isinstance(self.bucket_mb, str):
            return BucketChoice(self.bucket_mb, self.first_bucket_mb)
        if group.size == 1:
            line = f"buckets of {_DEFAULT:g} MiB: the group {group.name!r} has one process, and no link to measure"
            return BucketChoice(_DEFAULT, self.first_bucket_mb, line)
        device = value_of(next(iter(gradients.values()))).device
        return choose_buckets(program, group, device, self.first_bucket_mb)

    def _exchange_buffers(self, program: Program) -> list[str]:
        """The names of the buffers whose new values ranks exchange; none where each rank keeps its own."""
        group = find_group(self.group)
        if self.buffers == "local" or group.size == 1:
            return []
        return exchange_buffers(program, group, cast(Any, self.buffers), _ORIGIN)


def _report(done: list[Exchange], count: int) -> Changed:
    total = sum(storage_bytes(value_of(exchange.start)) for exchange in done)
    groups = {exchange.group.name: exchange.group for exchange in done}
    over = " and ".join(f"the {group.size} ranks of the group {name!r}" for name, group in groups.items())
    line = f"{count} all-reduces -> {len(done)}: {format_bytes(total)} per step and rank over {over}"
    sizes = ", ".join(format_bytes(storage_bytes(value_of(exchange.start))) for exchange in done)
    return Changed(
        counts={"gradients exchanged": count, "all-reduces": len(done)},
        lines=(line, f"buckets in the order in which they start: {sizes}"),
    )
