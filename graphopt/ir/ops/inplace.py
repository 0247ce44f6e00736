"""Ops that can write their result where an argument was, to the same bits: pointwise ones, and softmax.

Ops with a name of their own for it (``relu_``) overwrite their first argument. Others take the result, which may be an
argument of theirs (``gelu_backward`` by ``grad_input``): their kernels read an element before they write it. On a CPU,
torch's kernels of softmax over the last dimension, and of its backward, go row by row, and have reduced a row before
they write it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphopt import _torch
from graphopt.ir.node import value_of
from graphopt.ir.ops.layers.loss_gradient import loss_gradient, loss_gradient_
from graphopt.ir.ops.layers.softmax import safe_softmax, safe_softmax_

__all__ = ["FUNCTIONAL", "IN_PLACE", "InPlace", "as_functional", "as_in_place", "in_place"]

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class InPlace:
    """How a call of an op is written in place.

    Attributes:
        target: the op that writes.
        operands: positions of the arguments that it may overwrite.
        out: the keyword by which it takes the result; empty where it overwrites its first argument.
        keywords: whether calls with keywords (``alpha``, ``rounding_mode``) can be written so.
        dimension: position of the argument that names a dimension, where only calls over the last one, of contiguous
            tensors on a CPU, can be written so.
        layout: position of the argument in whose layout the result comes where they differ.
        matrices: whether only a matrix of fixed sizes can be overwritten: what is added to a product may be a row.
    """

    target: Any
    operands: tuple[int, ...] = (0,)
    out: str = ""
    keywords: bool = False
    dimension: int | None = None
    layout: int = 0
    matrices: bool = False


_UNARY = ("abs", "cos", "exp", "log", "neg", "reciprocal", "relu", "rsqrt", "sigmoid", "silu", "sin", "sqrt", "tanh")

IN_PLACE: dict[Any, InPlace] = {
    _aten.add.Tensor: InPlace(_aten.add_.Tensor, (0, 1)),
    _aten.mul.Tensor: InPlace(_aten.mul_.Tensor, (0, 1)),
    _aten.sub.Tensor: InPlace(_aten.sub_.Tensor),
    _aten.div.Tensor: InPlace(_aten.div_.Tensor),
    _aten.add.Scalar: InPlace(_aten.add_.Scalar),
    _aten.mul.Scalar: InPlace(_aten.mul_.Tensor),  # mul_.Scalar rounds the number to 16 bits, and mul.Scalar does not
    _aten.sub.Scalar: InPlace(_aten.sub_.Scalar),
    _aten.div.Scalar: InPlace(_aten.div_.Scalar),
    _aten.addmm.default: InPlace(_aten.addmm_.default, matrices=True),
    _aten.pow.Tensor_Scalar: InPlace(_aten.pow_.Scalar),
    **{getattr(_aten, name).default: InPlace(getattr(_aten, f"{name}_").default) for name in _UNARY},
    **{
        getattr(_aten, name).default: InPlace(getattr(_aten, name).grad_input, (0, 1), "grad_input", keywords=True)
        for name in ("gelu_backward", "sigmoid_backward", "silu_backward", "tanh_backward")
    },
    _aten.threshold_backward.default: InPlace(
        _aten.threshold_backward.grad_input, (0, 1), "grad_input", keywords=True, layout=1
    ),
    _aten._softmax.default: InPlace(_aten._softmax.out, out="out", dimension=1),
    _aten._log_softmax.default: InPlace(_aten._log_softmax.out, out="out", dimension=1),
    safe_softmax: InPlace(safe_softmax_, dimension=1),
    loss_gradient: InPlace(loss_gradient_),
    _aten._softmax_backward_data.default: InPlace(_aten._softmax_backward_data.out, (0, 1), "grad_input", dimension=2),
    _aten._log_softmax_backward_data.default: InPlace(_aten._log_softmax_backward_data.out, (0, 1), "out", dimension=2),
}
"""By op, how its calls are written in place."""

FUNCTIONAL: dict[Any, Any] = {form.target: op for op, form in reversed(IN_PLACE.items())}
"""By op that writes, the one that returns a new tensor; the first one where two are written alike."""


def in_place(node: fx.Node) -> InPlace | None:
    """How a call is written in place; None where it cannot be."""
    form = IN_PLACE.get(node.target) if node.op == "call_function" else None
    if form is None or (node.kwargs and not form.keywords):
        return None
    if not (form.matrices or form.dimension is not None):
        return form
    first = value_of(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
    if not isinstance(first, torch.Tensor):
        return None
    if form.matrices and not _is_fixed_matrix(first):
        return None
    if form.dimension is not None:
        last = node.args[form.dimension : form.dimension + 1] in ((-1,), (first.dim() - 1,))
        if not (last and _torch.device_kind(first) == "cpu" and first.is_contiguous()):
            return None
    return form


def _is_fixed_matrix(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 2 and all(isinstance(size, int) for size in tensor.shape)


def as_in_place(node: fx.Node, operand: fx.Node) -> None:
    """Let a call of an op of ``IN_PLACE`` overwrite ``operand``, one of the arguments that it may overwrite."""
    form = IN_PLACE[node.target]
    if form.out:
        node.kwargs = {**node.kwargs, form.out: operand}
    elif node.args[0] is not operand:
        node.args = (operand, node.args[0])  # the ops that may overwrite their second argument commute
    node.target = form.target


def as_functional(node: fx.Node) -> None:
    """Let a call that ``as_in_place`` made return a new tensor again."""
    functional = FUNCTIONAL[node.target]
    node.kwargs = {key: value for key, value in node.kwargs.items() if key != IN_PLACE[functional].out}
    node.target = functional
