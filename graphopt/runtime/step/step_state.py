"""Everything that a whole step needs to go on: model, optimizer, what it owns itself, and torch's generators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from graphopt.rewriting.distributed.sharding.named_shards import is_sharded, plain_shards, shard_place
from graphopt.runtime.state.sharded_model import ShardedModel
from graphopt.runtime.state.sharded_model_state import model_state
from graphopt.runtime.state.state_dict import plain_state

__all__ = ["GENERATORS", "generator_states", "is_step_state", "state_of_step"]

GENERATORS = "random generators"
"""Under which name the states of torch's generators are saved."""

_PARTS = frozenset({"model", "optimizer", "sharded", "step"})


def is_step_state(state: object) -> bool:
    """Whether something is what ``state_of_step`` returned, in this version or an earlier one."""
    return isinstance(state, Mapping) and set(state) - {"shards", "shard"} == _PARTS


def state_of_step(sharded: ShardedModel, optimizer: torch.optim.Optimizer, own: Mapping[str, Any]) -> dict[str, Any]:
    """What this rank saves of a step.

    Args:
        sharded: the model that it trains.
        optimizer: of it.
        own: ``TrainStep.state_dict``.

    Returns:
        ``model``: its state, with flat shards in place of the parameters whose shapes and strides are in ``shards``;
        ``optimizer``: its state, which is this rank's shard of it where ``sharded`` says so, and which one ``shard``
        says; and ``step``.
    """
    model, shards = model_state(sharded)
    return {
        "model": model,
        "shards": shards,
        "optimizer": plain_shards(optimizer.state_dict()),
        "sharded": is_sharded(optimizer),
        "step": plain_state(own),
        **({"shard": list(shard_place(optimizer))} if is_sharded(optimizer) else {}),
    }


def generator_states() -> dict[str, torch.Tensor]:
    """The states of torch's generators, by device."""
    found = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        found |= {f"cuda:{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    return found
