"""Outer steps of DiLoCo: ranks exchange how far their parameters have gone, and go on from a common place.

Every rank keeps the parameters that all had at the last outer step (``global``). The difference between these and its
own is its pseudo-gradient. The mean of these over the ranks is the gradient of an outer step of SGD with Nesterov
momentum on the common parameters, and the rank's own become a mix of what they are and what comes of it.

Parameters are divided into fragments, each of which has outer steps of its own. The exchange of a fragment may be under
way while the next inner steps compute: it is then started in one run of a program and awaited in a later one, in memory
that is kept between the two (``sent``).

Source: Douillard et al., "DiLoCo", 2023 (arXiv 2311.08105); Douillard et al., "Streaming DiLoCo with overlapping
communication", 2025 (arXiv 2501.18512); Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025
(arXiv 2508.15706), algorithm 1, for ``sparsity``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphopt.errors import GraphoptError
from graphopt.ir.node import Phase, value_of
from graphopt.ir.ops.communication.collectives import ALL_GATHER, ALL_REDUCE, GATHER_INTO, WAIT
from graphopt.ir.ops.communication.groups import Group
from graphopt.ir.ops.communication.residual import clear_at_, keep_rest_
from graphopt.ir.ops.communication.selection import select
from graphopt.ir.ops.communication.sparse import pack as pack_entries
from graphopt.ir.ops.communication.sparse import packed_bytes, sum_sparse, to_wire
from graphopt.ir.ops.storage.quantize import dequantize, quantize, quantized_bytes
from graphopt.ir.ops.values import storage_bytes
from graphopt.ir.program import Program
from graphopt.ir.state import PassState
from graphopt.rewriting.distributed.dense.buckets import Item, pack
from graphopt.rewriting.distributed.parameter_average import behind_update, updated_parameters
from graphopt.rewriting.distributed.sparse.sparse_exchange import entries

__all__ = ["OUTER_BUCKET", "OuterSettings", "OuterStep", "common_parameter", "fragments_of", "sent_bytes"]

aten = torch.ops.aten

OUTER_BUCKET = 32 * 2**20
"""Bytes of parameters that close a message: the same in all programs of a step, which share what is under way."""

_GROUP = 256
"""Elements that share a smallest value and a step where pseudo-gradients travel in 8 or 4 bits."""


@dataclass(frozen=True, slots=True)
class OuterSettings:
    """How ranks take an outer step.

    Attributes:
        lr: of the outer step.
        momentum: of the outer step (Nesterov); 0 for none.
        mix: the share of the common parameters in what a rank's own become; the rest stays as it is.
        bits: in which each element travels: 32 (its own dtype), 16 (bfloat16), 8 or 4.
        sparsity: share of the elements that is not sent, and waits in a residual; 0 sends all.
        error_decay: what is left of a residual when the next pseudo-gradient is added to it.
        delayed: whether an exchange is awaited in a later run than the one that starts it.
    """

    lr: float
    momentum: float
    mix: float
    bits: int
    sparsity: float
    error_decay: float
    delayed: bool


def common_parameter(origin: str, name: str) -> str:
    """The name of the state that a pass has of a parameter as all ranks had it at its last outer step."""
    return f"{origin}/global/{name}"


def fragments_of(sizes: Sequence[tuple[str, int]], number: int) -> list[list[str]]:
    """Parameters in fragments of about the same bytes, each of neighbours.

    Args:
        sizes: names and bytes, in the order of the model.
        number: of fragments.

    Raises:
        GraphoptError: where there are fewer parameters.

    Example:
        >>> fragments_of([("a", 4), ("b", 1), ("c", 1), ("d", 2)], 2)
        [['a'], ['b', 'c', 'd']]
    """
    if number > len(sizes):
        raise GraphoptError(
            f"fragments={number} is more than there are: {len(sizes)} parameters are trained, and a fragment has one "
            f"at least; give fragments={len(sizes)} or fewer"
        )
    total, done, found = sum(size for _, size in sizes), 0, list[list[str]]()
    for place, (name, size) in enumerate(sizes):
        middle = int((done + size / 2) * number / total) if total else 0
        left = len(sizes) - place
        here = min(max(len(found) - 1, middle), number - 1)
        if not found or len(found) <= here or number - len(found) == left:
            found.append([])
        found[-1].append(name)
        done += size
    return found


def sent_bytes(counts: Sequence[int], itemsize: int, bits: int, sparsity: float) -> int:
    """Bytes that a rank puts into the exchange of some parameters.

    Args:
        counts: elements of each.
        itemsize: bytes of an element.
        bits: as of ``OuterSettings``.
        sparsity: likewise.
    """
    if sparsity:
        return packed_bytes([entries(count, sparsity) for count in counts], _wire_of(itemsize, bits))
    if bits < 16:
        return quantized_bytes(sum(counts), bits, _GROUP)
    return sum(counts) * min(itemsize, bits // 8)


def _wire_of(itemsize: int, bits: int) -> torch.dtype:
    """The dtype in which entries of a sparse exchange travel."""
    if bits == 16 or itemsize == 2:
        return torch.bfloat16
    return torch.float64 if itemsize == 8 else torch.float32


@dataclass(frozen=True, slots=True)
class _Message:
    """Parameters of one dtype and device that travel together."""

    number: int
    names: tuple[str, ...]


class OuterStep:
    """Puts the parts of outer steps behind the update of a program, and what is kept for them into it.

    Args:
        program: of stage step, whose gradients are not exchanged.
        group: at least two ranks.
        settings: how outer steps are taken.
        number: of fragments.
        origin: the pass that asks.

    Attributes:
        fragments: the names of their parameters.
    """

    def __init__(self, program: Program, group: Group, settings: OuterSettings, number: int, origin: str) -> None:
        self._program, self._group, self._settings, self._origin = program, group, settings, origin
        updated = updated_parameters(program)
        self._parameters = {name: node for name, node in updated.items() if value_of(node).numel()}
        sizes = [(name, storage_bytes(value_of(node))) for name, node in self._parameters.items()]
        self.fragments = fragments_of(sizes, number)
        self._place = behind_update(program, set(self._parameters.values()))
        self._messages = self._packed()
        for name in self._parameters:  # in every program, so that each is known to run beside all of it
            self._global(name)
            self._momentum(name)
            self._residual(name)
        if settings.delayed:
            for message in (message for fragment in self._messages for message in fragment):
                self._kept(message)
        if settings.bits < 16:
            self._seed()

    def bytes_of(self, fragment: int) -> int:
        """That a rank puts into the exchange of a fragment."""
        settings = self._settings
        return sum(
            sent_bytes(self._counts(message), self._dtype(message).itemsize, settings.bits, settings.sparsity)
            for message in self._messages[fragment]
        )

    def send(self, fragment: int) -> list[fx.Node]:
        """Start to exchange a fragment's pseudo-gradients; gives what ``merge`` waits for, if in the same program."""
        started = [self._send(message) for message in self._messages[fragment]]
        if self._settings.bits < 16:
            self._call(aten.add_.Tensor, (self._seed(), 1))
        return started

    def merge(self, fragment: int, started: Sequence[fx.Node] = ()) -> None:
        """Take the outer step of a fragment with what has arrived.

        Args:
            fragment: its number.
            started: from ``send``; empty where an earlier program has sent it.
        """
        messages = self._messages[fragment]
        for message, source in zip(messages, started or [self._kept(m) for m in messages], strict=True):
            arrived = self._call(WAIT, (source,), hint="exchanged")
            for name, mean in zip(message.names, self._means(message, arrived), strict=True):
                self._step(name, mean)

    # --- what is kept ------------------------------------------------------------------------------------------------

    def _global(self, name: str) -> fx.Node:
        """The parameter as all ranks had it at its last outer step."""
        value = value_of(self._parameters[name])
        state = PassState(tuple(value.shape), value.dtype, value.device, source=name)
        return self._program.add_state(common_parameter(self._origin, name), state)

    def _momentum(self, name: str) -> fx.Node | None:
        """The momentum of the outer step."""
        if not self._settings.momentum:
            return None
        value = value_of(self._parameters[name])
        return self._program.add_state(
            f"{self._origin}/momentum/{name}", PassState(tuple(value.shape), value.dtype, value.device)
        )

    def _residual(self, name: str) -> fx.Node | None:
        """What this rank has not sent of a parameter, flat."""
        if not self._settings.sparsity:
            return None
        value = value_of(self._parameters[name])
        dtype = torch.float64 if value.dtype is torch.float64 else torch.float32
        return self._program.add_state(
            f"{self._origin}/residual/{name}", PassState((value.numel(),), dtype, value.device, local=True)
        )

    def _kept(self, message: _Message) -> fx.Node:
        """What is under way between two runs of programs."""
        dtype, size = self._dtype(message), sum(self._counts(message))
        if self._gathers:
            dtype, size = torch.uint8, self._group.size * self._sent(message)
        elif self._settings.bits == 16 and dtype.itemsize > 2:
            dtype = torch.bfloat16
        device = value_of(self._parameters[message.names[0]]).device
        return self._program.add_state(f"{self._origin}/sent/{message.names[0]}", PassState((size,), dtype, device))

    def _seed(self) -> fx.Node:
        """How many exchanges there were, by which rounding differs from one to the next."""
        return self._program.add_state(f"{self._origin}/rounds", PassState((), torch.int64, torch.device("cpu")))

    # --- exchanges ---------------------------------------------------------------------------------------------------

    @property
    def _gathers(self) -> bool:
        """Whether every rank gets what all have sent, and adds it up by itself."""
        return bool(self._settings.sparsity) or self._settings.bits < 16

    def _send(self, message: _Message) -> fx.Node:
        settings = self._settings
        flats = [self._difference(name) for name in message.names]
        if settings.sparsity:
            chosen = [self._chosen(name, flat) for name, flat in zip(message.names, flats, strict=True)]
            indices, values = [found[0] for found in chosen], [found[1] for found in chosen]
            return self._gather(message, self._call(pack_entries, (indices, values, self._wire(message))))
        joined = self._call(aten.cat.default, (flats,), hint="bucket")
        if settings.bits < 16:
            if self._dtype(message) is torch.float64:
                joined = self._call(aten._to_copy.default, (joined,), {"dtype": torch.float32})
            codes = (joined, self._seed(), message.number, settings.bits, _GROUP, False)
            return self._gather(message, self._call(quantize, codes))
        if settings.bits == 16 and self._dtype(message).itemsize > 2:
            joined = self._call(aten._to_copy.default, (joined,), {"dtype": torch.bfloat16})
        joined = self._call(aten.mul_.Tensor, (joined, 1.0 / self._group.size))
        if settings.delayed:
            kept = self._kept(message)
            self._call(aten.copy_.default, (kept, joined))
            joined = kept
        return self._call(ALL_REDUCE, (joined, "sum", self._group.name), hint="all_reduce")

    def _gather(self, message: _Message, packed: fx.Node) -> fx.Node:
        if not self._settings.delayed:
            return self._call(ALL_GATHER, (packed, self._group.size, self._group.name), hint="all_gather")
        kept = self._kept(message)
        self._call(GATHER_INTO, (packed, kept, self._group.size, self._group.name))
        return kept

    def _difference(self, name: str) -> fx.Node:
        """A rank's pseudo-gradient, flat, in the order of its dimensions."""
        own = self._parameters[name]
        made = self._call(aten.sub.Tensor, (self._global(name), own), like=own, hint="pseudo_gradient")
        if not value_of(made).is_contiguous():
            made = self._call(aten.clone.default, (made,), {"memory_format": torch.contiguous_format})
        return self._call(aten.view.default, (made, [value_of(made).numel()]))

    def _chosen(self, name: str, flat: fx.Node) -> tuple[fx.Node, fx.Node]:
        """The entries of a rank's residual that are sent, and taken from it: indices and values."""
        settings, residual = self._settings, self._residual(name)
        assert residual is not None
        if settings.error_decay != 1.0:
            self._call(aten.mul_.Tensor, (residual, settings.error_decay))
        self._call(aten.add_.Tensor, (residual, flat))
        count = entries(value_of(flat).numel(), settings.sparsity)
        chosen = self._call(select, (residual, count), hint="selected")
        indices, values = (self._call(operator.getitem, (chosen, place)) for place in (0, 1))
        wire = _wire_of(value_of(flat).element_size(), settings.bits)
        if wire is value_of(values).dtype:
            self._call(clear_at_, (residual, indices))
            return indices, values
        sent = self._call(to_wire, (values, wire), hint="sent")
        self._call(keep_rest_, (residual, indices, sent))
        return indices, sent

    def _means(self, message: _Message, arrived: fx.Node) -> list[fx.Node]:
        """The mean of the ranks' pseudo-gradients, in the shapes of the parameters."""
        shapes = [list(value_of(self._parameters[name]).shape) for name in message.names]
        if self._settings.sparsity:
            counts, dtype = self._counts(message), self._dtype(message)
            sent = [entries(count, self._settings.sparsity) for count in counts]
            ranks = self._group.size
            arguments = (arrived, ranks, sent, counts, self._wire(message), dtype, 1.0 / ranks)
            sums = self._call(sum_sparse, arguments, hint="sums")
            flats = [self._call(operator.getitem, (sums, place)) for place in range(len(counts))]
            return [self._call(aten.view.default, (flat, shape)) for flat, shape in zip(flats, shapes, strict=True)]
        flat = self._mean_of_codes(message, arrived) if self._settings.bits < 16 else arrived
        if value_of(flat).dtype is not self._dtype(message):
            flat = self._call(aten._to_copy.default, (flat,), {"dtype": self._dtype(message)})
        means, offset = [], 0
        for shape in shapes:
            strides = [math.prod(shape[place + 1 :]) for place in range(len(shape))]
            means.append(self._call(aten.as_strided.default, (flat, shape, strides, offset)))
            offset += math.prod(shape)
        return means

    def _mean_of_codes(self, message: _Message, arrived: fx.Node) -> fx.Node:
        """The mean of what the codes of all ranks stand for, added up in float32 in the order of the ranks."""
        bits, length, size = self._settings.bits, self._sent(message), sum(self._counts(message))
        total: fx.Node | None = None
        for rank in range(self._group.size):
            codes = self._call(aten.slice.Tensor, (arrived, 0, rank * length, (rank + 1) * length))
            values = self._call(dequantize, (codes, bits, _GROUP, False, [size], [1], torch.float32))
            total = values if total is None else self._call(aten.add_.Tensor, (total, values))
        assert total is not None
        return self._call(aten.mul_.Tensor, (total, 1.0 / self._group.size))

    def _step(self, name: str, mean: fx.Node) -> None:
        """The outer step of one parameter: SGD with Nesterov momentum, as ``torch.optim.SGD`` computes it."""
        settings, common, momentum = self._settings, self._global(name), self._momentum(name)
        own = self._parameters[name]
        if momentum is not None:
            self._call(aten.mul_.Tensor, (momentum, settings.momentum))
            self._call(aten.add_.Tensor, (momentum, mean))
            mean = self._call(aten.add.Tensor, (mean, momentum), {"alpha": settings.momentum})
        self._call(aten.add_.Tensor, (common, mean), {"alpha": -settings.lr})
        if settings.mix == 1.0:
            self._call(aten.copy_.default, (own, common), like=own)
        else:
            self._call(aten.lerp_.Scalar, (own, common, settings.mix), like=own)

    # --- shared ------------------------------------------------------------------------------------------------------

    def _call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, **more: Any) -> fx.Node:
        where: dict[str, Any] = {"before": self._place, "phase": Phase.SYNC, "origin": self._origin}
        return self._program.insert(target, args, kwargs, **where, **more)

    def _packed(self) -> list[list[_Message]]:
        """The messages of each fragment."""
        found: list[list[_Message]] = []
        number = 0
        for fragment in self.fragments:
            values = {name: value_of(self._parameters[name]) for name in fragment}
            items = [
                Item(name, storage_bytes(value), place, (value.dtype, value.device))
                for place, (name, value) in enumerate(values.items())
            ]
            buckets = pack(items, OUTER_BUCKET)
            names = [tuple(item.name for item in bucket.items) for bucket in buckets]
            found.append([_Message(number + place, members) for place, members in enumerate(names)])
            number += len(names)
        return found

    def _counts(self, message: _Message) -> list[int]:
        return [value_of(self._parameters[name]).numel() for name in message.names]

    def _dtype(self, message: _Message) -> torch.dtype:
        dtype: torch.dtype = value_of(self._parameters[message.names[0]]).dtype
        return dtype

    def _wire(self, message: _Message) -> torch.dtype:
        return _wire_of(self._dtype(message).itemsize, self._settings.bits)

    def _sent(self, message: _Message) -> int:
        """Bytes that a rank sends."""
        settings = self._settings
        return sent_bytes(self._counts(message), self._dtype(message).itemsize, settings.bits, settings.sparsity)
