"""Questions that a model asks of values which no input reaches: answered while it is traced, as in eager mode.

Models of ``transformers`` look at the positions that they made themselves, and leave the causal mask to the attention
kernel where these count up from 0. They do not look while they are traced, build the mask, repeat the keys and values
for it, and round otherwise than in eager mode.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch

from graphopt import _torch

__all__ = ["answered"]

_MODULE, _FUNCTION = "transformers.masking_utils", "find_packed_sequence_indices"


@contextlib.contextmanager
def answered() -> Iterator[None]:
    """While a model's Python runs under export, tell it whether its own positions are those of one sequence each."""
    module = sys.modules.get(_MODULE)
    original = getattr(module, _FUNCTION, None)
    if original is None:
        yield
        return

    def find(position_ids: torch.Tensor) -> torch.Tensor | None:
        """The number of each position's sequence within its row; None where every row is one sequence."""
        found: torch.Tensor | None = original(position_ids)
        return None if found is not None and _torch.is_known_zero(found) else found

    setattr(module, _FUNCTION, find)
    try:
        yield
    finally:
        setattr(module, _FUNCTION, original)
