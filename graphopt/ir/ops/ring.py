"""Collectives over gloo that go around a ring: each rank sends to the next one and receives from the one before.

Every rank has to pass on what it has received, so a thread does it (``exchange_thread``). A link then carries one
steady flow each way, where messages from all ranks at once would meet in it: with four ranks at 100 Mbit/s a whole step
of ``ShardOptimizer`` takes 0.96 times as long as one of DistributedDataParallel, and took 1.21 times
(``tests/benchmarks/exchange.py``). Messages are cut into pieces (``point_to_point``), each passed on when it
is there.

Source of the two: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
"""

from __future__ import annotations

from typing import Any

import torch

from graphopt import _torch
from graphopt.ir.ops.exchange_thread import in_background
from graphopt.ir.ops.groups import Group
from graphopt.ir.ops.point_to_point import in_pieces

__all__ = ["start_all_gather", "start_reduce_scatter"]

_TAG = 0x68
"""Tells these messages from others in the same group; they arrive in the order of sending."""


class _Neighbours:
    """The rank that this one sends to, and the one that it receives from."""

    def __init__(self, group: Group) -> None:
        self._group = group.handle
        self._next, self._before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        self._sending: list[Any] = []

    def receive(self, piece: torch.Tensor) -> Any:
        """Begin to receive; the result's ``wait`` ends when it is there."""
        return _torch.start_receiving(self._group, piece, self._before, _TAG)

    def send(self, piece: torch.Tensor) -> None:
        """Begin to send."""
        self._sending.append(_torch.start_sending(self._group, piece, self._next, _TAG))

    def finish(self) -> None:
        """Wait until everything has been sent."""
        for work in self._sending:
            work.wait()


def start_reduce_scatter(input: torch.Tensor, result: torch.Tensor, group: Group) -> None:
    """Begin to sum part ``i`` of all ranks' inputs for rank ``i``; ``wait_tensor(result)`` waits.

    Args:
        input: contiguous, of ``group.size`` equal parts of dimension 0; holds partial sums afterwards.
        result: contiguous, of the size of a part.
        group: all of whose ranks do the same.
    """
    parts = input.detach().chunk(group.size)

    def run() -> None:
        ring, arriving = _Neighbours(group), in_pieces(result)
        works = [ring.receive(piece) for piece in arriving]
        for piece in in_pieces(parts[group.rank - 1]):
            ring.send(piece)
        for step in range(2, group.size + 1):
            mine = in_pieces(parts[(group.rank - step) % group.size])
            for number, (came, own) in enumerate(zip(arriving, mine, strict=True)):
                works[number].wait()
                if step == group.size:
                    came.add_(own)
                    continue
                own.add_(came)
                works[number] = ring.receive(came)
                ring.send(own)
        ring.finish()

    in_background(run, result)


def start_all_gather(result: torch.Tensor, group: Group) -> None:
    """Begin to gather the parts of all ranks; ``wait_tensor(result)`` waits.

    Args:
        result: contiguous, of ``group.size`` equal parts of dimension 0, of which this rank's own is there.
        group: all of whose ranks do the same.
    """
    parts = [in_pieces(part) for part in result.detach().chunk(group.size)]

    def run() -> None:
        ring = _Neighbours(group)
        others = [parts[(group.rank - step) % group.size] for step in range(1, group.size)]
        works = [[ring.receive(piece) for piece in part] for part in others]
        for piece in parts[group.rank]:
            ring.send(piece)
        for number, part in enumerate(others):
            for piece, work in zip(part, works[number], strict=True):
                work.wait()
                if number < group.size - 2:
                    ring.send(piece)
        ring.finish()

    in_background(run, result)
