"""How far training with a whole step is: the clock that passes see, and the batches of an accumulation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from graphopt.errors import GraphoptError, whole_number
from graphopt.rewriting.clock import Clock
from graphopt.rewriting.pipeline import Pipeline
from graphopt.runtime.state_dict import STATE_VERSION, check_state, place
from graphopt.runtime.state_store import StateStore

__all__ = ["StepProgress"]


class StepProgress:
    """What a step counts from call to call, and saves together with what its passes hold.

    Args:
        pipeline: the passes, which hear of every update.
        store: what passes hold.
        rates: gives the learning rates of the optimizer's parameter groups.
        numbers: what passes keep on the host; shared with programs.

    Attributes:
        clock: the updates made so far.
        every: how many batches an update takes.
        batches: how many of them are in.
        gradients: those accumulated so far, by parameter; programs read this dictionary.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        store: StateStore,
        rates: Callable[[], tuple[float, ...]],
        numbers: dict[str, float],
    ) -> None:
        self.clock = Clock(rates=rates, numbers=numbers, state=store.__getitem__)
        self.every = 1
        self.batches = 0
        self.gradients: dict[str, torch.Tensor] = {}
        self._pipeline = pipeline
        self._store = store

    def accumulate(self, batches: int) -> None:
        """Take so many batches for an update.

        Raises:
            GraphoptError: for less than one, or in the middle of an accumulation.
        """
        batches = whole_number("accumulate's argument", batches, least=1, of="batches")
        if self.batches:
            raise GraphoptError(
                f"{self.batches} of {self.every} batches are accumulated: change the number after an update"
            )
        self.every = batches

    def count_batch(self) -> bool:
        """Note that a batch is in; True behind the last one of a step: the update has run, the next step begins."""
        self.batches += 1
        if self.batches < self.every:
            return False
        self.batches = 0
        self.gradients.clear()
        self.clock.steps += 1
        for current in self._pipeline.training:
            current.advance(self.clock)
        return True

    def state_dict(self) -> dict[str, Any]:
        """What ``TrainStep.state_dict`` returns."""
        rank, ranks = place()
        return {
            "version": STATE_VERSION,
            "rank": rank,
            "ranks": ranks,
            "local": self._store.local(),
            "steps": self.clock.steps,
            "numbers": dict(self.clock.numbers),
            "accumulate": self.every,
            "batches": self.batches,
            "gradients": {name: tensor.clone() for name, tensor in self.gradients.items()},
            "held": self._store.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], parameters: Mapping[str, torch.Tensor]) -> None:
        """Continue where ``state_dict`` was taken.

        Args:
            state: what it returned.
            parameters: of the model, by name; gradients are moved to where they are.

        Raises:
            GraphoptError: for a state that cannot be loaded here (``check_state``).
        """
        check_state(state, parameters)
        self._store.load(state["held"], state["local"])
        self.clock.steps = int(state["steps"])
        self.clock.numbers.clear()  # programs share the dictionary
        self.clock.numbers.update({name: float(number) for name, number in state["numbers"].items()})
        self.every = int(state["accumulate"])
        self.batches = int(state["batches"])
        self.gradients.clear()
        self.gradients.update(
            {name: tensor.to(parameters[name].device, copy=True) for name, tensor in state["gradients"].items()}
        )
