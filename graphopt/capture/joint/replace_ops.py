"""Traced calls for which graphopt has ops that give the same bits in less time and memory, on a CPU.

Dropout becomes two calls, one that draws the mask and one that applies it: as one call with two results, it draws again
whenever it is recomputed for one of them. Drawing is slow and the mask is small, so programs are given the choice.
Attention's softmax becomes one that knows more cheaply where a row has nothing to look at. LSTM layers, which hand a
workspace to their backward, get ops that know its bytes.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from graphopt import _torch
from graphopt.ir.node import info, set_value, value_of
from graphopt.ir.ops.layers.dropout import dropout_mask, masked_dropout
from graphopt.ir.ops.layers.recurrent import lstm_layer, lstm_layer_backward, workspace_of
from graphopt.ir.ops.layers.softmax import safe_softmax
from graphopt.ir.program import Program

__all__ = ["use_own_ops"]

_aten = torch.ops.aten


def use_own_ops(program: Program) -> None:
    """Let a joint program call graphopt's ops where they do the same.

    On other devices one kernel draws a mask and applies it, in an order of its own. Dropout of everything, as attention
    may ask for, draws nothing in eager mode, on any device.
    """
    for node in program.nodes:
        if node.target is _aten.native_dropout.default and _drops_all(node):
            _put_zeros(program, node)
    for node in program.nodes:
        if node.target is _aten.native_dropout.default and _can_be_parted(node):
            _part(program, node)
        elif node.target is _aten.native_dropout_backward.default and node.args[1].target is dropout_mask:  # type: ignore[union-attr]
            gradient, mask, _ = node.args
            _hand_over(program, node, _call(program, node, masked_dropout, (gradient, mask, mask.args[2])))  # type: ignore[union-attr]
        elif node.target is _aten.mkldnn_rnn_layer.default:
            _lay_out(program, node)
        elif node.target is _aten.mkldnn_rnn_layer_backward.default:
            _hand_over(program, node, _call(program, node, lstm_layer_backward, node.args))
        elif node.target is _aten.mul.Tensor and _shares_evenly(node):
            mask, share = node.args
            _hand_over(program, node, _call(program, node, _aten.where.ScalarOther, (mask, share, 0.0)))
        elif node.target is _aten._safe_softmax.default and _is_plain(node):
            _hand_over(program, node, _call(program, node, safe_softmax, node.args[:2]))


def _shares_evenly(product: fx.Node) -> bool:
    """Whether a gradient is shared by the elements that a maximum, minimum or median was found at, on a CPU.

    Eager mode writes the shares into zeros; the product, which it takes where it traces, makes negative zeros too.
    """
    mask, share = product.args
    if not isinstance(mask, fx.Node) or not isinstance(share, fx.Node) or share.target is not _aten.div.Tensor:
        return False
    count = share.args[1]
    counted = isinstance(count, fx.Node) and count.target is _aten.sum.default and count.args[0] is mask
    value: torch.Tensor = value_of(mask)
    return counted and value.dtype is torch.bool and _torch.device_kind(value) == "cpu" and value_of(share).dim() == 0


def _lay_out(program: Program, layer: fx.Node) -> None:
    """An LSTM layer with the workspace that its backward reads."""
    values = [value_of(argument) if isinstance(argument, fx.Node) else argument for argument in layer.args]
    new = _call(program, layer, lstm_layer, (*layer.args, workspace_of(values)))
    for element in layer.users:
        set_value(element, value_of(new)[element.args[1]])
    _hand_over(program, layer, new)


def _is_plain(softmax: fx.Node) -> bool:
    """Whether a softmax keeps the dtype of a contiguous tensor on a CPU."""
    x: torch.Tensor = value_of(softmax.args[0])  # type: ignore[arg-type]
    result: torch.Tensor = value_of(softmax)
    return _torch.device_kind(x) == "cpu" and x.is_contiguous() and x.dtype == result.dtype


def _drops_all(dropout: fx.Node) -> bool:
    """Whether nothing is kept, and only backward reads the mask."""
    p: Any = dropout.args[1]
    train: Any = dropout.args[2]
    elements = all(user.target is operator.getitem for user in dropout.users)
    readers = [user for element in dropout.users if element.args[1] == 1 for user in element.users]
    backward = all(user.target is _aten.native_dropout_backward.default for user in readers)
    return p == 1 and train is not False and elements and backward


def _put_zeros(program: Program, dropout: fx.Node) -> None:
    for element in list(dropout.users):
        if element.args[1] == 0:
            _hand_over(program, element, _call(program, dropout, _aten.mul.Scalar, (dropout.args[0], 0.0)))
            continue
        for reader in list(element.users):
            _hand_over(program, reader, _call(program, reader, _aten.mul.Scalar, (reader.args[0], 0.0)))
        program.graph.erase_node(element)
    program.graph.erase_node(dropout)


def _can_be_parted(dropout: fx.Node) -> bool:
    p: Any = dropout.args[1]
    train: Any = dropout.args[2]
    mask: torch.Tensor = value_of(dropout)[1]
    elements = all(user.target is operator.getitem for user in dropout.users)
    return elements and _torch.device_kind(mask) == "cpu" and p < 1 and train is not False


def _part(program: Program, dropout: fx.Node) -> None:
    x, p = dropout.args[:2]
    value = value_of(dropout)[1]
    size = [_known(program, dropout, _aten.sym_size.int, d, number) for d, number in enumerate(value.shape)]
    stride = [_known(program, dropout, _aten.sym_stride.int, d, number) for d, number in enumerate(value.stride())]
    mask = _call(program, dropout, dropout_mask, (size, stride, p), {"device": value.device})
    result = _call(program, dropout, masked_dropout, (x, mask, p))
    for element in list(dropout.users):
        _hand_over(program, element, result if element.args[1] == 0 else mask)
    program.graph.erase_node(dropout)


def _known(program: Program, dropout: fx.Node, op: Any, dimension: int, number: Any) -> Any:
    """A size or stride of what is dropped: itself, or the call that says it where it is only known later."""
    return number if isinstance(number, int) else _call(program, dropout, op, (dropout.args[0], dimension))


def _call(program: Program, node: fx.Node, op: Any, args: Any, kwargs: dict[str, Any] | None = None) -> fx.Node:
    """Insert a call in front of the one that it takes the place of."""
    place: dict[str, Any] = {"before": node, "phase": info(node).phase, "origin": "capture", "like": node}
    return program.insert(op, args, kwargs, hint=op._schema.name.split("::")[-1], **place)


def _hand_over(program: Program, old: fx.Node, new: fx.Node) -> None:
    """Let a call take another one's place, with all that is noted on it."""
    new.meta = {**old.meta, "val": value_of(new)}
    old.replace_all_uses_with(new)
    program.graph.erase_node(old)
