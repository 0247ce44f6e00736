"""Sparse exchange in a program: gradients accumulated where they are made, the largest entries exchanged.

For each tensor a rank keeps a residual ``v``, and a momentum ``u`` where momentum is corrected, both float32 (float64
for float64) across steps. In a program the part of one tensor is::

    total = sum(gradient)                                  # finite, or this gradient is left out
    graphopt.accumulate_(gradient, u, v, ...)              # behind the gradient, while backward goes on
    indices, values = graphopt.select(v, k)
    graphopt.clear_at_(v, indices); graphopt.clear_at_(u, indices)
    packed = graphopt.pack([indices, ...], [values, ...])  # of all tensors of a bucket
    gathered = all_gather_into_tensor(packed, ranks, group)
    ...
    mean, ... = graphopt.sum_sparse(wait_tensor(gathered), ...)   # in front of the update

Where the update leaves elements without a gradient as they are, it reads the entries that have arrived in place of
dense means (``graphopt.rewriting.distributed.sparse.sparse_update``).

Source: Lin et al., Deep Gradient Compression, ICLR 2018 (arXiv 1712.01887).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from graphopt.ir.node import Phase, value_of
from graphopt.ir.ops.communication.collectives import ALL_GATHER, WAIT
from graphopt.ir.ops.communication.groups import Group
from graphopt.ir.ops.communication.residual import accumulate_, clear_at_, keep_rest_
from graphopt.ir.ops.communication.selection import select
from graphopt.ir.ops.communication.sparse import pack, packed_bytes, sum_sparse, to_wire
from graphopt.ir.ops.updates.momentum import apply_momentum_
from graphopt.ir.program import Program
from graphopt.ir.state import PassState
from graphopt.rewriting.distributed.dense.all_reduce import gradient_readers
from graphopt.rewriting.distributed.flat_exchange import behind, memory_strides
from graphopt.rewriting.distributed.sparse.optimizer_momentum import OptimizerMomentum
from graphopt.rewriting.distributed.sparse.sparse_update import reason_for_dense, update_entries, uses_of

__all__ = [
    "MESSAGE",
    "WIRE_DTYPES",
    "Rule",
    "Sparse",
    "SparseExchange",
    "accumulate_densely",
    "count_left_out",
    "entries",
    "exchange_sparsely",
    "held_for",
    "wire_dtype",
]

aten = torch.ops.aten
_TINY = 1e-6
MESSAGE = 2**14
"""Bytes that close a message of entries: the last one, for which no computation is left to hide behind, stays small."""

WIRE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Dtypes in which values can travel, by the names that options have for them."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What is accumulated, and how much of it is sent.

    Attributes:
        sparsity: share of the elements that stay; above 0.
        momentum: of the correction; None accumulates plain gradients (error feedback).
        nesterov: Nesterov's form of it.
        weight_decay: times the parameter is added to the gradient.
        clip_norm: limit on a gradient's norm on all ranks together; None for none.
        masking: whether the momentum of what is sent starts again.
        wire: dtype in which values travel: float32, bfloat16 or float16.
    """

    sparsity: float
    momentum: float | None
    nesterov: bool = False
    weight_decay: float = 0.0
    clip_norm: float | None = None
    masking: bool = True
    wire: str = "float32"


@dataclass(frozen=True, slots=True)
class SparseExchange:
    """How one pass exchanges gradients of a program sparsely.

    Attributes:
        rule: what is sent.
        group: at least two ranks.
        origin: the pass that asks.
        skip: one element, 1 where all ranks skip the update, behind which gradients are accumulated; without it a
            gradient that is not finite is left out.
        taken: momenta that are the optimizer's, in place of the one of ``rule``, by the names of their parameters.
    """

    rule: Rule
    group: Group
    origin: str
    skip: fx.Node | None = None
    taken: Mapping[str, OptimizerMomentum] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sparse:
    """One bucket that is exchanged sparsely.

    Attributes:
        names: of the parameters.
        counts: entries that each rank sends of each.
        bytes: that each rank sends.
        finite: for each, the node that says whether the rank's gradient is finite; empty where loss scaling checks.
        dense_because: why the update reads dense means; empty where it reads just the entries that arrive.
    """

    names: tuple[str, ...]
    counts: tuple[int, ...]
    bytes: int
    finite: tuple[fx.Node, ...]
    dense_because: str


