"""Everything that a whole step needs to go on: model, optimizer, what it owns itself, and torch's generators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from graphopt.rewriting.distributed.named_shards import is_sharded, plain_shards
from graphopt.runtime.state_dict import plain_state

__all__ = ["GENERATORS", "STEP_PARTS", "generator_states", "state_of_step"]

GENERATORS = "random generators"
"""Under which name the states of torch's generators are saved."""

STEP_PARTS = frozenset({"model", "optimizer", "sharded", "step"})
"""What the state of a step consists of."""


def state_of_step(model: nn.Module, optimizer: torch.optim.Optimizer, own: Mapping[str, Any]) -> dict[str, Any]:
    """What this rank saves of a step.

    Args:
        model: that it trains.
        optimizer: of it.
        own: ``TrainStep.state_dict``.
    """
    return {
        "model": dict(model.state_dict()),
        "optimizer": plain_shards(optimizer.state_dict()),
        "sharded": is_sharded(optimizer),
        "step": plain_state(own),
    }


def generator_states() -> dict[str, torch.Tensor]:
    """The states of torch's generators, by device."""
    found = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        found |= {f"cuda:{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    return found
