"""The clock of a whole step: what passes know of the steps made so far when they choose among their programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

__all__ = ["Clock"]


def _nothing(target: str) -> torch.Tensor:
    raise KeyError(target)


@dataclass
class Clock:
    """How far training is, and the numbers that passes keep on the host from step to step.

    All of it is the same on every rank as long as passes derive their numbers from values that ranks agree on.

    Attributes:
        steps: updates made so far, those that loss scaling skipped among them; the number of the next one.
        rates: gives the learning rates of the optimizer's parameter groups, as they are now.
        numbers: by ``pass/what``; saved in ``TrainStep.state_dict``, and shared with programs (``Context.numbers``).
        state: the pass state of a name, for passes that look at one after a step.
    """

    steps: int = 0
    rates: Callable[[], tuple[float, ...]] = tuple
    numbers: dict[str, float] = field(default_factory=dict)
    state: Callable[[str], torch.Tensor] = _nothing