def entries(elements: int, sparsity: float) -> int:
    """How many entries of a tensor are sent: at least 1."""
    return max(1, math.floor(elements * (1 - sparsity) + 1e-6))


def wire_dtype(gradient: torch.dtype, wire: str) -> torch.dtype:
    """The dtype in which values of a gradient travel: the one asked for, but for float64 not float32."""
    return torch.float64 if gradient is torch.float64 and wire == "float32" else WIRE_DTYPES[wire]


def exchange_sparsely(
    program: Program,
    gradients: Mapping[str, fx.Node],
    exchange: SparseExchange,
) -> Sparse:
    """Replace gradients, in what the update reads, by the mean of what the ranks send of their residuals.

    Where few entries arrive and the update only adds to parameters, it reads these entries, and the names of the
    gradients stay with those of this rank; else dense means get them.

    Args:
        program: of stage step.
        gradients: of one dtype and device, by the names of their parameters; one fused exchange.
        exchange: what is sent, and between whom.
    """
    skip, origin = exchange.skip, exchange.origin
    position = {node: index for index, node in enumerate(program.graph.nodes)}
    nodes = list(gradients.values())
    latest = max(nodes if skip is None else [*nodes, skip], key=position.__getitem__)
    readers = [_readers_behind(node, latest, position) for node in nodes]
    due = min((reader for found in readers for reader in found), key=position.__getitem__)
    build = _Builder(program, exchange, behind(program, latest))
    keep = None if skip is None else build.call(aten.eq.Scalar, (skip, 0), hint="keep")
    parts = [build.select(name, node, keep) for name, node in gradients.items()]
    message = build.exchange(nodes, parts, due)
    uses = [uses_of(program, node, found) for node, found in zip(nodes, readers, strict=True)]
    sizes = [value_of(node).numel() for node in nodes]
    dense_because = reason_for_dense(all(uses), exchange.group.size, message.counts, sizes)
    if not dense_because:
        update_entries(program, build.sum_of(message), uses, due, origin)
    else:
        means = build.means(message, due)
        for name, node, mean, found in zip(gradients, nodes, means, readers, strict=True):
            program.hand_over_name(f"{name}~", node, mean)
            for reader in found:
                reader.replace_input_with(node, mean)
    finite = tuple(part.finite for part in parts if part.finite is not None)
    sent = packed_bytes(message.counts, message.wire)
    return Sparse(tuple(gradients), tuple(message.counts), sent, finite, dense_because)


def _readers_behind(gradient: fx.Node, latest: fx.Node, position: Mapping[fx.Node, int]) -> list[fx.Node]:
    """What reads a gradient as such, once all gradients of its message are there."""
    return [user for user in gradient_readers(gradient) if position[user] > position[latest]]


@dataclass(frozen=True, slots=True)
class _Part:
    """What a rank sends of one gradient."""

    indices: fx.Node
    values: fx.Node
    count: int
    finite: fx.Node | None


@dataclass(frozen=True, slots=True)
class _Message:
    """What has arrived of several gradients, and how it is packed."""

    arrived: fx.Node
    gradients: list[fx.Node]
    counts: list[int]
    wire: torch.dtype


