"""What compilers get: torch's functional ops, in an order in which they work.

Compilers choose themselves what they overwrite, so ops that write become functional ones. They know by name that the
operand of torch's collectives is read until the wait, so gathers become torch's, one at a time (see ``ops.gathering``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from graphopt import _torch
from graphopt.ops import schema
from graphopt.ops.collectives import ALL_GATHER, ALL_REDUCE, BROADCAST, WAIT

__all__ = ["gather_one_at_a_time", "without_writing"]

_FUNCTIONAL: dict[Any, Any] = {
    torch.ops.aten.add_.Tensor: torch.ops.aten.add.Tensor, ALL_REDUCE: _torch.all_reduce, BROADCAST: _torch.broadcast,
}  # fmt: skip
"""Torch's compilers refuse collectives that return what they write to."""


def without_writing(node: fx.Node) -> Any:
    """The target of a call for a compiler: that of torch's op that does the same without writing to its operand.

    It is the call's own where there is no such op, where the operand is an input, and where something else reads the
    operand, or the memory that it is a part of, behind the call.
    """
    if node.target is ALL_GATHER:
        return _torch.all_gather_into_tensor
    operand = node.args[0] if node.target in _FUNCTIONAL else None
    if not isinstance(operand, fx.Node) or operand.op != "call_function":
        return node.target
    return node.target if _is_read_behind(node, operand) else _FUNCTIONAL[node.target]


def gather_one_at_a_time(graph: fx.Graph) -> int:
    """Wait for every gather of CPU tensors before the next one begins; returns how many waits were moved forward.

    Args:
        graph: that compilers get; is changed.
    """
    moved = 0
    under_way: list[fx.Node] = []
    for node in graph.nodes:
        if node in under_way:
            under_way.remove(node)
        elif node.target is ALL_GATHER and node.meta["val"].device.type == "cpu":
            for wait in under_way:
                node.prepend(wait)
            moved += len(under_way)
            under_way = [user for user in node.users if user.target is WAIT]
    return moved


def _is_read_behind(node: fx.Node, operand: fx.Node) -> bool:
    """Whether anything reads the operand's memory behind a call, other than by what the call returns."""
    bases = [operand]
    for value in bases:
        bases += schema.aliased_inputs(value) if value.op == "call_function" else []
    seen = {*bases, *(reader for base in bases for reader in schema.readers(base) if schema.hands_on(reader))} - {node}
    users = {user for value in seen for user in value.users} - {node}
    return any(user.op == "output" or node < user for user in users)
