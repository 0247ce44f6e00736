"""LSTM layers on a CPU: torch's calls of oneDNN, with the bytes of the workspace that one hands to the other.

The workspace of the forward is read by the backward. How large it is, only oneDNN knows; torch describes it as empty,
so that no memory could be planned for it, and no call be tried on stand-ins.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from graphopt.ir.ops.define import define

__all__ = ["lstm_layer", "lstm_layer_backward", "workspace_of"]

_aten = torch.ops.aten


def _layer(*arguments: Any) -> Any:
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
    _layer,
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
    return int(_layer(*arguments, 0)[3].numel())
