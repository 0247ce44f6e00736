"""How far training with a whole step is: the clock that passes see, and the batches of an accumulation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from graphopt.errors import GraphoptError, check_type, whole_number
from graphopt.rewriting.pipeline import Pipeline
from graphopt.rewriting.training_pass import Clock
from graphopt.runtime.state.state_dict import STATE_VERSION, check_state, named_state, place, plain_state
from graphopt.runtime.state.state_store import StateStore

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
        mean: whether their gradients are averaged; they are added up otherwise.
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
        self.mean = True
        self.batches = 0
        self.gradients: dict[str, torch.Tensor] = {}
        self._pipeline = pipeline
        self._store = store

    @property
    def divisor(self) -> int:
        """What gradients are divided by: the number of batches; 0 where their sum is wanted, of however many."""
        return self.every if self.mean or self.every == 1 else 0

    def accumulate(self, batches: int, mean: bool) -> None:
        """Take so many batches for an update, with the mean or the sum of their gradients.

        Raises:
            ArgumentError: for less than one, and for a ``mean`` that is neither True nor False.
            GraphoptError: in the middle of an accumulation, but for more batches of a sum.
        """
        batches = whole_number("accumulate's argument", batches, least=1, of="batches")
        check_type("accumulate's mean", mean, bool, "True, or False for the sum of the gradients")
        if self.batches and (mean or self.mean or batches <= self.batches):
            raise GraphoptError(
                f"{self.batches} of {self.every} batches are accumulated: change the number after an update"
            )
        self.every, self.mean = batches, mean

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
        state = {
            "version": STATE_VERSION,
            "rank": rank,
            "ranks": ranks,
            "local": self._store.local(),
            "steps": self.clock.steps,
            "numbers": dict(self.clock.numbers),
            "accumulate": self.every,
            "mean": self.mean,
            "batches": self.batches,
            "gradients": {name: tensor.clone() for name, tensor in self.gradients.items()},
            "held": self._store.state_dict(),
        }
        return named_state(state)

    def load_state_dict(self, state: Mapping[str, Any], parameters: Mapping[str, torch.Tensor]) -> None:
        """Continue where ``state_dict`` was taken.

        Args:
            state: what it returned.
            parameters: of the model, by name; gradients are moved to where they are.

        Raises:
            GraphoptError: for a state that cannot be loaded here (``check_state``).
        """
        state = plain_state(state)
        check_state(state, parameters)
        self._store.load(state["held"], state["local"])
        self.clock.steps = int(state["steps"])
        self.clock.numbers.clear()  # programs share the dictionary
        self.clock.numbers.update({name: float(number) for name, number in state["numbers"].items()})
        self.every, self.mean = int(state["accumulate"]), bool(state["mean"])
        self.batches = int(state["batches"])
        self.gradients.clear()
        self.gradients.update(
            {name: tensor.to(parameters[name].device, copy=True) for name, tensor in state["gradients"].items()}
        )
