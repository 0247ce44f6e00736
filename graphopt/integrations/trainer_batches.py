"""Batches of any size from a data loader, as large as they can get."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from graphopt.errors import GraphoptError

__all__ = ["longest_rows"]

_LOOKED_AT = 10_000
"""Rows among which the longest one is looked for."""


def longest_rows(loader: Any) -> Callable[[int], Any]:
    """What gives a batch of so many rows, each like the longest one of the data.

    Args:
        loader: of a data set with a length; of more than 10,000 rows the first ones are looked at.

    Raises:
        GraphoptError: for data without a length.
    """
    data = loader.dataset
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise GraphoptError("auto_find_batch_size looks at the rows of the data, and these have no length: give a size")
    found = max((data[number] for number in range(min(len(data), _LOOKED_AT))), key=_elements)

    def batch(count: int) -> Any:
        return loader.collate_fn([dict(found) if isinstance(found, Mapping) else found for _ in range(count)])

    return batch


def _elements(row: Any) -> int:
    """How many numbers are in a row."""
    if isinstance(row, torch.Tensor):
        return row.numel()
    if isinstance(row, Mapping):
        return sum(map(_elements, row.values()))
    if isinstance(row, Iterable) and not isinstance(row, (str, bytes)):
        return sum(map(_elements, row))
    return 1
