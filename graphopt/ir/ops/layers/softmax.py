"""``safe_softmax``: softmax in which a row of nothing but -inf becomes zeros, as attention needs it.

ATen's ``_safe_softmax`` looks for such rows element by element, and copies the result to put them in. A row's largest
element tells as much, and there are seldom any.
"""

from __future__ import annotations

import math

import torch

from graphopt.ir.ops.define import define

__all__ = ["safe_softmax", "safe_softmax_"]

_softmax = torch.ops.aten._softmax


def _safe(x: torch.Tensor, dim: int) -> torch.Tensor:
    return _into(x, dim, torch.empty_like(x))


def _safe_in_place(x: torch.Tensor, dim: int) -> torch.Tensor:
    return _into(x, dim, x)


def _into(x: torch.Tensor, dim: int, result: torch.Tensor) -> torch.Tensor:
    hidden = x.amax(dim, keepdim=True).eq(-math.inf) if x.numel() else x
    _softmax.out(x, dim, False, out=result)
    return result.masked_fill_(hidden, 0.0) if hidden.any() else result


def _like(x: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.empty_like(x)


def _itself(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x


safe_softmax = define("safe_softmax(Tensor x, int dim) -> Tensor", _safe, _like)
"""``safe_softmax(Tensor x, int dim) -> Tensor``: ``aten._safe_softmax``, to the same bits, of a contiguous tensor."""

safe_softmax_ = define("safe_softmax_(Tensor(a!) x, int dim) -> Tensor(a!)", _safe_in_place, _itself)
"""``safe_softmax_(Tensor(a!) x, int dim) -> Tensor(a!)``: the same in place, over the last dimension on a CPU."""