class _Builder:
    """Inserts the calls of one bucket, all in front of one node."""

    def __init__(self, program: Program, exchange: SparseExchange, before: fx.Node) -> None:
        self._program = program
        self._rule = exchange.rule
        self._group = exchange.group
        self._origin = exchange.origin
        self._before = before
        self._taken = exchange.taken
        self._parameters = {spec.target: node for node, spec in program.inputs_of("parameter")}

    def call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, **more: Any) -> fx.Node:
        """One call; ``more`` is what ``Program.insert`` takes, such as another place (``before``)."""
        common = {"before": self._before, "phase": Phase.SYNC, "origin": self._origin}
        return self._program.insert(target, args, kwargs, **{**common, **more})

    def state(self, what: str, name: str, gradient: fx.Node) -> fx.Node:
        """A flat tensor that the rank keeps for a parameter."""
        return held_for(self._program, self._origin, what, name, gradient)

    def wire(self, gradient: fx.Node) -> torch.dtype:
        """The dtype in which values travel."""
        return wire_dtype(value_of(gradient).dtype, self._rule.wire)

    def select(self, name: str, gradient: fx.Node, keep: fx.Node | None) -> _Part:
        """Accumulate a gradient, and take from the residual what is sent."""
        rule = self._rule
        norm, finite, scale = None, None, None
        exact = {"dtype": _kept_dtype(value_of(gradient))}
        if rule.clip_norm is not None:
            norm = self.call(aten.linalg_vector_norm.default, (gradient,), exact, hint="norm", like=gradient)
            scale = self._clip(norm, rule.clip_norm)
        if keep is None:
            total = norm or self.call(aten.sum.default, (gradient,), exact, hint="total", like=gradient)
            finite = self.call(aten.isfinite.default, (total,), hint="finite")
        v = self.state("residual", name, gradient)
        kwargs: dict[str, Any] = {"keep": keep if finite is None else finite}
        if scale is not None:
            kwargs["scale"] = scale
        u = self._accumulate(name, gradient, v, kwargs)
        count = entries(value_of(gradient).numel(), rule.sparsity)
        chosen = self.call(select, (v, count), hint="selected", like=gradient)
        indices, values = (self.call(operator.getitem, (chosen, place)) for place in (0, 1))
        return _Part(indices, self._take(u, v, indices, values, keep), count, finite)

    def _accumulate(self, name: str, gradient: fx.Node, v: fx.Node, kwargs: dict[str, Any]) -> fx.Node | None:
        """Add a gradient to a residual; returns the momentum of it, flat, or None where there is none."""
        rule, taken = self._rule, self._taken.get(name)
        if taken is not None:
            return self._accumulate_taken(taken, gradient, v, kwargs)
        u = None if rule.momentum is None else self.state("momentum", name, gradient)
        if rule.weight_decay:
            kwargs |= {"parameter": self._parameters[name], "weight_decay": rule.weight_decay}
        self.call(accumulate_, (gradient, u, v, rule.momentum or 0.0, rule.nesterov), kwargs, like=gradient)
        return u

    def _accumulate_taken(
        self, taken: OptimizerMomentum, gradient: fx.Node, v: fx.Node, kwargs: dict[str, Any]
    ) -> fx.Node:
        """The same with the optimizer's momentum: in the first step its buffer is zero, and nothing is dampened."""
        if taken.weight_decay:
            kwargs |= {"parameter": taken.parameter, "weight_decay": taken.weight_decay}
        if taken.dampening and not taken.first:
            kwargs["dampening"] = taken.dampening
        arguments = (gradient, taken.buffer, v, taken.momentum, taken.nesterov)
        self.call(accumulate_, arguments, {**kwargs, "buffer": True}, like=gradient)
        flat = (taken.buffer, [value_of(taken.buffer).numel()], [1])
        return self.call(aten.as_strided.default, flat, like=gradient)

    def _clip(self, norm: fx.Node, limit: float) -> fx.Node:
        """The factor that limits the norm of one rank's gradient: that of the mean of N is smaller by their root."""
        local = self.call(aten.add.Tensor, (norm, _TINY))
        local = self.call(aten.reciprocal.default, (local,))
        local = self.call(aten.mul.Tensor, (local, limit * self._group.size**-0.5))
        return self.call(aten.clamp.default, (local, None, 1.0), hint="clip")

    def _take(self, u: fx.Node | None, v: fx.Node, indices: fx.Node, values: fx.Node, keep: fx.Node | None) -> fx.Node:
        """Take what is sent from the residual, and from the momentum where it is masked; nothing in a skipped step."""
        sent = values
        if self.wire(v) is not value_of(v).dtype:
            sent = self.call(to_wire, (values, self.wire(v)), hint="sent")
        if keep is not None:
            taken = self.call(aten.mul.Tensor, (sent, keep), hint="taken")
            self.call(keep_rest_, (v, indices, taken))
        elif sent is values:
            self.call(clear_at_, (v, indices))
        else:
            self.call(keep_rest_, (v, indices, sent))
        if u is not None and self._rule.masking:
            if keep is None:
                self.call(clear_at_, (u, indices))
            else:
                masked = self.call(aten.index.Tensor, (u, [indices]))
                masked = self.call(aten.mul.Tensor, (masked, keep), hint="masked")
                self.call(keep_rest_, (u, indices, masked))
        return sent

    def exchange(self, gradients: list[fx.Node], parts: Sequence[_Part], due: fx.Node) -> _Message:
        """Send the parts of gradients in one message, and wait for those of the other ranks in front of ``due``."""
        wire = self.wire(gradients[0])
        indices, values = [part.indices for part in parts], [part.values for part in parts]
        packed = self.call(pack, (indices, values, wire), hint="packed")
        gathered = self.call(ALL_GATHER, (packed, self._group.size, self._group.name), hint="all_gather")
        arrived = self.call(WAIT, (gathered,), before=due, hint="gathered")
        return _Message(arrived, gradients, [part.count for part in parts], wire)

    def sum_of(self, message: _Message) -> tuple[Any, ...]:
        """The arguments of ``graphopt.sum_entries`` and ``graphopt.sum_sparse`` for the mean over the ranks."""
        values = [value_of(node) for node in message.gradients]
        sizes = [value.numel() for value in values]
        ranks = self._group.size
        return (message.arrived, ranks, message.counts, sizes, message.wire, values[0].dtype, 1.0 / ranks)

    def means(self, message: _Message, due: fx.Node) -> list[fx.Node]:
        """Dense means, added up in the order of the ranks, and shaped like the gradients."""
        sums = self.call(sum_sparse, self.sum_of(message), before=due, hint="sums")
        means = []
        for place, node in enumerate(message.gradients):
            flat = self.call(operator.getitem, (sums, place), before=due)
            layout = (flat, list(value_of(node).shape), list(memory_strides(value_of(node))))
            means.append(self.call(aten.as_strided.default, layout, before=due, like=node))
        return means


