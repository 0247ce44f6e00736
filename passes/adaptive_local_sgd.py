"""Local SGD whose interval follows the loss and the learning rate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import nn

from graphopt.errors import GraphoptError
from graphopt.ir.program import Program
from graphopt.rewriting.distributed.local_steps import (
    LOCAL,
    SYNCHRONOUS,
    average_model,
    check_steps,
    hold_mean_loss,
    run_locally,
)
from graphopt.rewriting.pass_ import Changed, Numerics, PassStage
from graphopt.rewriting.training_pass import Clock, TrainingPass

__all__ = ["AdaptiveLocalSGD"]

_LOSS = "adaptive-local-sgd/loss"
_INTERVAL = "adaptive-local-sgd/interval"
_DUE = "adaptive-local-sgd/due"
_FIRST_LOSS = "adaptive-local-sgd/first loss"
_FIRST_RATE = "adaptive-local-sgd/first rate"


@final
@dataclass(frozen=True)
class AdaptiveLocalSGD(TrainingPass):
    """Local SGD (see ``LocalSGD``) that averages rarely while the loss is high, and more often as it falls.

    Update ``begin_step`` is the first of an interval of ``init_k_steps``. At the averaging step that ends an interval
    the mean of the ranks' losses ``F`` and the learning rate ``r`` of the first parameter group give the next one::

        k = ceil(sqrt(r0 / r * F / F0) * init_k_steps), between 1 and max_k_steps

    where ``F0`` and ``r0`` are those of the first averaging step. The loss is exchanged with everything else, so that
    every rank comes to the same ``k``. Where a loss is not finite or not above 0, or the rate is 0, ``k`` stays.

    Wang and Joshi, "Adaptive Communication Strategies to Achieve the Best Error-Runtime Trade-off in Local-Update SGD",
    2019 (arXiv 1810.08313), the rule with a learning rate that changes.

    Args:
        init_k_steps: updates in the first interval; at least 1.
        begin_step: updates with exchanged gradients before it.
        max_k_steps: the longest interval.
        last_step: number of the last update, counted from 0, which averages whatever the interval; None where it is not
            known, then call ``step.synchronize()`` behind it.
        average_state: whether the optimizer's state (momentum) is averaged too.

    Example:
        >>> str(graphopt.Pipeline([AdaptiveLocalSGD(max_k_steps=8), DataParallel()]))
        'data-parallel,adaptive-local-sgd{max-k-steps=8}'
    """

    name: ClassVar[str] = "adaptive-local-sgd"
    stage: ClassVar[PassStage] = "step"
    numerics: ClassVar[Numerics] = "changes"
    after: ClassVar[tuple[str, ...]] = ("data-parallel", "mixed-precision", "scale-loss", "clip-gradients")
    requires: ClassVar[tuple[str, ...]] = ("data-parallel",)
    conflicts: ClassVar[tuple[str, ...]] = ("local-sgd", "deep-gradient-compression", "shard-optimizer")
    changes_signature: ClassVar[bool] = True

    init_k_steps: int = 1
    begin_step: int = 0
    max_k_steps: int = 16
    last_step: int | None = None
    average_state: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.init_k_steps <= self.max_k_steps:
            raise GraphoptError(
                f"init_k_steps is a number of updates between 1 and max_k_steps ({self.max_k_steps}), got "
                f"{self.init_k_steps}"
            )
        check_steps(self.begin_step, self.last_step)

    def form(self, clock: Clock) -> str:
        """Synchronous steps first, then local ones; the program of the long run is that of an averaging step."""
        if clock.steps < self.begin_step:
            return SYNCHRONOUS
        due = clock.steps >= clock.numbers.get(_DUE, self.begin_step + self.init_k_steps - 1)
        return "" if due or clock.steps == self.last_step else LOCAL

    def advance(self, clock: Clock) -> None:
        """After an averaging step, decide when the next one is."""
        done = clock.steps - 1
        if done < self.begin_step or done < clock.numbers.get(_DUE, self.begin_step + self.init_k_steps - 1):
            return
        loss, rate = clock.state(_LOSS).item(), clock.rates()[0]
        first_loss = clock.numbers.setdefault(_FIRST_LOSS, loss)
        first_rate = clock.numbers.setdefault(_FIRST_RATE, rate)
        interval = int(clock.numbers.get(_INTERVAL, self.init_k_steps))
        if _usable(loss, first_loss, rate, first_rate):
            wanted = math.ceil(math.sqrt(first_rate / rate * loss / first_loss) * self.init_k_steps)
            interval = min(max(1, wanted), self.max_k_steps)
        elif not _usable(first_loss, first_rate):
            del clock.numbers[_FIRST_LOSS], clock.numbers[_FIRST_RATE]
        clock.numbers[_INTERVAL] = interval
        clock.numbers[_DUE] = done + interval

    def settle(self, program: Program, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Average the parameters now."""
        average_model(program, model, optimizer, origin=self.name)

    def apply(self, program: Program) -> Changed:
        """See the class; rewrites a step program."""
        form = program.context.forms.get(self.name, "")
        if form == SYNCHRONOUS:
            return Changed(reason=f"gradients are exchanged until step {self.begin_step}")
        changed, group = run_locally(program, average=form != LOCAL, state=self.average_state, origin=self.name)
        if group is not None and form != LOCAL:
            hold_mean_loss(program, group, _LOSS, origin=self.name)
        return changed


def _usable(*values: float) -> bool:
    return all(math.isfinite(value) and value > 0 for value in values)
