"""Accumulations call by call: what each call takes in memory against what its program says, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import graphopt
from graphopt import Pass, Program
from graphopt.ir.ops.transfers import residents
from graphopt.runtime.state.sharded_parameter import is_sharded
from graphopt.runtime.step.step_variants import CompiledStep
from graphopt.runtime.step.train_step import TrainStep
from tests.support.budgets import IMAGES, conv
from tests.support.training import Blocks, Loss, MakeOptimizer, mean_square, next_token

ROWS = torch.linspace(-1, 1, 256 * 128).reshape(256, 128).cos()
TOKENS = torch.arange(8 * 12).reshape(8, 12) % 11


class Tied(Blocks):
    """A language model whose head has the weights of its embedding."""

    def __init__(self) -> None:
        super().__init__(layers=2)
        self.head.weight = self.embed.weight


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


@dataclass(frozen=True)
class Trained:
    """What is trained: how the model is made, on which batch, with which loss."""

    make: Callable[[], nn.Module]
    batch: torch.Tensor
    loss: Loss = mean_square

    def step(self, passes: Sequence[Pass] = (), optimizer: MakeOptimizer = _adamw, **options: Any) -> TrainStep:
        """A whole step of a new model."""
        torch.manual_seed(0)
        model = self.make()
        return graphopt.optimize_step(model, optimizer(model.parameters()), passes, loss=self.loss, **options)

    def batches(self, count: int) -> list[tuple[torch.Tensor]]:
        """Some batches of one shape."""
        return [(self.batch.roll(number, 0),) for number in range(count)]


MODELS = {
    "mlp": Trained(lambda: nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(6))), ROWS),
    "cnn": Trained(conv, IMAGES),
    "gpt": Trained(lambda: Blocks(layers=2), TOKENS, next_token),
    "tied": Trained(Tied, TOKENS, next_token),
}


@dataclass(frozen=True)
class Call:
    """One call of a step.

    Attributes:
        program: that it ran.
        measured: the most bytes that were in memory, what was there before included.
        loss: that it returned.
    """

    program: Program
    measured: int
    loss: torch.Tensor

    @property
    def predicted(self) -> int:
        """The peak that its program says."""
        return self.program.memory().peak_bytes


def resident_bytes(step: TrainStep, *batch: torch.Tensor) -> int:
    """What is in memory between two calls: the model, the optimizer's state, gradients, what passes keep, a batch."""
    state = [value for kept in step.optimizer.state.values() for value in kept.values()]
    tensors = [
        *(parameter for parameter in step.model.parameters() if not is_sharded(parameter)),
        *step.model.buffers(),
        *(value for value in state if isinstance(value, torch.Tensor)),
        *step._progress.gradients.values(),
        *step._store.tensors(),
        *batch,
    ]
    there = [tensor for tensor in tensors if not residents().tier_of(tensor)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in there}.values())


@contextmanager
def watched(step: TrainStep) -> Iterator[Callable[..., Call]]:
    """While inside, what runs a batch by a step and measures the call, after a capture ahead where ``prepare``."""
    programs, find = step._programs, step._programs.variant
    found: list[CompiledStep] = []
    rates: set[int] = set()

    def variant(*args: Any) -> CompiledStep:
        found.append(find(*args))
        return found[-1]

    def call(*batch: Any, prepare: bool = True, run: Callable[..., Any] = TrainStep.__call__) -> Call:
        if prepare:
            step.prepare(*batch)
        before = resident_bytes(step, *(leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)))
        measured = graphopt.measure_peak(lambda: run(step, *batch))
        ran = found[-1]
        numbers = ran.program.inputs_of("hyperparameter") if id(ran.binding) in rates else []
        rates.add(id(ran.binding))  # which keeps the learning rates as tensors from its first call on
        before += sum(8 for _, spec in numbers if spec.target.startswith("lr["))
        return Call(ran.program, before + measured.allocated_peak_bytes, measured.result)

    programs.variant = variant  # type: ignore[method-assign]
    yield call
    programs.variant = find  # type: ignore[method-assign]


def run_calls(step: TrainStep, batches: Sequence[tuple[Any, ...]], *, prepare: bool = True) -> Iterator[Call]:
    """Run some batches, each measured.

    Args:
        step: that runs them.
        batches: the arguments of the calls.
        prepare: before each call, so that no capture is measured.
    """
    with watched(step) as call:
        for batch in batches:
            yield call(*batch, prepare=prepare)


def left(step: TrainStep) -> list[torch.Tensor]:
    """What training has left: parameters, buffers, the optimizer's state and the random stream."""
    state = [value for kept in step.optimizer.state.values() for value in kept.values()]
    tensors = [*step.model.parameters(), *step.model.buffers(), *(v for v in state if isinstance(v, torch.Tensor))]
    return [*(tensor.detach().clone() for tensor in tensors), torch.get_rng_state()]