def held_for(program: Program, origin: str, what: str, name: str, gradient: fx.Node) -> fx.Node:
    """A flat tensor that a rank keeps for a parameter, in float32 or float64, in the order of the gradient's memory."""
    value = value_of(gradient)
    state = PassState((value.numel(),), _kept_dtype(value), value.device, local=True)
    return program.add_state(f"{origin}/{what}/{name}", state)


def _kept_dtype(gradient: torch.Tensor) -> torch.dtype:
    return torch.float64 if gradient.dtype is torch.float64 else torch.float32


def accumulate_densely(
    program: Program,
    gradients: Mapping[str, fx.Node],
    rule: Rule,
    before: fx.Node,
    origin: str,
    skip: fx.Node | None = None,
) -> None:
    """Apply the momentum of sparse exchange to gradients that all ranks share, in place.

    Args:
        program: of stage step.
        gradients: means over the ranks, which may be written to, by the names of their parameters.
        rule: whose momentum and weight decay.
        before: the first call that reads the result.
        origin: the pass that asks.
        skip: one element, 1 where the update is skipped.
    """
    assert rule.momentum is not None
    common: dict[str, Any] = {"before": before, "phase": Phase.UPDATE, "origin": f"{origin}: momentum"}
    parameters = {spec.target: node for node, spec in program.inputs_of("parameter")}
    options: dict[str, Any] = {}
    if skip is not None:
        options["keep"] = program.insert(aten.eq.Scalar, (skip, 0), hint="keep", **common)
    for name, node in gradients.items():
        value = value_of(node)
        flat = held_for(program, origin, "momentum", name, node)
        layout = (flat, list(value.shape), list(memory_strides(value)))
        u = program.insert(aten.as_strided.default, layout, like=node, **common)
        decay = {"parameter": parameters[name], "weight_decay": rule.weight_decay} if rule.weight_decay else {}
        arguments = (node, u, rule.momentum, rule.nesterov)
        program.insert(apply_momentum_, arguments, {**options, **decay}, like=node, **common)


def count_left_out(program: Program, finite: Sequence[fx.Node], target: str, origin: str) -> None:
    """Add to a count that is pass state how many gradients of a step are left out because they are not finite.

    Args:
        program: of stage step.
        finite: from ``Sparse``.
        target: what it is called: int64, one element.
        origin: the pass that asks.
    """
    common: dict[str, Any] = {"before": program.output_node, "phase": Phase.SYNC, "origin": f"{origin}: left out"}
    device = value_of(finite[0]).device
    count = program.add_state(target, PassState((), torch.int64, device, local=True))
    flags = program.insert(aten.stack.default, (list(finite),), **common)
    flags = program.insert(aten.logical_not.default, (flags,), **common)
    total = program.insert(aten.sum.default, (flags,), **common)
    program.insert(aten.add_.Tensor, (count, total), **common)
