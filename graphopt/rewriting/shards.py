"""Shards: the part of every parameter that one rank updates, and of which it keeps the optimizer's state.

A parameter is taken as the flat sequence of its elements in the order of memory. Of ``N`` ranks each gets as many of
them, ``ceil(elements / N)``, one rank after the other; the last ones may get fewer, or none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from graphopt.errors import GraphoptError
from graphopt.ir.ops.values import is_dense

__all__ = [
    "NUMBERS", "Shards", "WholeParameter", "check_dense", "holds_elements", "piece_of", "shard_of", "shard_state",
    "whole_parameter", "whole_parameters",
]  # fmt: skip

Shards = Mapping[str, tuple[int, int]]
"""The first element and the number of elements of this rank's shard of each parameter, by the parameter's name."""

NUMBERS = ("step", "mu_product", "eta", "mu")
"""What torch's optimizers keep for a parameter as a whole."""


@dataclass(frozen=True)
class WholeParameter:
    """What a parameter is a shard of: ranks have its rows (along its first dimension), one after the other.

    Attributes:
        size: of the whole.
        strides: of the whole.
        group: name of the ranks that have the shards.
        first: the number of this rank's first element.
    """

    size: tuple[int, ...]
    strides: tuple[int, ...]
    group: str
    first: int


_wholes: ContextVar[Mapping[int, WholeParameter] | None] = ContextVar("wholes", default=None)


@contextlib.contextmanager
def whole_parameters(known: Mapping[int, WholeParameter]) -> Iterator[None]:
    """Meanwhile, an update of these shards (by ``id``) is traced for what takes whole parameters in between."""
    token = _wholes.set(known)
    try:
        yield
    finally:
        _wholes.reset(token)


def whole_parameter(shard: torch.Tensor) -> WholeParameter | None:
    """What a parameter is a shard of; None for others."""
    return (_wholes.get() or {}).get(id(shard))


def piece_of(elements: int, ranks: int) -> int:
    """The largest shard of so many elements."""
    return -(-elements // ranks)


def shard_of(elements: int, rank: int, ranks: int) -> tuple[int, int]:
    """The first element and the number of elements of a rank's shard.

    Args:
        elements: of the parameter.
        rank: of the group, from 0 on.
        ranks: of the group.
    """
    piece = piece_of(elements, ranks)
    first = min(rank * piece, elements)
    return first, min(piece, elements - first)


def check_dense(name: str, tensor: torch.Tensor) -> None:
    """Raise for a parameter whose memory has gaps or overlaps, so that its elements are no flat sequence."""
    if not is_dense(tensor):
        raise GraphoptError(
            f"the parameter {name!r} (shape {list(tensor.shape)}, strides {list(tensor.stride())}) does not fill its "
            "memory without gaps, and cannot be sharded: make it contiguous, or leave shard-optimizer out"
        )


def holds_elements(key: str, value: Any, parameter: torch.Tensor) -> bool:
    """Whether a piece of optimizer state has one element for each of the parameter's.

    Args:
        key: what the optimizer calls it.
        value: anything that it keeps.
        parameter: whose state it is.
    """
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return False
    return value.dim() > 0 or key not in NUMBERS


def shard_state(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor], shards: Shards) -> int:
    """Keep this rank's shard of state that exists in full: made by the constructor, or loaded from a full checkpoint.

    Args:
        optimizer: whose state is changed; shards that it has already stay.
        parameters: by name.
        shards: of this rank.

    Returns:
        how many tensors became shards.

    Raises:
        GraphoptError: for state that is neither full nor this rank's shard, naming it.
    """
    changed = 0
    for name, (first, length) in shards.items():
        parameter = parameters[name]
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, torch.Tensor) or value.shape == (length,) or (value.dim() == 0 and key in NUMBERS):
                continue
            if not holds_elements(key, value, parameter):
                raise GraphoptError(
                    f"the optimizer's state {name}/{key} has the shape {list(value.shape)}, and this rank keeps "
                    f"{length} of the {parameter.numel()} elements of {name!r}: load what this rank has saved, or the "
                    "whole state (graphopt.sharded_state.consolidate makes it of what other ranks saved)"
                )
            flat = torch.empty_like(parameter, dtype=value.dtype).copy_(value).as_strided([value.numel()], [1])
            optimizer.state[parameter][key] = flat[first : first + length].clone()
            changed += 1
    return changed
