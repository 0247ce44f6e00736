"""Updating each parameter as soon as its gradient is final."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from graphopt.ir.program import Program
from graphopt.rewriting.memory.order.early_updates import early_updates
from graphopt.rewriting.pass_ import Changed, Numerics, Pass, PassStage

__all__ = ["FuseUpdate"]


@final
@dataclass(frozen=True)
class FuseUpdate(Pass):
    """Update each parameter as soon as its gradient is final, so that all gradients never live together.

    In a whole-step program the list ops of the update are split into one op per parameter, the same kernels on the same
    elements (``ir/ops/updates/foreach.py`` says which), and each op moves up: behind the call that makes the gradient
    final and behind the last call that reads what it overwrites, recomputation included. Ops that only prepare an
    update stay next to the op that they prepare it for. Parameters, state and losses equal the captured program's to
    the last bit.

    Updates that would raise the peak during backward, because they create state (an optimizer's first step) or need
    room for themselves, stay behind it. Nothing is done where the update needs all gradients first (a norm or a check
    over all of them), where two parameters share memory without being tied, and in a drop-in program, whose optimizer
    runs on its own. A compiler backend runs the update behind what it compiles, so there the peak stays as it was.

    As in LOMO, Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources", 2023
    (arXiv 2306.09782), for any optimizer that can be traced.

    Example:
        >>> step = graphopt.optimize_step(model, optimizer, [FuseUpdate()], loss=loss).prepare(x)
        >>> step.records[0].name
        'fuse-update'
    """

    name: ClassVar[str] = "fuse-update"
    stage: ClassVar[PassStage] = "last"
    numerics: ClassVar[Numerics] = "bitwise"

    def apply(self, program: Program) -> Changed:
        """See the class; rewrites a step program."""
        found = early_updates(program, program.memory(), self.name)
        if isinstance(found, str):
            return Changed(reason=found)
        program.take_over(found.program)
        return Changed(
            counts={"updates moved": len(found.early), "list ops split": found.split},
            tensors=tuple(found.early),
            lines=found.lines,
        )
