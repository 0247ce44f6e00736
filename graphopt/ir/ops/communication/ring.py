"""Collectives over gloo that go around a ring: each rank sends to the next one and receives from the one before.

Every rank has to pass on what it has received, so a thread does it (``exchange_thread``). A link then carries one
steady flow each way, where messages from all ranks at once would meet in it: with four ranks at 100 Mbit/s a whole step
of ``ShardOptimizer`` takes 0.96 times as long as one of DistributedDataParallel, and took 1.21 times
(``tests/benchmarks/exchange.py``). Messages are cut into pieces (``point_to_point``), each passed on when it
is there.

Source of the two: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.

Exchanges over gloo from rank to rank, in pieces that travel both ways at once.

Gloo's own all-to-all, and every long message, fills a link one way first and then the other: between two ranks, twice
the time that the bytes take. In pieces of half a megabyte, all of which are handed to gloo at once, a link carries both
ways (measured: 2 MiB each way at 100 Mbit/s in 0.18 s in place of 0.35 s). What comes goes straight into the result,
where gloo's all-gather fills a buffer of its own first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from graphopt import _torch
from graphopt.ir.ops.communication.exchange_thread import in_background
from graphopt.ir.ops.communication.groups import Group

__all__ = ["PIECE", "goes_point_to_point", "in_pieces", "start_all_gather", "start_exchange", "start_reduce_scatter"]

_RING_TAG = 0x68
"""Tells these messages from others in the same group; they arrive in the order of sending."""


class _Neighbours:
    """The rank that this one sends to, and the one that it receives from."""

    def __init__(self, group: Group) -> None:
        self._group = group.handle
        self._next, self._before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        self._sending: list[Any] = []

    def receive(self, piece: torch.Tensor) -> Any:
        """Begin to receive; the result's ``wait`` ends when it is there."""
        return _torch.start_receiving(self._group, piece, self._before, _RING_TAG)

    def send(self, piece: torch.Tensor) -> None:
        """Begin to send."""
        self._sending.append(_torch.start_sending(self._group, piece, self._next, _RING_TAG))

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


PIECE = 1 << 19
"""Bytes of a piece."""

_EXCHANGE_TAG = 0x67
"""Tells these messages from those that the user's code sends in the same group; they arrive in the order of sending."""


def goes_point_to_point(tensor: torch.Tensor, group: Group) -> bool:
    """Whether a tensor is exchanged in this way: one on the CPU, by gloo, which other backends need not."""
    return tensor.device.type == "cpu" and _torch.is_gloo(group.handle, tensor.device)


def start_exchange(
    outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], group: Group, result: torch.Tensor
) -> None:
    """Begin to send a tensor to every other rank, and to receive one from each; ``wait_tensor(result)`` waits.

    Args:
        outgoing: contiguous, by the rank that gets it; this rank's own is not sent. Not to be written to meanwhile.
        incoming: contiguous, by the rank that it comes from; parts of ``result``, as long as what that rank sends.
        group: all of whose ranks do the same.
        result: what is waited for.
    """
    others = [((group.rank - away) % group.size, (group.rank + away) % group.size) for away in range(1, group.size)]
    pairs = [(in_pieces(incoming[source]), source, in_pieces(outgoing[target]), target) for source, target in others]
    most = max((max(len(arriving), len(leaving)) for arriving, _, leaving, _ in pairs), default=0)
    for number in range(most):
        for arriving, source, leaving, target in pairs:
            if number < len(arriving):
                _torch.wait_with(result, _torch.start_receiving(group.handle, arriving[number], source, _EXCHANGE_TAG))
            if number < len(leaving):
                _torch.wait_with(result, _torch.start_sending(group.handle, leaving[number], target, _EXCHANGE_TAG))


def in_pieces(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """A contiguous tensor in pieces, one after the other; none of one without elements."""
    flat = tensor.view(-1)
    if flat.is_floating_point() and flat.element_size() == 1:  # gloo knows no dtype of 8 bits but integers
        flat = flat.view(torch.uint8)
    return torch.split(flat, max(1, PIECE // flat.element_size())) if flat.numel() else ()
