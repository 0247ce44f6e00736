"""What compilers get: torch's functional ops, in an order in which they work.

Compilers choose themselves what they overwrite and what they fuse, so ops that write become functional ones, and
graphopt's dropout and softmax those of torch. They know by name that the operand of torch's collectives is read until
the wait, so gathers become torch's, one at a time (see ``ops.gathering``).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from graphopt import _torch
from graphopt.ir.node import value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.communication.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    REDUCE_SCATTER_SUM,
    WAIT,
)
from graphopt.ir.ops.inplace import FUNCTIONAL, as_functional
from graphopt.ir.ops.layers.dropout import masked_dropout
from graphopt.ir.ops.layers.softmax import safe_softmax

__all__ = ["gather_one_at_a_time", "write_nothing"]

_aten = torch.ops.aten

_COLLECTIVES: dict[Any, Any] = {ALL_REDUCE: _torch.all_reduce, BROADCAST: _torch.broadcast}
"""Torch's compilers refuse collectives that return what they write to."""


def write_nothing(node: fx.Node, copy: fx.Node) -> None:
    """Let the copy of a call, for a compiler, be of torch's op that does the same without writing to its operand.

    It stays as it is where there is no such op, where the operand is an input or a part of one, and where something
    else reads the operand, or the memory that it is a part of, behind the call.

    Args:
        node: a call of a generated module; is only read.
        copy: of it, in the graph that the compiler gets.
    """
    if node.target is ALL_GATHER:
        copy.target = _torch.all_gather_into_tensor
    elif node.target is ALL_TO_ALL:
        sent, ranks, group = copy.args
        assert isinstance(ranks, int)
        parts = [value_of(node).shape[0] // ranks] * ranks
        copy.target, copy.args = _torch.all_to_all_op, (sent, parts, parts, group)
    elif node.target is REDUCE_SCATTER_SUM:
        sent, ranks, group = copy.args
        copy.target, copy.args = _torch.reduce_scatter_tensor, (sent, "sum", ranks, group)
    elif node.target in _COLLECTIVES and _may_write_elsewhere(node):
        copy.target = _COLLECTIVES[node.target]
    elif node.target is masked_dropout:
        _apply_mask(node, copy)
    elif node.target is safe_softmax:
        _empty_hidden_rows(copy)
    elif node.target in FUNCTIONAL and _may_write_elsewhere(node):
        as_functional(copy)


def _apply_mask(node: fx.Node, copy: fx.Node) -> None:
    """Apply a mask by ops that compilers fuse."""
    x, mask, p = copy.args
    with copy.graph.inserting_before(copy):
        noise = copy.graph.call_function(_aten._to_copy.default, (mask,), {"dtype": value_of(node).dtype})
        scaled = copy.graph.call_function(_aten.div.Scalar, (noise, 1.0 - p))  # type: ignore[operator]
    copy.target, copy.args = _aten.mul.Tensor, (x, scaled)


def _empty_hidden_rows(copy: fx.Node) -> None:
    """Take a softmax whose rows of nothing but -inf become zeros by ops that compilers fuse."""
    x, dim = copy.args
    with copy.graph.inserting_before(copy):
        largest = copy.graph.call_function(_aten.amax.default, (x, [dim], True))
        hidden = copy.graph.call_function(_aten.eq.Scalar, (largest, -math.inf))
        shares = copy.graph.call_function(_aten._softmax.default, (x, dim, False))
    copy.target, copy.args = _aten.where.ScalarSelf, (hidden, 0.0, shares)


def _may_write_elsewhere(node: fx.Node) -> bool:
    (operand,) = schema.mutated_inputs(node)
    return not _is_read_behind(node, operand)


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
        elif node.target is ALL_GATHER and value_of(node).device.type == "cpu":
            for wait in under_way:
                node.prepend(wait)
            moved += len(under_way)
            under_way = [user for user in node.users if user.target is WAIT]
    return moved


def _is_read_behind(node: fx.Node, operand: fx.Node) -> bool:
    """Whether anything reads the operand's memory behind a call, other than by what the call returns."""
    bases = [operand]
    for value in bases:
        if schema.is_own_tensor(value):
            bases += [same for same in value.args[0].users if same.args == value.args and same not in bases]  # type: ignore[union-attr]
        elif value.op == "call_function":
            bases += schema.aliased_inputs(value)
        else:
            return True  # an input, or a part of one: the caller sees it
    seen = {*bases, *(reader for base in bases for reader in schema.readers(base) if schema.hands_on(reader))} - {node}
    users = {user for value in seen for user in value.users} - {node}
    return any(user.op == "output" or node < user for user in users)
