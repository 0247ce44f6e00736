"""Training with sizes that change from batch to batch, in eager mode and by graphopt, and a small language model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

import graphopt
from graphopt import Program
from graphopt.runtime.calls.serving import Serving
from tests.support.training import OPTIMIZERS, Block, Loss, Passes

Way = Literal["eager", "drop-in", "step"]

WORDS, LONGEST = 13, 128


class Lengths(nn.Module):
    """A language model with learned positions, of which a sequence takes as many as it has words."""

    def __init__(self, layers: int = 1, d: int = 8) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(WORDS, d), nn.Embedding(LONGEST, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(layers))
        self.head = nn.Linear(d, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def next_word(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def sentences(lengths: Sequence[int], rows: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A batch of random words and targets for each length."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(rows, length) for length in lengths]
    return [
        (torch.randint(WORDS, shape, generator=generator), torch.randint(WORDS, shape, generator=generator))
        for shape in shapes
    ]


@dataclass
class Trained:
    """What training left, and what graphopt captured for it."""

    tensors: list[torch.Tensor]
    serving: Serving[Any] | None

    @property
    def captures(self) -> int:
        assert self.serving is not None
        return len(self.serving.captures.all())

    @property
    def programs(self) -> list[Program]:
        """The programs of all captures and plans."""
        assert self.serving is not None
        return [capture.rewritten.program for capture in self.serving.everything()]


def trained(
    way: Way,
    model: nn.Module,
    loss: Loss,
    batches: Sequence[tuple[Any, ...]],
    passes: Passes = (),
    *,
    every: int = 1,
    **options: Any,
) -> Trained:
    """Train a copy of a model: losses, parameters, buffers and the generator's state."""
    torch.manual_seed(0)
    model = copy.deepcopy(model)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    losses, serving = [], None
    if way == "step":
        step = graphopt.optimize_step(model, optimizer, passes, loss=loss, **options).accumulate(every)
        losses = [step(*batch).clone() for batch in batches]
        serving = step._runner.serving
    else:
        called = model if way == "eager" else graphopt.optimize(model, passes, **options)
        for number, batch in enumerate(batches, 1):
            value = loss(called, *batch)
            (value / every).backward()
            losses.append(value.detach())
            if number % every == 0:
                optimizer.step()
                optimizer.zero_grad()
        serving = None if way == "eager" else called._graphopt.runner.serving  # type: ignore[union-attr]
    return Trained([*losses, *model.parameters(), *model.buffers(), torch.random.get_rng_state()], serving)


def assert_trains_alike(
    way: Way, model: nn.Module, loss: Loss, batches: Sequence[tuple[Any, ...]], **options: Any
) -> Trained:
    """Assert that training is bitwise that of eager mode; what graphopt did."""
    every = options.get("every", 1)
    found = trained(way, model, loss, batches, **options)
    wanted = trained("eager", model, loss, batches, every=every)
    for mine, eager in zip(found.tensors, wanted.tensors, strict=True):
        assert torch.equal(mine, eager)
    return found
