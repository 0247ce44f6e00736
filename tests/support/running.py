"""What the tests of `optimize` and `optimize_step` share: a small network, inputs, a backend that looks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from tests.support.training import Net, identical, mean_square


def rows(count: int) -> torch.Tensor:
    """A batch of ``count`` rows of 8 features."""
    return torch.linspace(-1, 1, count * 8).reshape(count, 8).cos()


X = torch.linspace(-1, 1, 32).reshape(4, 8)


def network(p: float = 0.3) -> Net:
    """Three linear layers, tanh between them, and one dropout; the same numbers every time."""
    torch.manual_seed(0)
    return Net(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(p), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 8))


class Gate(nn.Module):
    """Two tensors of one shape go in."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.a(x).tanh() * y


class Mixed(nn.Module):
    """Two regions of low precision, one of them with a region of full precision inside."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = network(p=0.0), network(p=0.0), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.a(x)
            with torch.autocast("cpu", enabled=False):
                y = self.c(y.float())
        with torch.autocast("cpu", dtype=torch.float16):
            return self.b(y).float()


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


@dataclass(eq=False)
class Compiler:
    """A backend that compiles nothing and keeps what it was given."""

    given: list[tuple[fx.GraphModule, Sequence[Any]]] = field(default_factory=list)

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.given.append((module, inputs))
        return module

    @property
    def halves(self) -> int:
        """How many pairs of forward and backward were compiled."""
        return len(self.given) // 2


def gradients(model: nn.Module, *batch: Any, seed: int = 1) -> list[torch.Tensor | None]:
    """What one training call leaves in ``.grad``."""
    model.zero_grad()
    torch.manual_seed(seed)
    mean_square(model, *batch).backward()
    return [parameter.grad for parameter in model.parameters()]


def same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two lists of tensors (or None) are equal to the last bit."""
    return len(one) == len(other) and all(identical(a, b) for a, b in zip(one, other, strict=True))
