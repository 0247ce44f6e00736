"""DiLoCo: each rank trains on its own for many steps, then all take an outer step together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import nn

from graphopt.errors import GraphoptError
from graphopt.ir.program import Program
from graphopt.ir.words.written_units import format_bytes
from graphopt.rewriting.distributed.dense.remove_all_reduce import remove_buffer_averages
from graphopt.rewriting.distributed.local_steps import (
    LOCAL,
    NOT_EXCHANGED,
    NOTHING_SENT,
    average_updated,
    keep_gradients_local,
)
from graphopt.rewriting.distributed.outer_step import OuterSettings, OuterStep, common_parameter
from graphopt.rewriting.pass_ import Changed, Numerics, PassStage
from graphopt.rewriting.training_pass import Clock, TrainingPass

__all__ = ["DiLoCo"]

_BITS = (32, 16, 8, 4)

_ARRIVES = " arrives"
"""How the form of a program ends in which an exchange that began in an earlier run ends."""


@final
@dataclass(frozen=True)
class DiLoCo(TrainingPass):
    """Let ranks train on their own, with an outer step on how far they have gone after every ``every`` updates.

    Between outer steps each rank updates its parameters with its own gradients, by the optimizer that is the user's.
    Behind the last of ``every`` updates ranks exchange their pseudo-gradients: how much the parameters that all had in
    common exceed their own. The mean of these is the gradient of an outer step on the common parameters, SGD with
    Nesterov momentum, and every rank goes on from there. The inner optimizer's state stays the rank's own.

    With ``fragments`` parameters are divided by bytes, neighbours together, and every ``every / fragments`` updates one
    of the fragments has its outer step, each in turn. With ``delay`` its exchange begins so many updates before, beside
    which the rank goes on computing; then ``mix`` is the share of the common parameters in what the rank's own become,
    the rest being what it has learned meanwhile. Both are those of Streaming DiLoCo, and agree with torchft's
    ``DiLoCo(fragment_sync_delay=delay, fragment_update_alpha=1 - mix)``.

    ``bits`` are those in which each element of a pseudo-gradient travels: 32 stand for its own dtype, with 16 it is
    rounded to bfloat16 and added up there, with 8 and 4 it is rounded at random to the steps of its 256 neighbours, and
    every rank adds up in float32 what all have sent. With ``sparsity`` the largest entries of each tensor travel; the
    others wait on the rank, and ``error_decay`` of them is added to its next pseudo-gradient. SparseLoCo is
    ``outer_lr=1, outer_momentum=0`` with it: the residuals stand for the momentum (there entries are chosen in pieces
    of 4,096 elements, here of a whole tensor).

    Each rank keeps the common parameters and the outer momentum beside its own, with ``delay`` what is under way, and
    with ``sparsity`` what waits; all of it is pass state, saved with the step. Behind the last update
    ``step.synchronize()`` gives all ranks the mean of their parameters. Buffers are exchanged as
    ``DataParallel(buffers=...)`` says, where an outer step ends. Under loss scaling an update is skipped on all ranks
    where it is on one.

    Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023 (arXiv 2311.08105);
    Douillard et al., "Streaming DiLoCo with overlapping communication", 2025 (arXiv 2501.18512); Sarfi et al.,
    "Communication Efficient LLM Pre-training with SparseLoCo", 2025 (arXiv 2508.15706).

    Args:
        every: updates from one outer step of a parameter to its next; a multiple of ``fragments``.
        outer_lr: learning rate of the outer step.
        outer_momentum: its momentum, 0 or more and below 1.
        fragments: how many parts of the parameters have outer steps of their own.
        delay: updates during which an exchange is under way; fewer than ``every / fragments``.
        mix: share of the common parameters in what a rank's own become, above 0 and up to 1.
        bits: 32, 16, 8 or 4.
        sparsity: share of the elements that is not sent, 0 or more and below 1; with 32 or 16 bits.
        error_decay: what is left of what was not sent at the next outer step, from 0 to 1; with ``sparsity``.

    Raises:
        GraphoptError: for other numbers, for ``error_decay`` without ``sparsity``, and with ``delay`` where other
            parameters are trained than before.

    Example:
        >>> str(graphopt.Pipeline([DiLoCo(every=500), DataParallel()]))
        'data-parallel,diloco{every=500}'
    """

    name: ClassVar[str] = "diloco"
    stage: ClassVar[PassStage] = "step"
    numerics: ClassVar[Numerics] = "changes"
    after: ClassVar[tuple[str, ...]] = ("data-parallel", "mixed-precision", "scale-loss", "clip-gradients")
    requires: ClassVar[tuple[str, ...]] = ("data-parallel",)
    conflicts: ClassVar[tuple[str, ...]] = (
        "local-sgd",
        "adaptive-local-sgd",
        "deep-gradient-compression",
        "compress-gradients",
        "shard-optimizer",
        "shard-parameters",
        "offload-state",
    )
    changes_signature: ClassVar[bool] = True

    every: int = 100
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    fragments: int = 1
    delay: int = 0
    mix: float = 1.0
    bits: int = 32
    sparsity: float = 0.0
    error_decay: float = 0.95

    def __post_init__(self) -> None:
        rules = {
            f"every is a number of updates of at least 1, got {self.every}": self.every >= 1,
            f"outer_lr must be above 0, got {self.outer_lr}": self.outer_lr > 0,
            f"outer_momentum must be at least 0 and below 1, got {self.outer_momentum}": 0 <= self.outer_momentum < 1,
            f"fragments must be at least 1, got {self.fragments}": self.fragments >= 1,
            f"mix must be above 0 and at most 1, got {self.mix}": 0 < self.mix <= 1,
            f"bits is one of {', '.join(map(str, _BITS))}, got {self.bits}": self.bits in _BITS,
            f"sparsity must be at least 0 and below 1, got {self.sparsity}": 0 <= self.sparsity < 1,
            f"error_decay must be from 0 to 1, got {self.error_decay}": 0 <= self.error_decay <= 1,
        }
        wrong = [rule for rule, holds in rules.items() if not holds]
        if not wrong and self.every % self.fragments:
            wrong.append(
                f"every is a multiple of fragments, one of which has its outer step at a time, got every={self.every} "
                f"and fragments={self.fragments}"
            )
        elif not wrong and not 0 <= self.delay < self._interval:
            wrong.append(
                f"delay must be at least 0 and below every / fragments ({self._interval}), when the next exchange "
                f"begins, got {self.delay}"
            )
        if not self.sparsity and self.error_decay != type(self).error_decay:
            wrong.append(f"error_decay={self.error_decay} would mean nothing without sparsity")
        if self.sparsity and self.bits < 16:
            wrong.append(f"with sparsity entries travel in 32 or 16 bits, got bits={self.bits}")
        if wrong:
            raise GraphoptError("diloco: " + "; ".join(wrong))

    @property
    def _interval(self) -> int:
        """Updates from one outer step to the next one, of whichever fragment."""
        return self.every // self.fragments

    def form(self, clock: Clock) -> str:
        """Which fragment's exchange begins or ends with an update; the program shown begins the first one's."""
        turn, within = divmod(clock.steps, self._interval)
        fragment = turn % self.fragments + 1
        if within + 1 == self._interval - self.delay:
            return f"fragment {fragment}" if fragment > 1 else ""
        return f"fragment {fragment}{_ARRIVES}" if within + 1 == self._interval else LOCAL

    def settle(self, program: Program, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Give all ranks the mean of their parameters, which leaves the mean of their pseudo-gradients as it is."""
        average_updated(program, model, origin=self.name)

    def apply(self, program: Program) -> Changed:
        """See the class; rewrites a step program."""
        local = keep_gradients_local(program, origin=self.name)
        if local is None:
            return Changed(reason=NOT_EXCHANGED)
        form = program.context.forms.get(self.name, "")
        arrives = not self.delay or form.endswith(_ARRIVES)
        if form == LOCAL or not arrives:
            remove_buffer_averages(program)
        outer = OuterStep(program, local.group, self._settings, self.fragments, self.name)
        counts = {"gradients kept local": local.gradients}
        if form == LOCAL:
            return Changed(counts, lines=(NOTHING_SENT,))
        fragment = int(form.split()[1]) - 1 if form else 0
        sent = [] if form.endswith(_ARRIVES) else outer.send(fragment)
        if arrives:
            outer.merge(fragment, sent)
        names = tuple(outer.fragments[fragment])
        part = f" of fragment {fragment + 1} of {self.fragments}" if self.fragments > 1 else ""
        travel = f"{format_bytes(outer.bytes_of(fragment))} of each of {local.group.size} ranks"
        line = f"{len(names)} pseudo-gradients{part}: {travel}"
        if self.delay:
            line += ", which have arrived" if arrives else f", which arrive {self.delay} updates later"
        return Changed({**counts, "pseudo-gradients": len(names)}, tensors=names, lines=(line,))

    def check(self, program: Program, state: Callable[[str], torch.Tensor | None]) -> None:
        """Refuse another set of trained parameters where an exchange of the set before may be under way.

        Raises:
            GraphoptError: saying so.
        """
        if not self.delay:
            return
        common = {common_parameter(self.name, spec.target) for _, spec in program.inputs_of("parameter")}
        before, now = {name for name in common if state(name) is not None}, common & program.pass_state.keys()
        if before and before != now:
            raise GraphoptError(
                f"diloco: other parameters are trained than before ({len(now)} now), and with delay={self.delay} "
                "an exchange of those may be under way: give delay=0, or make a new step behind step.synchronize()"
            )

    @property
    def _settings(self) -> OuterSettings:
        return OuterSettings(
            lr=self.outer_lr,
            momentum=self.outer_momentum,
            mix=self.mix,
            bits=self.bits,
            sparsity=self.sparsity,
            error_decay=self.error_decay,
            delayed=self.delay > 0,
        )
