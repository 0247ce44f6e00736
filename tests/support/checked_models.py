"""Functions of a layer and its input that look at values; pytest would rewrite their asserts in a file of tests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import nn

__all__ = ["CHECKS", "CHOICES", "LIMIT", "Calls", "Forward", "an_error"]

LIMIT = 100

Forward = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Calls(nn.Module):
    """A linear layer around a function of the user's."""

    def __init__(self, function: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear, x)


def an_assert(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    assert torch.all(x < LIMIT).item()
    result: torch.Tensor = layer(x)
    return result


def an_assert_with_text(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    assert x.min() > -LIMIT and not (x >= LIMIT).any(), "out of range"  # noqa: PT018
    result: torch.Tensor = layer(x)
    return result


def an_error(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if x.max() >= LIMIT:
        raise ValueError("too large")
    result: torch.Tensor = layer(x)
    return result


def an_error_of_numbers(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if x.max().item() >= LIMIT or torch.isnan(x).any():
        message = f"{x.max()} is too large"
        raise ValueError(message)
    result: torch.Tensor = layer(x)
    return result


def an_error_otherwise(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if bool((x < LIMIT).all()):
        result: torch.Tensor = layer(x)
    else:
        raise RuntimeError("too large")
    return result


def chooses(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = layer(x) * 2 if x.sum() > 0 else layer(x)
    return result


def decides_later(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0 and layer.training:
        raise ValueError
    result: torch.Tensor = layer(x)
    return result


def is_caught(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    try:
        return an_error(layer, x)
    except ValueError:
        result: torch.Tensor = layer(x / LIMIT)
        return result


def is_suppressed(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with contextlib.suppress(AssertionError):
        assert x.max() < LIMIT
    result: torch.Tensor = layer(x)
    return result


CHECKS = [an_assert, an_assert_with_text, an_error, an_error_of_numbers, an_error_otherwise]
"""What only raises."""

CHOICES = [chooses, decides_later, is_caught, is_suppressed]
"""What may go on otherwise."""
