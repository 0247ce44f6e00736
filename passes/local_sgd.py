"""Local SGD: each rank trains on its own for some steps, then the parameters are averaged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import nn

from graphopt.errors import GraphoptError
from graphopt.ir.program import Program
from graphopt.rewriting.distributed.local_steps import LOCAL, SYNCHRONOUS, average_model, check_steps, run_locally
from graphopt.rewriting.pass_ import Changed, Numerics, PassStage
from graphopt.rewriting.training_pass import Clock, TrainingPass

__all__ = ["LocalSGD"]


@final
@dataclass(frozen=True)
class LocalSGD(TrainingPass):
    """Exchange parameters at every ``k_steps``-th step in place of gradients at every step.

    Until ``begin_step`` gradients are exchanged as ``DataParallel`` says (post-local SGD). From then on each rank
    updates its parameters with its own gradients, and behind every ``k_steps``-th such update parameters are replaced
    by their mean over the ranks, in fused buckets as large as those of the gradients. Buffers are exchanged as
    ``DataParallel(buffers=...)`` says, at the averaging steps only. The step compiles one program for each kind of
    step, and chooses by the number of the update, which is the same on all ranks.

    With ``k_steps=1`` and SGD, with or without momentum, training is that of exchanged gradients but for rounding.
    Behind the last step call ``step.synchronize()``, or name that step as ``last_step``, so that all ranks end with
    the same model. Under loss scaling a step is skipped on all ranks where it is on one, and they share the scale.

    Stich, "Local SGD Converges Fast and Communicates Little", 2019 (arXiv 1805.09767); Lin et al., "Don't Use Large
    Mini-Batches, Use Local SGD", 2020 (arXiv 1808.07217).

    Args:
        k_steps: updates from one averaging to the next; at least 1.
        begin_step: updates with exchanged gradients before the first local one.
        last_step: number of the last update, counted from 0, which averages whatever the interval; None where it is not
            known.
        average_state: whether the optimizer's state (momentum) is averaged too; it is not by default, as published.

    Example:
        >>> str(graphopt.Pipeline([LocalSGD(k_steps=8), DataParallel()]))
        'data-parallel,local-sgd{k-steps=8}'
    """

    name: ClassVar[str] = "local-sgd"
    stage: ClassVar[PassStage] = "step"
    numerics: ClassVar[Numerics] = "changes"
    after: ClassVar[tuple[str, ...]] = ("data-parallel", "mixed-precision", "scale-loss", "clip-gradients")
    requires: ClassVar[tuple[str, ...]] = ("data-parallel",)
    conflicts: ClassVar[tuple[str, ...]] = ("adaptive-local-sgd", "deep-gradient-compression", "shard-optimizer")

    k_steps: int = 4
    begin_step: int = 0
    last_step: int | None = None
    average_state: bool = False

    def __post_init__(self) -> None:
        if self.k_steps < 1:
            raise GraphoptError(f"k_steps is a number of updates of at least 1, got {self.k_steps}")
        check_steps(self.begin_step, self.last_step)

    def form(self, clock: Clock) -> str:
        """Synchronous steps first, then local ones; the program of the long run is that of an averaging step."""
        if clock.steps < self.begin_step:
            return SYNCHRONOUS
        due = (clock.steps - self.begin_step + 1) % self.k_steps == 0
        return "" if due or clock.steps == self.last_step else LOCAL

    def settle(self, program: Program, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Average the parameters now."""
        average_model(program, model, optimizer, origin=self.name)

    def apply(self, program: Program) -> Changed:
        """See the class; rewrites a step program."""
        form = program.context.forms.get(self.name, "")
        if form == SYNCHRONOUS:
            return Changed(reason=f"gradients are exchanged until step {self.begin_step}")
        changed, _ = run_locally(program, average=form != LOCAL, state=self.average_state, origin=self.name)
        return changed
