"""The arguments of a call for other numbers of rows than the example has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from graphopt import _torch
from graphopt.errors import ArgumentError

__all__ = ["Arguments", "batch_of_rows", "example_rows", "of_rows"]

Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]
"""The positional and the named arguments of a call."""


def batch_of_rows(batch: Any) -> Callable[[int], Arguments]:
    """What gives the arguments of a call for a number of rows.

    Args:
        batch: a function of the number of rows, or an example: a tensor, a tuple of arguments, or a dict of named ones.
            The first axes of an example's tensors are its rows; tensors without axes and other values stay.

    Raises:
        ArgumentError: where the first axes of an example differ.
    """
    if callable(batch) and not isinstance(batch, torch.Tensor):
        return lambda rows: _arguments(batch(rows))
    example = _arguments(batch)
    example_rows(example, "give a function of the number of rows")
    return lambda rows: of_rows(example, rows)


def of_rows(example: Arguments, rows: int) -> Arguments:
    """The arguments of a call like an example for a number of rows: zeros, and what has no rows as it is."""
    made: Arguments = _torch.pytree.tree_map(
        lambda leaf: leaf.new_zeros((rows, *leaf.shape[1:])) if _has_rows(leaf) else leaf, example
    )
    return made


def example_rows(example: Arguments, otherwise: str) -> int:
    """The rows of the arguments of a call.

    Args:
        example: the arguments.
        otherwise: what to do where they are not clear.

    Raises:
        ArgumentError: where the first axes of tensors differ, or there is none.
    """
    sizes = {leaf.shape[0] for leaf in _torch.pytree.tree_leaves(example) if _has_rows(leaf)}
    if len(sizes) != 1:
        found = ", ".join(map(str, sorted(sizes))) or "none"
        raise ArgumentError(
            f"the first axes of the batch's tensors have the sizes {found}, and it is not clear which are its rows: "
            f"{otherwise}"
        )
    return int(sizes.pop())


def _arguments(batch: Any) -> Arguments:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0
