"""The programs of a whole step: which there are for one capture, and what is compiled of them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import fx, nn

from graphopt.capture.call.flatten import Structure
from graphopt.capture.step.update_settings import Number, UpdateSettings
from graphopt.ir.node import InputSpec
from graphopt.ir.ops.transfers import Tier
from graphopt.ir.program import Program
from graphopt.ir.words.written_units import format_bytes
from graphopt.rewriting.memory.fit.budget import BudgetError, Share
from graphopt.rewriting.precision.scaling import CheckedGradients
from graphopt.runtime.compile.backend import Boxed
from graphopt.runtime.programs.binding import Binding
from graphopt.runtime.ranks.exchange_plan import ExchangePlan
from graphopt.runtime.runner import Capture

__all__ = ["CapturedStep", "CompiledStep", "Kind", "Variant", "refused_budget", "stored_name"]


Kind = Literal["begin", "middle", "update", "first update", "evaluation"]


class Variant(NamedTuple):
    """Which of a capture's programs: what it does, for how many batches, what waits for it, what passes want.

    Of however many batches where ``every`` is 0, whose gradients are added up. Where ``weighed``, this rank's gradients
    count by a number that is set before each run. A first update makes the state of the optimizer that is ``missing``:
    all of it, or that of parameters which the optimizer holds anew; calls before that are without it. ``beside`` is the
    state in memory that no program of the capture takes: of parameters that it does not train.
    """

    kind: Kind
    every: int
    waiting: frozenset[str]
    forms: tuple[tuple[str, str], ...]
    weighed: bool = False
    missing: frozenset[str] = frozenset()
    beside: frozenset[str] = frozenset()

    @property
    def updates(self) -> bool:
        """Whether the optimizer's update is a part of it."""
        return self.kind in ("update", "first update")

    def __str__(self) -> str:
        weighed = ["weighed"] if self.weighed else []
        return ", ".join([self.kind, *weighed, *(f"{name}: {form}" for name, form in self.forms)])


_CALLS = {
    "begin": "the first call",
    "middle": "a call in between",
    "update": "the updating call",
    "first update": "the first updating call",
}


def refused_budget(every: int, refused: Sequence[tuple[Variant, BudgetError]]) -> BudgetError:
    """The error where calls of an update cannot be kept within a budget: which ones, and what all of them take.

    Args:
        every: how many batches an update takes.
        refused: these calls, and why.
    """
    _, worst = max(refused, key=lambda item: item[1].smallest_bytes)
    least, budget = worst.smallest_bytes, worst.budget
    lacks = "; ".join(
        f"{_CALLS[wanted.kind]}{' where ranks weigh differently' * wanted.weighed} lacks "
        f"{format_bytes(error.smallest_bytes - error.budget)} ({error.smallest_bytes - error.budget} bytes)"
        for wanted, error in refused
    )
    reached = "the smallest budget that all calls meet is" if worst.searched else "every budget below"
    behind = "" if worst.searched else " is too small"
    cycle = f"accumulate({every})" if every > 1 else "join"
    shares = f"{str(worst).partition(': ')[0]}: " if isinstance(budget, Share) else ""
    error = BudgetError(
        f"{shares}the calls of {cycle} do not fit into {format_bytes(budget)} ({budget} bytes): {lacks}; {reached} "
        f"{least} bytes ({format_bytes(least)}){behind}. The call has not run: {str(worst).removeprefix(shares)}",
        least,
        budget,
        searched=worst.searched,
    )
    for note in getattr(worst, "__notes__", ()):
        error.add_note(note)
    return error


def stored_name(variant: Variant, optimizer: torch.optim.Optimizer, model: nn.Module) -> str:
    """Everything that a variant's program depends on beside its capture: it, and the optimizer's state as it is."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    state = [
        f"{names.get(id(parameter))}/{key} {tuple(value.shape)} {value.dtype} {value.device}"
        for parameter, values in optimizer.state.items()
        for key, value in values.items()
        if isinstance(value, torch.Tensor)
    ]
    known = state if variant.kind == "first update" else []
    waiting, beside = sorted(variant.waiting), sorted(variant.beside)
    return repr((variant.kind, variant.every, waiting, variant.forms, variant.weighed, sorted(known), beside))


@dataclass
class CompiledStep:
    """A program of a step, ready to run: its code, where its inputs come from, and what it checks for infinities.

    Attributes:
        batch: the names of the tensors of a call.
        evaluates: whether the optimizer evaluates the model again while the program runs.
        elsewhere: the inputs that are to reside on the host or a disk.
        exchanges: what it exchanges with other ranks.
        silent: whether all ranks may run it without meeting, where it exchanges nothing.
    """

    program: Program
    module: fx.GraphModule
    run: Boxed
    binding: Binding
    checked: CheckedGradients | None
    batch: tuple[str, ...]
    evaluates: bool
    elsewhere: Sequence[tuple[InputSpec, Tier]]
    exchanges: ExchangePlan
    silent: bool


@dataclass
class CapturedStep(Capture):
    """One capture: its rewritten programs, and the variants compiled so far for the optimizer's settings.

    Attributes:
        settings: of the optimizer, when its update was traced.
        results: the structure of what a call returns; None for the loss alone.
        read: the numbers among the settings that the programs read at each run.
        readable: whether all programs so far could read numbers.
        seen: ``settings_key`` of the optimizer at the latest call.
        traced: how often the update was traced anew for other settings, and for how many seconds.
        missing: the state that the program reads and the optimizer did not have, when that was looked at.
        beside: the state that the optimizer had and the program does not read.
        looked_at: the program and the version of the optimizer's state at that time.
        ahead: for which calls to come programs are made (``StepPrograms.plan_ahead``).
        first: whether it was the first capture of the step.
    """

    settings: UpdateSettings
    results: Structure | None = None
    read: frozenset[Number] = frozenset()
    readable: bool = True
    seen: tuple[Any, ...] | None = None
    traced: tuple[int, float] = (0, 0.0)
    variants: dict[Variant, CompiledStep] = field(default_factory=dict)
    missing: frozenset[str] = frozenset()
    beside: frozenset[str] = frozenset()
    looked_at: Hashable = None
    ahead: Hashable = None
    first: bool = False

    def programs(self) -> list[Program]:
        """See ``Capture``."""
        compiled = (compiled.program for compiled in self.variants.values())
        return [self.rewritten.program, *self.rewritten.variants.values(), *compiled]
