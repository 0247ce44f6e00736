"""Exchanges of several tensors in one piece: copied into one flat tensor, and read back as views of the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import fx

from graphopt.ir.node import Phase, value_of
from graphopt.ir.ops.communication.collectives import ALL_REDUCE, BROADCAST, WAIT
from graphopt.ir.ops.communication.groups import Group
from graphopt.ir.ops.values import is_dense
from graphopt.ir.program import Program

__all__ = ["How", "behind", "flat", "memory_strides", "read_parts", "start_exchange"]

aten = torch.ops.aten

How = Literal["mean", "max", "min", "broadcast"]
"""What becomes of values that ranks exchange."""


def start_exchange(
    program: Program, nodes: Sequence[fx.Node], before: fx.Node, group: Group, how: How, origin: str
) -> fx.Node:
    """Copy values into one flat tensor, and start its exchange.

    Args:
        program: is changed.
        nodes: values of one dtype and device, in the order in which they lie in the flat tensor.
        before: in front of which call.
        group: at least two ranks.
        how: ``mean`` over the ranks (each divides its own, then they are summed), ``max``, ``min``, or ``broadcast``
            what rank 0 has.
        origin: whose nodes they are.

    Returns:
        the call that starts the exchange; ``read_parts`` waits for it.
    """
    common: dict[str, Any] = {"phase": Phase.SYNC, "origin": origin}
    flats = [flat(program, node, before, common) for node in nodes]
    joined = program.insert(aten.cat.default, (flats,), before=before, hint="bucket", **common)
    if how == "broadcast":
        given: fx.Node = program.insert(BROADCAST, (joined, 0, group.name), before=before, hint="broadcast", **common)
        return given
    if how == "mean":
        joined = program.insert(aten.mul_.Scalar, (joined, 1.0 / group.size), before=before, **common)
    operation = "sum" if how == "mean" else how
    started: fx.Node = program.insert(
        ALL_REDUCE, (joined, operation, group.name), before=before, hint="all_reduce", **common
    )
    return started


def read_parts(
    program: Program, start: fx.Node, nodes: Sequence[fx.Node], before: fx.Node, origin: str
) -> list[fx.Node]:
    """Wait for an exchange; views of its result in the places, sizes and strides of the values that went in."""
    common: dict[str, Any] = {"phase": Phase.SYNC, "origin": origin}
    done = program.insert(WAIT, (start,), before=before, hint="exchanged", **common)
    found, offset = [], 0
    for node in nodes:
        value = value_of(node)
        layout = (done, list(value.shape), list(memory_strides(value)), offset)
        found.append(program.insert(aten.as_strided.default, layout, before=before, like=node, **common))
        offset += value.numel()
    return found


def behind(program: Program, node: fx.Node) -> fx.Node:
    """The call in front of which something goes that comes right behind a value."""
    if node.op == "placeholder":
        first: fx.Node = next(other for other in program.graph.nodes if other.op != "placeholder")
        return first
    following: fx.Node = node.next
    return following


def flat(program: Program, node: fx.Node, before: fx.Node, common: Mapping[str, Any]) -> fx.Node:
    """All elements of a gradient in the order of its memory, shape ``[elements]``; a view where that is possible."""
    value = value_of(node)
    if not is_dense(value):
        node = program.insert(
            aten.clone.default, (node,), {"memory_format": torch.contiguous_format}, before=before, **common
        )
    return program.insert(aten.as_strided.default, (node, [value.numel()], [1]), before=before, **common)


def memory_strides(value: torch.Tensor) -> Sequence[int]:
    """The strides of a gradient within its bucket: its own, or those of the contiguous copy of it."""
    if is_dense(value):
        return value.stride()
    strides, step = [], 1
    for size in reversed(value.shape):
        strides.append(step)
        step *= max(1, size)
    return strides[::-1]
