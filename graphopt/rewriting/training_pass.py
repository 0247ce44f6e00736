"""What a pass does while a program trains: the second half of the contract, for the few passes that need it.

The clock of a whole step: what passes know of the steps made so far when they choose among their programs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from graphopt.ir.program import Program
from graphopt.rewriting.pass_ import Pass
from graphopt.rewriting.shards import Shards

__all__ = ["Clock", "TrainingPass"]


class TrainingPass(Pass):
    """A pass that also acts between steps, or whose program depends on how far training is.

    Every method does nothing by default; a pass has those that it needs.

    Example:
        >>> updates = []
        >>> @dataclass(frozen=True)
        ... class CountUpdates(graphopt.TrainingPass):
        ...     name, stage, numerics = "count-updates", "step", "bitwise"
        ...     def apply(self, program):
        ...         return graphopt.Changed(reason="it only counts")
        ...     def advance(self, clock):
        ...         updates.append(clock)
        >>> step = graphopt.optimize_step(model, optimizer, [CountUpdates()], loss=loss)
        >>> losses = [step(x) for _ in range(3)]
        >>> len(updates)
        3
    """

    def prepare(self, model: nn.Module) -> None:
        """Called once, before the first run of what the pass has rewritten, with the model that it runs on.

        For what has to be so before the first step, such as equal parameters on all ranks. A whole step that goes on
        from a loaded ``state_dict`` does not call it: each rank has loaded what it needs.
        """
        del model

    def check(self, program: Program, state: Callable[[str], torch.Tensor | None]) -> None:
        """Called before the first run of every program, also of one that was kept in ``GRAPHOPT_CACHE``.

        For what a program of this pass cannot go on with.

        Args:
            program: as all passes have rewritten it.
            state: the pass state of a name as earlier programs or a checkpoint have left it; None where there is none.

        Raises:
            GraphoptError: where the program must not run.
        """
        del program, state

    def form(self, clock: Clock) -> str:
        """Which of its programs this pass wants for the next update of a whole step; "" is the one of the long run.

        The step compiles a program for each form that comes up. ``apply`` finds it in ``program.context.forms`` at the
        stages step and last, where it is absent for the program that is shown. All ranks have to come to the same form.
        """
        del clock
        return ""

    def advance(self, clock: Clock) -> None:
        """Called after every update of a whole step, to look at what it left and to change ``clock.numbers``."""
        del clock

    def settle(self, program: Program, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Bring together what this pass lets differ between ranks; ``TrainStep.synchronize`` calls it on all ranks.

        Args:
            program: of the long run, as this pass and all others have rewritten it.
            model: whose parameters may be changed.
            optimizer: whose state may be changed.
        """
        del program, model, optimizer

    def lasting_folder(self) -> str:
        """The folder in which a whole step keeps all of its state after every update; "" for none, as by default."""
        return ""

    def shards(self, sizes: Mapping[str, int]) -> Shards | None:
        """The part of each trained parameter that this rank updates; None, as by default, for all of all.

        Asked before the optimizer is traced, whose state is then for these elements only. The pass sees to it that
        parameters are whole again behind the update.

        Args:
            sizes: elements of each trained parameter, by name.
        """
        del sizes
        return None


def _nothing(target: str) -> torch.Tensor:
    raise KeyError(target)


@dataclass
class Clock:
    """How far training is, and the numbers that passes keep on the host from step to step.

    All of it is the same on every rank as long as passes derive their numbers from values that ranks agree on.

    Attributes:
        steps: updates made so far, those that loss scaling skipped among them; the number of the next one.
        rates: gives the learning rates of the optimizer's parameter groups, as they are now.
        numbers: by ``pass/what``; saved in ``TrainStep.state_dict``; programs share them (``StepContext.numbers``).
        state: the pass state of a name, for passes that look at one after a step.
    """

    steps: int = 0
    rates: Callable[[], tuple[float, ...]] = tuple
    numbers: dict[str, float] = field(default_factory=dict)
    state: Callable[[str], torch.Tensor] = _nothing
