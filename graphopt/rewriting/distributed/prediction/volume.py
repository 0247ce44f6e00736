"""What crosses a rank's link: bytes, rounds and messages of each collective and of each way to exchange gradients.

The model, for N ranks and B bytes that each of them puts in:

* all-reduce: 2 (N - 1) / N · B sent and received, as a reduce-scatter and an all-gather of the pieces;
* reduce-scatter and all-gather of pieces of B / N: half of that;
* all-gather of B bytes of each rank: (N - 1) · B sent and received. Every rank has to get what all others put in, and
  somebody sends each byte that somebody gets: it grows with N, whatever the algorithm;
* broadcast of B bytes: B received, and B passed on.

Selected entries travel as 4 bytes of index and a value: with float32, sparse exchange of a share d of the elements
takes fewer bytes than dense exchange while N · d < 1.

Source: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

import torch

from graphopt.rewriting.distributed.prediction.link import Link, Reach

__all__ = [
    "SPARSE_NUMEL",
    "Gradient",
    "Volume",
    "all_gather",
    "all_reduce",
    "broadcast",
    "pays_sparse",
    "reduce_scatter",
]

SPARSE_NUMEL = 16384
"""Gradients of fewer elements are always exchanged densely: the default of ``DeepGradientCompression``."""


@dataclass(frozen=True, slots=True)
class Gradient:
    """One gradient, as far as exchanging it goes.

    Attributes:
        name: of its parameter.
        shape: of its elements, in the order of memory: from the outermost dimension to the innermost.
        dtype: of its elements.
        device: that it is on.
        place: the position in the program of the call that makes it final.
        ready: seconds of computation from the beginning of the step until then.
        parameter_bytes: that its parameter takes.
        order: of its parameter among the program's.
        reads: seconds of computation until the first call of forward that reads its parameter, and until the first of
            backward; fewer where none does.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    place: int
    ready: float
    parameter_bytes: int
    order: int = 0
    reads: tuple[float, ...] = ()

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Of all elements."""
        return self.numel * self.dtype.itemsize

    @property
    def key(self) -> Hashable:
        """Equal for gradients that can travel together."""
        return (self.dtype, self.device)


@dataclass(frozen=True, slots=True)
class Volume:
    """One collective, or several one after the other, as a rank's link sees it.

    Attributes:
        messages: collectives.
        payload: bytes that the rank puts in.
        sent: bytes that leave the rank, those that it passes on included.
        received: bytes that come to it.
        halves: runs through all ranks: 1 for a gather, a scatter or a broadcast, 2 for an all-reduce.
        reach: which ranks take part.
        relayed: whether each byte crosses every link on its way.
    """

    messages: int = 0
    payload: float = 0.0
    sent: float = 0.0
    received: float = 0.0
    halves: int = 0
    reach: Reach = "all"
    relayed: bool = False

    def __add__(self, other: Volume) -> Volume:
        return Volume(
            messages=self.messages + other.messages,
            payload=self.payload + other.payload,
            sent=self.sent + other.sent,
            received=self.received + other.received,
            halves=self.halves + other.halves,
        )

    def seconds(self, link: Link, ranks: int) -> float:
        """How long it takes by itself: the latency of every round, and the larger direction's bytes.

        Args:
            link: of each rank.
            ranks: of all hosts together.
        """
        moved = max(self.sent, self.received)
        return link.seconds(moved, self.halves, ranks, self.reach, relayed=self.relayed)


def all_reduce(size: float, ranks: int, reach: Reach = "all") -> Volume:
    """The sum of ``size`` bytes of each rank, on all of them."""
    moved = 2 * (ranks - 1) / ranks * size
    return Volume(1, size, moved, moved, 2, reach)


def reduce_scatter(size: float, ranks: int, reach: Reach = "all") -> Volume:
    """The sum of ``size`` bytes of each rank, a piece of it on each."""
    moved = (ranks - 1) / ranks * size
    return Volume(1, size, moved, moved, 1, reach)


def all_gather(size: float, ranks: int, reach: Reach = "all") -> Volume:
    """The ``size`` bytes of each rank, on all of them."""
    moved = (ranks - 1) * size
    return Volume(1, size, moved, moved, 1, reach)


def broadcast(size: float, ranks: int) -> Volume:
    """The ``size`` bytes of one rank, on all of them; counted for a rank that gets them and passes them on."""
    moved = size if ranks > 1 else 0.0
    return Volume(1, size, moved, moved, 1, relayed=True)


def pays_sparse(gradient: Gradient, entry_bytes: int, ranks: int) -> bool:
    """Whether a gradient is exchanged sparsely: a large enough matrix or more, and fewer bytes than densely.

    Args:
        gradient: any.
        entry_bytes: that each rank would put in for it: indices and values.
        ranks: that take part; with float32 the rule is ranks · density < 1.
    """
    if gradient.numel < SPARSE_NUMEL or len(gradient.shape) < 2:
        return False
    return (ranks - 1) * entry_bytes < 2 * (ranks - 1) * gradient.bytes // ranks
