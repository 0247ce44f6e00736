"""Buckets: gradients that are exchanged together, in the order in which backward makes them final. Plain data.

A small first bucket lets the exchange begin early, while backward still computes; the others are as large as their
limit, so that few exchanges are started. Gradients of different dtypes, devices or groups never share a bucket.

Source: Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020
(arXiv 2006.15704).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

__all__ = ["Bucket", "BucketSizes", "Item", "pack"]


@dataclass(frozen=True, slots=True)
class Item:
    """One gradient.

    Attributes:
        name: of its parameter.
        bytes: that travel.
        ready: when it is final; of any unit that grows with time (the index of the call that makes it).
        key: only items of equal keys can travel together (group, dtype, device).
    """

    name: str
    bytes: int
    ready: int
    key: Hashable = None


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that travel together.

    Attributes:
        items: in the order in which they are ready.
    """

    items: tuple[Item, ...]

    @property
    def bytes(self) -> int:
        """That travel."""
        return sum(item.bytes for item in self.items)

    @property
    def ready(self) -> int:
        """When the last of its gradients is final."""
        return max(item.ready for item in self.items)


@dataclass(frozen=True, slots=True)
class BucketSizes:
    """How large buckets become.

    Attributes:
        limit: bytes that close a bucket; with 0 every gradient travels on its own.
        first: bytes that close the first bucket; None for ``limit``.
    """

    limit: int
    first: int | None = None


def pack(items: Sequence[Item], limit: int, first: int | None = None) -> list[Bucket]:
    """Pack gradients into buckets in the order in which they become ready.

    A bucket is closed by the gradient that takes it to its limit or beyond, as in torch's own data parallelism. Every
    gradient is in exactly one bucket.

    Args:
        items: in any order; equal times keep the given order.
        limit: bytes that close a bucket; with 0 every gradient travels on its own.
        first: bytes that close the first bucket of each key; None for ``limit``.

    Returns:
        buckets, by the time at which they are ready.
    """
    done: list[Bucket] = []
    waiting: dict[Hashable, list[Item]] = {}
    total: dict[Hashable, int] = {}
    closed: set[Hashable] = set()
    for item in sorted(items, key=lambda item: item.ready):
        bucket = waiting.setdefault(item.key, [])
        bucket.append(item)
        most = limit if first is None or item.key in closed else min(first, limit)
        total[item.key] = total.get(item.key, 0) + item.bytes
        if total[item.key] >= most:
            done.append(Bucket(tuple(bucket)))
            closed.add(item.key)
            bucket.clear()
            total[item.key] = 0
    done += [Bucket(tuple(bucket)) for bucket in waiting.values() if bucket]
    return sorted(done, key=lambda bucket: bucket.ready)
