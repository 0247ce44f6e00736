"""Root-mean-square norm as the one kernel that CUDA has for it, forward and backward.

``aten::rms_norm`` is made of other ops where there is no such kernel, and so torch takes it apart wherever it traces on
a CPU. A program for a CUDA device has these in its place, which keep the input and one number for each row.

Normalisation ops that update running statistics, in the form that leaves the statistics alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from graphopt import _torch
from graphopt.ir.ops.define import define

__all__ = ["fused_rms_norm", "fused_rms_norm_backward", "rms_norm_as_one", "without_statistics"]


def _rows(x: torch.Tensor, normalized_shape: Sequence[int]) -> list[int]:
    """The shape of what there is one number for in each row."""
    inner = len(normalized_shape)
    return [*x.shape[: x.dim() - inner], *([1] * inner)]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _forward(
    x: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None, eps: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.to(_wide(x.dtype))
    dims = tuple(range(x.dim() - len(normalized_shape), x.dim()))
    small = torch.finfo(x.dtype).eps if eps is None else eps
    scale = torch.rsqrt(wide.square().mean(dims, keepdim=True) + small)
    normed = wide * scale
    return (normed if weight is None else normed * weight).to(x.dtype).contiguous(), scale


def _forward_fake(
    x: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None, eps: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    scale = torch.empty(_rows(x, normalized_shape), dtype=_wide(x.dtype), device=x.device)
    return torch.empty_like(x, memory_format=torch.contiguous_format), scale


def _backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    scale: torch.Tensor,
    weight: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    inner = len(normalized_shape)
    dims = tuple(range(x.dim() - inner, x.dim()))
    normed = x.to(scale.dtype) * scale
    wide = grad.to(scale.dtype)
    given = wide if weight is None else wide * weight
    count = math.prod(normalized_shape)
    grad_x = scale * (given - normed * (given * normed).sum(dims, keepdim=True) / count)
    outer = tuple(range(x.dim() - inner))
    grad_weight = x.new_empty(0) if weight is None else (wide * normed).sum(outer).to(weight.dtype)
    return grad_x.to(x.dtype).contiguous(), grad_weight


def _backward_fake(
    grad: torch.Tensor,
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    scale: torch.Tensor,
    weight: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    grad_weight = x.new_empty(0) if weight is None else torch.empty_like(weight)
    return torch.empty_like(x, memory_format=torch.contiguous_format), grad_weight


fused_rms_norm = define(
    "fused_rms_norm(Tensor x, int[] normalized_shape, Tensor? weight, float? eps) -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
)
"""``fused_rms_norm(Tensor x, int[] normalized_shape, Tensor? weight, float? eps) -> (Tensor, Tensor)``.

``x`` over the root of the mean of its squares in the last dimensions, times ``weight``, in the shape and dtype of
``x``; and what ``x`` was multiplied by, one number for each row, in float32 for 16-bit tensors.
"""

fused_rms_norm_backward = define(
    "fused_rms_norm_backward(Tensor grad, Tensor x, int[] normalized_shape, Tensor scale, Tensor? weight)"
    " -> (Tensor, Tensor)",
    _backward,
    _backward_fake,
)
"""The gradients of ``x`` and of ``weight`` (empty without one) from that of ``fused_rms_norm``'s first result."""


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, normalized_shape: Sequence[int], eps: float | None
    ) -> torch.Tensor:
        result, scale = fused_rms_norm(x, normalized_shape, weight, eps)
        ctx.save_for_backward(x, scale, weight)
        ctx.sizes = normalized_shape
        return result  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, scale, weight = ctx.saved_tensors
        grad_x, grad_weight = fused_rms_norm_backward(gradients[0], x, ctx.sizes, scale, weight)
        return grad_x, None if weight is None else grad_weight, None, None


def rms_norm_as_one(
    x: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """``aten::rms_norm`` by the two ops, to be differentiated."""
    return _torch.apply_function(_RmsNorm, x, weight, list(normalized_shape), eps)  # type: ignore[no-any-return]


_FUNCTIONAL = torch.ops.aten._native_batch_norm_legit_functional.default
_NO_STATISTICS = torch.ops.aten._native_batch_norm_legit.no_stats
_TRAINING = 5


def without_statistics(node: fx.Node) -> tuple[Any, tuple[Any, ...], int] | None:
    """How to compute a BatchNorm's output again without its running statistics.

    In training the output depends on the batch alone; the running statistics are read only to be updated.

    Returns:
        The op, its arguments, and how many of the original's results it gives; None for any other op.
    """
    if node.target is not _FUNCTIONAL or node.kwargs or node.args[_TRAINING] is not True:
        return None
    data, weight, bias, _mean, _variance, training, momentum, epsilon = node.args
    return _NO_STATISTICS, (data, weight, bias, training, momentum, epsilon), 3
