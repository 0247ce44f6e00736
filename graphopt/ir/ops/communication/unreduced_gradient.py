"""Ops in a backward that adds up gradients before ranks reduce them: ``accumulated_gradient``, ``not_reduced``.

They say where that is done, and cannot be run: the capture puts tensors that programs have in common in their place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphopt.errors import GraphoptError
from graphopt.ir.ops.define import define

__all__ = ["ACCUMULATED_GRADIENT", "NOT_REDUCED"]


def _not_run(*_: object) -> torch.Tensor:
    raise GraphoptError("this backward was traced to add up whole gradients, and nothing holds their sums yet")


def _sum(gradient: torch.Tensor | None, shard: torch.Tensor, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    del gradient
    return shard.new_empty(size, dtype=dtype)


def _like_shard(gradient: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    del gradient
    return torch.empty_like(shard)


ACCUMULATED_GRADIENT = define(
    "accumulated_gradient(Tensor? gradient, Tensor shard, int[] size, ScalarType dtype) -> Tensor", _not_run, _sum
)
"""``graphopt.accumulated_gradient(Tensor? gradient, Tensor shard, int[] size, ScalarType dtype) -> Tensor``: the sum
of this rank's whole gradients of the parameter that ``shard`` is a part of, this one included; contiguous."""

NOT_REDUCED = define("not_reduced(Tensor sum, Tensor shard) -> Tensor", _not_run, _like_shard)
"""``graphopt.not_reduced(Tensor sum, Tensor shard) -> Tensor``: stands for the gradient of a shard, of which there is
none before the sum is reduced."""
