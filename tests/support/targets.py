"""Factories for the command line's tests; each is a TARGET: ``tests/support/targets.py:plain`` and so on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Small(nn.Module):
    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass
class Result:
    loss: torch.Tensor
    logits: torch.Tensor


class WithLabels(Small):
    """Returns an object with a ``.loss``, as models from transformers do."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Result:  # type: ignore[override]
        logits = super().forward(x)
        return Result(
            F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long) if labels is None else labels), logits
        )


def cross_entropy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(16, 8), torch.zeros(16, dtype=torch.long)


def plain() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """A model and its inputs: the drop-in program, which ends with the joint stage."""
    return Small(), (batch()[0],)


def wide_filters() -> dict[str, Any]:
    """A step whose convolutions lay out columns of their own on a CPU."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, dilation=2), nn.ReLU(), nn.Conv2d(8, 4, 5, stride=2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    inputs = torch.zeros(2, 3, 24, 24, dtype=torch.float64)
    return {"model": model, "example_inputs": inputs, "loss": mean_square, "optimizer": optimizer}


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def talkative() -> tuple[nn.Module, torch.Tensor]:
    """One tensor in place of a tuple, and a script's habit of printing."""
    print("building the model")
    return Small(), batch()[0]


def with_loss() -> dict[str, Any]:
    return {"model": Small(), "example_inputs": batch(), "loss": cross_entropy}


def step() -> dict[str, Any]:
    """A whole training step."""
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return {"model": model, "example_inputs": batch(), "loss": cross_entropy, "optimizer": optimizer}


def labelled() -> dict[str, Any]:
    """Keyword inputs, and the model's own loss."""
    x, y = batch()
    return {"model": WithLabels(), "kwargs": {"x": x, "labels": y}, "loss": True}


def labelled_without_loss() -> dict[str, Any]:
    """The same model as a drop-in: both of its results are outputs."""
    return {**labelled(), "loss": None}


def any_batch() -> dict[str, Any]:
    """One program for a range of batch sizes."""
    shapes = ({0: torch.export.Dim("batch", max=64)},)
    return {"model": Small(), "example_inputs": (batch()[0],), "dynamic_shapes": shapes}
