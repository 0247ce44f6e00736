"""``prod_backward``: the gradient of a product as eager mode computes it, which first looks for factors of zero."""

from __future__ import annotations

import torch

from graphopt.ir.ops.define import define

__all__ = ["prod_backward"]


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
