"""The two halves of dropout: ``dropout_mask`` draws what stays, ``masked_dropout`` keeps it.

As one call, dropout cannot be recomputed without drawing again. Drawing is most of its time on a CPU, and the mask,
a quarter of the result's bytes in float32, is kept for backward anyway. ``aten.native_dropout`` also rounds its scale
otherwise than ``torch.nn.functional.dropout`` does on a CPU, in its backward for dtypes of 16 bits; these do as that.

``prod_backward``: the gradient of a product as eager mode computes it, which first looks for factors of zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from graphopt.ir.ops.define import define

__all__ = ["dropout_mask", "masked_dropout", "prod_backward"]


def _mask(size: Sequence[int], stride: Sequence[int], p: float, *, device: torch.device) -> torch.Tensor:
    return _room(size, stride, p, device=device).bernoulli_(1.0 - p)


def _room(size: Sequence[int], stride: Sequence[int], p: float, *, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=torch.bool, device=device)


def _masked(x: torch.Tensor, mask: torch.Tensor, p: float) -> torch.Tensor:
    noise = mask.view(torch.uint8).to(x.dtype).div_(1.0 - p)  # kernels turn bytes into floats faster than bools
    return noise.mul_(x) if x.stride() == noise.stride() else x.mul(noise)


def _masked_fake(x: torch.Tensor, mask: torch.Tensor, p: float) -> torch.Tensor:
    return x.mul(mask.to(x.dtype))


_tag: Any = torch.Tag

dropout_mask = define(
    "dropout_mask(SymInt[] size, SymInt[] stride, float p, *, Device device) -> Tensor",
    _mask,
    _room,
    tags=(_tag.nondeterministic_seeded, _tag.flexible_layout),
)
"""``dropout_mask(SymInt[] size, SymInt[] stride, float p, *, Device device) -> Tensor``: which elements stay.

Booleans, each False with probability ``p``, of the device's default generator: on a CPU, what
``torch.nn.functional.dropout`` draws from the same state for a tensor of this size and these strides.
"""

masked_dropout = define("masked_dropout(Tensor x, Tensor mask, float p) -> Tensor", _masked, _masked_fake)
"""``masked_dropout(Tensor x, Tensor mask, float p) -> Tensor``: ``x * (mask / (1 - p))``, rounded as eager dropout is.

``mask`` (bool) has the shape of ``x``, and ``p`` is below 1. It is the result of dropout, and the gradient too.
"""


def _backward(
    gradient: torch.Tensor, x: torch.Tensor, result: torch.Tensor, dim: int | None, keepdim: bool
) -> torch.Tensor:
    if x.dim() == 0:
        return gradient.clone()
    zeros = x == 0
    if dim is None:
        count = int(zeros.sum())
        if count > 1:
            return torch.zeros_like(x)
        if count == 1:
            return _without_each(gradient, x.contiguous().view(-1), 0).view_as(x)
    else:
        gradient, result = _kept(gradient, dim, keepdim), _kept(result, dim, keepdim)
        if zeros.any():
            return _without_each(gradient, x, dim)
    return gradient * (result / x).conj()


def _kept(reduced: torch.Tensor, dim: int, keepdim: bool) -> torch.Tensor:
    return reduced if keepdim else reduced.unsqueeze(dim)


def _without_each(gradient: torch.Tensor, x: torch.Tensor, dim: int) -> torch.Tensor:
    """The gradient times the product of all other factors, those before each and those behind it."""
    if x.shape[dim] == 1:
        return gradient.expand(x.shape).clone()
    one = torch.ones_like(x.narrow(dim, 0, 1), memory_format=torch.contiguous_format)
    before = torch.cat([one, x.narrow(dim, 0, x.shape[dim] - 1)], dim).cumprod(dim)
    behind = torch.cat([one, x.narrow(dim, 1, x.shape[dim] - 1).flip(dim)], dim).cumprod(dim).flip(dim)
    return gradient * (before * behind).conj()


def _like(
    gradient: torch.Tensor, x: torch.Tensor, result: torch.Tensor, dim: int | None, keepdim: bool
) -> torch.Tensor:
    if x.dim() == 0:
        return torch.empty_like(gradient)
    if dim is not None:
        gradient, result = _kept(gradient, dim, keepdim), _kept(result, dim, keepdim)
    return gradient * (result / x)


prod_backward = define(
    "prod_backward(Tensor gradient, Tensor x, Tensor result, int? dim, bool keepdim) -> Tensor", _backward, _like
)
"""``prod_backward(Tensor gradient, Tensor x, Tensor result, int? dim, bool keepdim) -> Tensor``: of ``aten.prod``.

The gradient of the product of all elements, where ``dim`` is None, or of those along a dimension.
"""
