"""A model that reads something of Python's at each call, for tests of what a capture notices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["Reads"]


class Reads(nn.Module):
    """A linear layer, times what a function gives.

    Args:
        read: the function.
    """

    def __init__(self, read: Callable[[], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.read = nn.Linear(4, 4), read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of shape (batch, 4), as ``x`` is."""
        return self.linear(x) * self.read()
