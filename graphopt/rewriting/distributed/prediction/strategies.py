"""Ways to exchange gradients as they are, or parameters; and the messages that each of them sends."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from graphopt.errors import GraphoptError
from graphopt.rewriting.distributed.dense.buckets import Item, pack
from graphopt.rewriting.distributed.outer_step import OUTER_BUCKET, sent_bytes
from graphopt.rewriting.distributed.prediction import volume
from graphopt.rewriting.distributed.prediction.link import Reach
from graphopt.rewriting.distributed.prediction.step_timeline import Message, Messages
from graphopt.rewriting.distributed.prediction.volume import Gradient
from graphopt.rewriting.distributed.prediction.workload import Workload

__all__ = [
    "Dense",
    "Local",
    "Messages",
    "Outer",
    "Sharded",
    "ShardedParameters",
    "Strategy",
    "buffer_messages",
    "dense_message",
    "ready_of",
]

_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Strategy(abc.ABC):
    """A way to exchange gradients; subclasses are frozen dataclasses.

    Class attributes:
        drop_in: whether its pass takes a drop-in model; else it needs a whole step.

    Args:
        bucket_mb: gradients travel in buckets; each is closed by the gradient that takes it to so many MiB. With 0 each
            gradient travels on its own.
        first_bucket_mb: the same of the first bucket.
    """

    drop_in: ClassVar[bool] = False

    bucket_mb: float = 32.0
    first_bucket_mb: float = 1.0

    @property
    @abc.abstractmethod
    def label(self) -> str:
        """What it is called in a table."""

    @property
    @abc.abstractmethod
    def by(self) -> str:
        """The pass that does it, as a user writes it."""

    @property
    @abc.abstractmethod
    def effect(self) -> str:
        """What it does to training, in a sentence."""

    @abc.abstractmethod
    def messages(self, workload: Workload, ranks: int) -> Messages:
        """What is sent in a step of ``workload`` with so many ranks."""

    def buckets(self, gradients: Sequence[Gradient]) -> list[list[Gradient]]:
        """Gradients in buckets, as ``DataParallel`` packs them."""
        return packed(gradients, int(self.bucket_mb * _MIB), int(self.first_bucket_mb * _MIB))

    def widest(self, workload: Workload) -> int:
        """Bytes of the largest bucket of gradients as they are; passes that pack again take it as their limit."""
        return max(sum(gradient.bytes for gradient in bucket) for bucket in self.buckets(workload.gradients))


@dataclass(frozen=True)
class Dense(Strategy):
    """All-reduces of all elements, as ``DataParallel`` starts them.

    Args:
        wire: the dtype in which floating-point elements travel where it is smaller; None for their own.
    """

    drop_in: ClassVar[bool] = True

    wire: torch.dtype | None = None

    @property
    def label(self) -> str:
        """See the base class."""
        if self.wire is not None:
            return str(self.wire).removeprefix("torch.")
        return "dense, fused" if self.bucket_mb else "dense, per tensor"

    @property
    def by(self) -> str:
        """See the base class."""
        if self.wire is not None:
            return f'CompressGradients("{_SHORT.get(self.wire, self.label)}")'
        return "DataParallel()" if self.bucket_mb else "DataParallel(bucket_mb=0)"

    @property
    def effect(self) -> str:
        """See the base class."""
        if self.wire is not None:
            return f"gradients are rounded to {self.label} before they are added up"
        return "every rank gets the mean of all gradients, as with one process and all batches"

    def messages(self, workload: Workload, ranks: int) -> Messages:
        """See the base class."""
        beside = [dense_message(group, workload, ranks, self.wire) for group in self.buckets(workload.gradients)]
        return Messages((*buffer_messages(workload, ranks), *beside))


_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Sharded(Strategy):
    """Each rank gets a piece of the summed gradients, updates its piece of the parameters and gives it to the others.

    ``ShardOptimizer``: stage 1 of Rajbhandari et al., "ZeRO", SC 2020 (arXiv 1910.02054). The bytes are those of dense
    exchange; the half of them that follows the update cannot be hidden, but each rank runs a part of the update only.
    On a CPU the gradients travel around a ring of our own, since gloo makes a reduce-scatter of an all-reduce.

    Args:
        host_ranks: of each host, which have all pieces between them, while hosts have the same and add them up (hybrid
            sharding: Zhao et al., "PyTorch FSDP", VLDB 2023); 0 where all ranks share one set of pieces.
    """

    host_ranks: int = 0

    @property
    def label(self) -> str:
        """See the base class."""
        return f"sharded update{self._where}"

    @property
    def by(self) -> str:
        """See the base class."""
        return f"ShardOptimizer({self._groups})"

    @property
    def _where(self) -> str:
        return ", in each host" if self.host_ranks else ""

    @property
    def _groups(self) -> str:
        return 'group="host", replicas="hosts"' if self.host_ranks else ""

    @property
    def effect(self) -> str:
        """See the base class."""
        return "every rank holds the optimizer's state of its piece only; training is that of dense exchange"

    def messages(self, workload: Workload, ranks: int) -> Messages:
        """See the base class."""
        copy, (holders, reach) = workload.rates.copy, self._holders(ranks)
        beside, late = buffer_messages(workload, ranks), []
        for group in self.buckets(workload.gradients):
            size, values = sum(g.bytes for g in group), sum(g.parameter_bytes for g in group)
            scattered = volume.reduce_scatter(size, holders, reach)
            beside.append(Message(scattered, ready_of(group), before=4 * size * copy))
            if holders < ranks:
                summed = volume.all_reduce(size / holders, ranks // holders, "hosts")
                beside.append(Message(summed, ready_of(group)))
            late.append(Message(volume.all_gather(values / holders, holders, reach), after=2 * values * copy))
        return Messages(tuple(beside), late=tuple(late), update=1.0 / holders)

    def _holders(self, ranks: int) -> tuple[int, Reach]:
        """How many ranks have all pieces between them, and where they are."""
        return (self.host_ranks, "host") if 0 < self.host_ranks < ranks else (ranks, "all")


@dataclass(frozen=True)
class ShardedParameters(Sharded):
    """The same where each rank keeps a piece of the parameters only, and gathers each in front of what reads it.

    ``ShardParameters``: stage 3 of ZeRO, with each parameter gathered once in forward and once in backward, two ahead.
    Frozen parameters are not counted.

    Args:
        min_bytes: parameters with fewer bytes stay whole, and are gathered behind the update.
        stay: parameters stay from forward to backward, and are gathered once (``keep=``, or a budget with room).
    """

    min_bytes: int = 65_536
    stay: bool = False

    @property
    def label(self) -> str:
        """See the base class."""
        return f"sharded parameters{', that stay' if self.stay else ''}{self._where}"

    @property
    def by(self) -> str:
        """See the base class."""
        arguments = [self._groups, 'keep="1TB"' if self.stay else ""]
        return f"ShardParameters({', '.join(filter(None, arguments))})"

    @property
    def effect(self) -> str:
        """See the base class."""
        held = "parameters between steps" if self.stay else "parameters"
        return f"every rank holds its piece of {held} and optimizer's state only; training is that of dense exchange"

    def messages(self, workload: Workload, ranks: int) -> Messages:
        """See the base class."""
        found = super().messages(workload, ranks)
        holders, reach = self._holders(ranks)
        gathered = [g for g in workload.gradients if g.parameter_bytes >= self.min_bytes]
        visits = sorted((read, g.parameter_bytes) for g in gathered for read in (g.reads[:1] if self.stay else g.reads))
        starts = [0.0, 0.0, *(read for read, _ in visits)]
        gathers = [
            Message(volume.all_gather(size / holders, holders, reach), start, needed=read)
            for (read, size), start in zip(visits, starts, strict=False)
        ]
        whole = sum(g.parameter_bytes for g in workload.gradients if g.parameter_bytes < self.min_bytes)
        late = Message(volume.all_gather(whole / holders, holders, reach), after=2 * whole * workload.rates.copy)
        return replace(found, beside=(*found.beside, *gathers), late=(late,) if whole else ())


@dataclass(frozen=True)
class Local(Strategy):
    """Every rank trains on its own; parameters become their mean after every ``k_steps`` steps, as by ``LocalSGD``.

    They travel behind the update, in buckets as large as the largest of the gradients' and in the order of the
    program's parameters; buffers that forward updates travel in the same steps.

    Source: Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019 (arXiv 1805.09767).

    Args:
        k_steps: 1 or more.
    """

    k_steps: int = 8

    def __post_init__(self) -> None:
        if self.k_steps < 1:
            raise GraphoptError(f"k_steps is a number of steps of at least 1, got {self.k_steps}")

    @property
    def label(self) -> str:
        """See the base class."""
        return f"local SGD, k = {self.k_steps}"

    @property
    def by(self) -> str:
        """See the base class."""
        return f"LocalSGD(k_steps={self.k_steps})"

    @property
    def effect(self) -> str:
        """See the base class."""
        return "the ranks' parameters differ between averagings, and longer intervals cost accuracy: compare the loss"

    def messages(self, workload: Workload, ranks: int) -> Messages:
        """See the base class."""
        copy = workload.rates.copy
        items = [Item(g.name, g.parameter_bytes, g.order, g.key) for g in workload.gradients]
        sizes = [bucket.bytes for bucket in pack(items, self.widest(workload))]
        late = [
            Message(volume.all_reduce(size, ranks), before=4 * size * copy, after=2 * size * copy) for size in sizes
        ]
        return Messages(tuple(buffer_messages(workload, ranks)), tuple(late), period=self.k_steps)


@dataclass(frozen=True)
class Outer(Strategy):
    """Every rank trains on its own, and takes an outer step with the others after every ``every`` steps (``DiLoCo``).

    Pseudo-gradients travel behind the update, in messages of 32 MiB and in the order of the program's parameters. All
    fragments count as sent at once: the bytes of a long run are the same. A delay, which hides seconds, is not counted.

    Source: Douillard et al., "DiLoCo", 2023 (arXiv 2311.08105).

    Args:
        every: 1 or more.
        bits: of each element: 32 for its own dtype, 16, 8 or 4.
        sparsity: share of the elements that is not sent.
    """

    every: int = 100
    bits: int = 32
    sparsity: float = 0.0

    def __post_init__(self) -> None:
        if self.every < 1:
            raise GraphoptError(f"every is a number of steps of at least 1, got {self.every}")

    @property
    def label(self) -> str:
        """See the base class."""
        sparse = f", {1 - self.sparsity:.3%}".rstrip("%").rstrip("0").rstrip(".") + " %" if self.sparsity else ""
        return f"DiLoCo, every {self.every}{f', {self.bits} bits' if self.bits < 32 else ''}{sparse}"

    @property
    def by(self) -> str:
        """See the base class."""
        bits, sparsity = f", bits={self.bits}" * (self.bits < 32), f", sparsity={self.sparsity}" * bool(self.sparsity)
        return f"DiLoCo(every={self.every}{bits}{sparsity})"

    @property
    def effect(self) -> str:
        """See the base class."""
        return "the ranks' parameters differ between outer steps, which are steps of their own: compare the loss"

    def messages(self, workload: Workload, ranks: int) -> Messages:
        """See the base class."""
        copy, found = workload.rates.copy, list[Message]()
        named = {gradient.name: gradient for gradient in workload.gradients}
        items = [Item(g.name, g.parameter_bytes, g.order, g.key) for g in workload.gradients]
        for bucket in pack(items, OUTER_BUCKET):
            group = [named[item.name] for item in bucket.items]
            itemsize = group[0].parameter_bytes // max(1, group[0].numel)
            sent = sent_bytes([gradient.numel for gradient in group], itemsize, self.bits, self.sparsity)
            gathers = self.bits < 16 or self.sparsity
            crossing = volume.all_gather(sent, ranks) if gathers else volume.all_reduce(sent, ranks)
            arrived = ranks * sent if gathers else sent
            # before: differences are made, copied together and divided; after: momentum, common and own parameters
            before, after = (7 * bucket.bytes + sent) * copy, (13 * bucket.bytes + arrived) * copy
            found.append(Message(crossing, before=before, after=after))
        return Messages(tuple(buffer_messages(workload, ranks)), tuple(found), period=self.every)


# --- shared ----------------------------------------------------------------------------------------------------------


def packed(gradients: Sequence[Gradient], limit: int, first: int | None = None) -> list[list[Gradient]]:
    """Gradients in buckets, in the order in which they are ready.

    Args:
        gradients: in any order.
        limit: bytes that close a bucket.
        first: bytes that close the first one; None for ``limit``.
    """
    items = [Item(gradient.name, gradient.bytes, gradient.place, gradient.key) for gradient in gradients]
    named = {gradient.name: gradient for gradient in gradients}
    return [[named[item.name] for item in bucket.items] for bucket in pack(items, limit, first)]


def dense_message(
    group: Sequence[Gradient], workload: Workload, ranks: int, wire: torch.dtype | None = None
) -> Message:
    """The all-reduce of a bucket, whose gradients are copied into one tensor, cast where that is smaller, and divided.

    Args:
        group: the bucket: gradients of one dtype.
        workload: whose rates hold.
        ranks: that take part.
        wire: the dtype in which they travel where it is smaller.
    """
    copy, size = workload.rates.copy, sum(gradient.bytes for gradient in group)
    if wire is None or wire.itemsize >= group[0].dtype.itemsize:
        return Message(volume.all_reduce(size, ranks), ready_of(group), before=4 * size * copy)
    sent = sum(gradient.numel for gradient in group) * wire.itemsize
    # before: copied together, read and written in the smaller dtype, divided; after: read and written as it was
    return Message(
        volume.all_reduce(sent, ranks), ready_of(group), before=3 * (size + sent) * copy, after=(size + sent) * copy
    )


def ready_of(group: Sequence[Gradient]) -> float:
    """When the last of some gradients is final, in seconds of computation."""
    return max(gradient.ready for gradient in group)


def buffer_messages(workload: Workload, ranks: int) -> list[Message]:
    """What rank 0 gives to the others at the end of forward: the buffers that forward updates."""
    return [
        Message(volume.broadcast(size, ranks), workload.forward, before=2 * size * workload.rates.copy)
        for size in workload.buffers
    ]
