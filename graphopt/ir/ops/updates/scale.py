"""The ops of loss scaling: check and unscale gradients, put back what a bad step wrote, update the scale.

They are made of tensor arithmetic alone, so that nothing waits for the device. In a program they stand in this order::

    graphopt.check_and_unscale_([g0, g1, ...], nonfinite, inverse)   # g *= inverse; nonfinite[i] = 1 where g_i is not
    found_inf = aten.amax(nonfinite, [0])
    ...                                                              # the optimizer's update
    graphopt.put_back_([p0, ...], [kept0, ...], found_inf)           # p = kept where found_inf is not 0
    graphopt.update_scale_(scale, good, bad, skipped, found_inf, growth_factor, backoff_factor, ...)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["FOUND_INF", "check_and_unscale_", "put_back_", "update_scale_"]

FOUND_INF = "found_inf"
"""The name of the tensor of one element that is 1 where a gradient is not finite, else 0; ranks take its maximum."""

_torch_library: Any = torch.library  # torch leaves it untyped
_library = _torch_library.Library("graphopt", "FRAGMENT")
_library.define("check_and_unscale_(Tensor(a!)[] gradients, Tensor(b!) nonfinite, Tensor inverse) -> ()")
_library.define("put_back_(Tensor(a!)[] tensors, Tensor[] kept, Tensor found_inf) -> ()")
_library.define(
    "update_scale_(Tensor(a!) scale, Tensor(b!) good, Tensor(c!) bad, Tensor(d!) skipped, Tensor found_inf, "
    "float growth_factor, float backoff_factor, int growth_interval, int hysteresis, float floor, float ceiling) -> ()"
)


def _check_and_unscale(gradients: Sequence[torch.Tensor], nonfinite: torch.Tensor, inverse: torch.Tensor) -> None:
    # one call each, so that it is known which gradient is not finite
    for gradient, flag in zip(gradients, nonfinite.unbind(), strict=True):
        torch.ops.aten._amp_foreach_non_finite_check_and_unscale_([gradient], flag, inverse)


def _put_back(tensors: Sequence[torch.Tensor], kept: Sequence[torch.Tensor], found_inf: torch.Tensor) -> None:
    found = found_inf != 0
    for tensor, before in zip(tensors, kept, strict=True):
        torch.where(found, before, tensor, out=tensor)


def _update_scale(
    scale: torch.Tensor,
    good: torch.Tensor,
    bad: torch.Tensor,
    skipped: torch.Tensor,
    found_inf: torch.Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
    floor: float,
    ceiling: float,
) -> None:
    found = found_inf != 0
    skipped.add_(1).mul_(found)
    good.add_(1).mul_(~found)
    bad.add_(1).mul_(found)
    grows, falls = good >= growth_interval, bad >= hysteresis
    grown = (scale.double() * growth_factor).float().clamp_(max=ceiling)
    grown = torch.where(grown == math.inf, scale, grown)
    lowered = (scale.double() * backoff_factor).float().clamp_(min=floor)
    scale.copy_(torch.where(falls, lowered, torch.where(grows, grown, scale)))
    good.mul_(~grows)
    bad.mul_(~falls)


def _nothing(*_: Any) -> None:
    """The ops return nothing, and their arguments keep shape, dtype and device."""


def _register(name: str, real: Callable[..., None]) -> Any:
    for device in ("CPU", "CUDA"):
        _library.impl(name, real, device)
    _torch_library.register_fake(f"graphopt::{name}", _nothing, lib=_library)
    return getattr(torch.ops.graphopt, name).default


check_and_unscale_ = _register("check_and_unscale_", _check_and_unscale)
"""``check_and_unscale_(Tensor(a!)[] gradients, Tensor(b!) nonfinite, Tensor inverse) -> ()``.

Multiply each gradient by ``inverse`` (float32, one element), and set ``nonfinite[i]`` (float32, one element for each
gradient) to 1 where gradient ``i`` had an infinity or not-a-number before; other elements of it stay as they are. Each
is checked and multiplied as by torch's ``_amp_foreach_non_finite_check_and_unscale_``.
"""

put_back_ = _register("put_back_", _put_back)
"""``put_back_(Tensor(a!)[] tensors, Tensor[] kept, Tensor found_inf) -> ()``.

Give each tensor the values of ``kept`` where ``found_inf`` (one element) is not 0; otherwise write what is there.
"""

update_scale_ = _register("update_scale_", _update_scale)
"""``update_scale_(Tensor(a!) scale, Tensor(b!) good, Tensor(c!) bad, Tensor(d!) skipped, found_inf, ...) -> ()``.

Count a step as good or bad, and change the scale (all are tensors of one element; the scale is float32):

* a bad step (``found_inf`` is not 0): ``good = 0``; after ``hysteresis`` bad steps in a row (the count starts again at
  a good step and behind each change) ``scale = max(scale * backoff_factor, floor)``;
* a good step: after ``growth_interval`` of them in a row or more ``scale = min(scale * growth_factor, ceiling)``, where
  that is finite, and ``good = 0``.

``skipped`` counts the bad steps in a row. Products are taken in float64 and rounded to float32, as torch's
``_amp_update_scale_`` does; with ratios that are float32 numbers they are what Paddle's ``update_loss_scaling`` gives.
"""
