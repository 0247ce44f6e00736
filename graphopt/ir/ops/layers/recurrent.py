"""Recurrent layers in parts, and GRU as eager mode computes it, without writes into parts of a tensor.

Eager mode adds the gates into two thirds of a matrix and takes the sigmoid there, row by row. Traced, the sums become
tensors of their own, and the sigmoid of a whole tensor rounds otherwise than that of its rows. Here the sums are made
as one matrix, of which the gates are parts.

LSTM layers on a CPU: torch's calls of oneDNN, with the bytes of the workspace that one hands to the other.

The workspace of the forward is read by the backward. How large it is, only oneDNN knows; torch describes it as empty,
so that no memory could be planned for it, and no call be tried on stand-ins.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from graphopt import _torch
from graphopt.ir.node import value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.define import define

__all__ = [
    "AS_IN_EAGER",
    "gru",
    "gru_cell",
    "lstm_layer",
    "lstm_layer_backward",
    "parts_in_eager",
    "random_parts",
    "workspace_of",
]


def gru(
    input: torch.Tensor,
    hx: torch.Tensor,
    params: Sequence[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``aten::gru.input``: outputs of the last layer, and the last hidden state of every layer and direction."""
    x = input.transpose(0, 1) if batch_first else input
    hidden = hx.unbind(0)
    width = 4 if has_biases else 2
    cells = [list(params[start : start + width]) for start in range(0, len(params), width)]
    directions = 2 if bidirectional else 1
    last: list[torch.Tensor] = []
    for layer in range(num_layers):
        found = []
        for direction in range(directions):
            number = layer * directions + direction
            outputs, state = _layer(x, hidden[number], cells[number], reverse=direction == 1)
            found.append(outputs)
            last.append(state)
        x = torch.cat(found, -1) if bidirectional else found[0]
        if dropout != 0 and train and layer < num_layers - 1:
            x = torch.dropout(x, dropout, True)
    return x.transpose(0, 1) if batch_first else x, torch.stack(last, 0)


def _layer(
    x: torch.Tensor, hidden: torch.Tensor, cell: Sequence[torch.Tensor], *, reverse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """One direction of one layer over all steps: its outputs, in order of time, and its last hidden state."""
    bias_ih, bias_hh = cell[2:] if len(cell) > 2 else (None, None)
    outputs: list[torch.Tensor] = []
    steps = F.linear(x, cell[0], bias_ih).unbind(0)
    for gates in reversed(steps) if reverse else steps:
        hidden = _step(gates, hidden, F.linear(hidden, cell[1], bias_hh))
        outputs.append(hidden)
    return torch.stack(outputs[::-1] if reverse else outputs, 0), hidden


def _step(given: torch.Tensor, hidden: torch.Tensor, recurrent: torch.Tensor) -> torch.Tensor:
    size = hidden.shape[-1]
    both = recurrent + given  # the last third is not read: what counts is that rows of the gates stand apart
    reset, update = both.narrow(-1, 0, size).sigmoid(), both.narrow(-1, size, size).sigmoid()
    new = (given.narrow(-1, 2 * size, size) + recurrent.narrow(-1, 2 * size, size) * reset).tanh()
    return (hidden - new) * update + new


def gru_cell(
    input: torch.Tensor,
    hx: torch.Tensor,
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: torch.Tensor | None = None,
    b_hh: torch.Tensor | None = None,
) -> torch.Tensor:
    """``aten::gru_cell``: the next hidden state."""
    return _step(F.linear(input, w_ih, b_ih), hx, F.linear(hx, w_hh, b_hh))


AS_IN_EAGER: dict[Any, Callable[..., Any]] = {torch.ops.aten.gru.input: gru, torch.ops.aten.gru_cell.default: gru_cell}
"""What these ops are traced as."""


def parts_in_eager(node: fx.Node) -> tuple[fx.Graph, list[int]]:
    """The ops that a composite op is made of, as eager mode runs it; see ``_torch.parts_of``."""
    assert isinstance(node.target, _torch.OpOverload)
    args, kwargs = _torch.map_aggregate(
        (node.args, node.kwargs), lambda a: value_of(a) if isinstance(a, fx.Node) else a
    )
    with _torch.eager_kernels(AS_IN_EAGER):
        return _torch.parts_of(node.target, args, kwargs)


def random_parts(node: fx.Node) -> list[fx.Node]:
    """The ops inside of a recurrent layer that draw random numbers: dropout between its layers."""
    graph, _ = parts_in_eager(node)
    return [part for part in graph.nodes if schema.is_random(part)]


_aten = torch.ops.aten


def _lstm_by_onednn(*arguments: Any) -> Any:
    """Only where gradients are on, oneDNN keeps a workspace; nothing is recorded for tensors that are detached."""
    detached = [a.detach() if isinstance(a, torch.Tensor) else a for a in arguments[:-1]]
    with torch.enable_grad():
        return _aten.mkldnn_rnn_layer.default(*detached)


def _layer_fake(*arguments: Any) -> Any:
    output, hy, cy, _ = _aten.mkldnn_rnn_layer.default(*arguments[:-1])
    return output, hy, cy, output.new_empty((arguments[-1],), dtype=torch.uint8)


def _layer_backward(*arguments: Any) -> Any:
    return _aten.mkldnn_rnn_layer_backward.default(*arguments)


lstm_layer = define(
    "lstm_layer(Tensor input, Tensor weight0, Tensor weight1, Tensor weight2, Tensor weight3, Tensor hx_, Tensor cx_, "
    "bool reverse, int[] batch_sizes, int mode, int hidden_size, int num_layers, bool has_biases, bool bidirectional, "
    "bool batch_first, bool train, int workspace) -> (Tensor, Tensor, Tensor, Tensor)",
    _lstm_by_onednn,
    _layer_fake,
)
"""``aten::mkldnn_rnn_layer``: outputs, last hidden state, last cell, and a workspace of so many bytes."""

lstm_layer_backward = define(
    "lstm_layer_backward(Tensor input, Tensor weight1, Tensor weight2, Tensor weight3, Tensor weight4, Tensor hx_, "
    "Tensor cx_tmp, Tensor output, Tensor hy_, Tensor cy_, Tensor? grad_output, Tensor? grad_hy, Tensor? grad_cy, "
    "bool reverse, int mode, int hidden_size, int num_layers, bool has_biases, bool train, bool bidirectional, "
    "int[] batch_sizes, bool batch_first, Tensor workspace) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _layer_backward,
    _layer_backward,
)
"""``aten::mkldnn_rnn_layer_backward``: gradients of the input, of the four weights, and of both states."""


def workspace_of(arguments: Sequence[Any]) -> int:
    """The bytes of the workspace of one layer, found by computing it once on zeros.

    Args:
        arguments: of ``aten::mkldnn_rnn_layer``; of tensors, only shapes and dtypes are read.
    """
    return _measured(tuple((tuple(a.shape), a.dtype) if isinstance(a, torch.Tensor) else _plain(a) for a in arguments))


def _plain(argument: Any) -> Any:
    return tuple(argument) if isinstance(argument, (list, tuple)) else argument


@functools.lru_cache(maxsize=256)
def _measured(described: tuple[Any, ...]) -> int:
    arguments = [
        torch.zeros(a[0], dtype=a[1]) if number < 7 else list(a) if isinstance(a, tuple) else a
        for number, a in enumerate(described)
    ]
    return int(_lstm_by_onednn(*arguments, 0)[3].numel())
