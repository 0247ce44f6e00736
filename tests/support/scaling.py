"""What the tests of loss scaling share: a network whose gradients can be made infinite one by one, and eager loops."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.training import MakeOptimizer, Training

NAMES = ("first.weight", "first.bias", "second.weight", "second.bias")
"""The parameters of ``Fragile``, in its order."""


class Spoil(torch.autograd.Function):
    """The identity, whose gradient is multiplied by ``factor``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(factor)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        (factor,) = ctx.saved_tensors
        return gradients[0] * factor, None


class Fragile(nn.Module):
    """Two linear layers; element i of ``factors`` multiplies the gradient of parameter i."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        spoilt = [Spoil.apply(p, f) for p, f in zip(self.parameters(), factors, strict=True)]
        return F.linear(F.relu(F.linear(x, spoilt[0], spoilt[1])), spoilt[2], spoilt[3])


def loss_of(model: nn.Module, x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """The mean square of the output."""
    return model(x, factors).square().mean()


def batch(number: int, bad: Sequence[int] = ()) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch that makes the gradients of the parameters with the numbers ``bad`` infinite."""
    factors = torch.ones(4)
    factors[list(bad)] = torch.inf
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(number)), factors


def batches(script: str, bad: Sequence[int] = (2,)) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A batch for each letter: ``g`` for one with finite gradients, ``b`` for a bad one."""
    return [batch(number, bad if letter == "b" else ()) for number, letter in enumerate(script)]


def eager(
    model: nn.Module, make: MakeOptimizer, run: Iterable[tuple[Any, ...]], *, every: int = 1, loss: Any = loss_of,
    clip: Any = None, **options: Any,
) -> tuple[Training, list[float]]:  # fmt: skip
    """Train with ``torch.amp.GradScaler``: what is left, and the scale after each batch.

    The fused optimizers are skipped by the host here: torch's fused SGD leaves momentum that was never written where
    its first step is skipped on the device.
    """
    optimizer, found, scales = make(model.parameters()), Training(), []
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    scaler = torch.amp.GradScaler("cpu", **options)
    for number, inputs in enumerate(run):
        value = loss(model, *inputs)
        scaler.scale(value / every if every > 1 else value).backward()
        found.add(f"{number}.loss", value)
        if number % every == every - 1:
            if clip is not None:
                scaler.unscale_(optimizer)
                clip(model.parameters())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return found.end(model, optimizer), scales
