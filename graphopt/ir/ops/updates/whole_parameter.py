"""Ops that stand in an update of shards around what takes a whole parameter: ``whole_of_shard``, ``shard_of_whole``.

They say where ranks have to exchange shards, and cannot be run: ``ShardOptimizer`` and ``ShardParameters`` put
exchanges in their place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphopt.errors import GraphoptError
from graphopt.ir.ops.define import define

__all__ = ["SHARD_OF_WHOLE", "WHOLE_OF_SHARD"]


def _not_run(*_: object) -> torch.Tensor:
    raise GraphoptError(
        "this update was traced for a rank's shards, and takes whole parameters in between: shard-optimizer or "
        "shard-parameters has to put exchanges between ranks there"
    )


def _whole(shard: torch.Tensor, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    return shard.new_empty_strided(shape, stride)


def _shard(whole: torch.Tensor, first: int, length: int, stride: Sequence[int]) -> torch.Tensor:
    del first, stride
    return whole.new_empty(length)


WHOLE_OF_SHARD = define("whole_of_shard(Tensor shard, int[] shape, int[] stride) -> Tensor", _not_run, _whole)
"""``graphopt.whole_of_shard(Tensor shard, int[] shape, int[] stride) -> Tensor``: all elements of a tensor, in a new
tensor of this shape and these strides, of which this rank has the flat tensor ``shard``."""

SHARD_OF_WHOLE = define("shard_of_whole(Tensor whole, int first, int length, int[] stride) -> Tensor", _not_run, _shard)
"""``graphopt.shard_of_whole(Tensor whole, int first, int length, int[] stride) -> Tensor``: of a tensor's elements, in
the order of memory with strides ``stride``, ``length`` from number ``first`` on, in a new flat tensor."""
