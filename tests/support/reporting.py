"""What the tests of reports share: models so small that their programs can be read, and texts without what varies."""

from __future__ import annotations

import re

import torch
from torch import nn

from graphopt import Program
from tests.support.training import captured


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(4, 4, bias=False), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(torch.sigmoid(self.linear(x)))


class Net(nn.Module):
    """Blocks, and in front of them a scaling of the input if ``scaled``."""

    def __init__(self, blocks: int = 2, *, scaled: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.scaled = scaled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scaled:
            x = x * 2 + 1
        for block in self.blocks:
            x = block(x)
        return x


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Drop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.drop = nn.Parameter(torch.ones(4)), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.exp(self.drop(x + self.weight))


def total(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The sum of what the model returns."""
    return model(x).sum()


def joint(model: nn.Module, *sizes: int) -> Program:
    """The joint program of ``total`` for a random input of ``sizes``."""
    return captured(model, torch.randn(sizes), loss=total)


def without_line_numbers(text: str) -> str:
    """Where the source of a test begins is nothing that a report promises."""
    return re.sub(r"\.py:\d+ in", ".py:N in", text)


def plain(text: str) -> str:
    """Without line numbers, without peaks (kernels differ in what they need), without a line break at the end."""
    return re.sub(r"peak(:?) [\d.]+ k?B.*", r"peak\1 ...", without_line_numbers(text)).rstrip("\n")
