"""The two halves of dropout: ``dropout_mask`` draws what stays, ``masked_dropout`` keeps it.

As one call, dropout cannot be computed again without drawing again. Drawing is most of its time on a CPU, and the mask,
a quarter of the result's bytes in float32, is kept for backward anyway. ``aten.native_dropout`` also rounds its scale
otherwise than ``torch.nn.functional.dropout`` does on a CPU, in its backward for dtypes of 16 bits; these do as that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from graphopt.ir.ops.define import define

__all__ = ["dropout_mask", "masked_dropout"]


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
