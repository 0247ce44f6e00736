"""A whole step in a checkpoint: what is saved of it, and how it goes over to another number of ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from graphopt.errors import GraphoptError, quoted
from graphopt.ir.ops.communication.groups import find_group
from graphopt.rewriting.distributed.sharding.named_shards import is_sharded, shard_place
from graphopt.rewriting.distributed.sharding.sharded_state import consolidate, split
from graphopt.runtime.state.state_dict import redistribute
from graphopt.runtime.step.step_state import is_step_state
from graphopt.runtime.step.train_step import TrainStep

__all__ = ["load_step_state", "same_everywhere"]


def load_step_state(step: TrainStep, states: Sequence[Mapping[str, Any]], rank: int, ranks: int) -> None:
    """Continue a step from this rank's state, or from those of all ranks of another number.

    Raises:
        GraphoptError: for what is no state of a step, or does not fit.
    """
    if not all(is_step_state(state) for state in states):
        raise GraphoptError("this is no state of a step: save a checkpoint with the step under the same name")
    own = [state["step"] for state in states]
    mine = own[0] if len(own) == 1 and own[0]["ranks"] == ranks else redistribute(own, ranks)[rank]
    model, shards = _model_state(states, ranks)
    optimizer = _optimizer_state(step, states, rank)
    try:
        step.load_model_state(model, shards)
        step.optimizer.load_state_dict(optimizer)
    except (RuntimeError, ValueError, KeyError) as error:
        raise GraphoptError(f"the checkpoint is of another model or optimizer: {quoted(error)}") from error
    step.load_state_dict(mine)


def _model_state(states: Sequence[Mapping[str, Any]], ranks: int) -> tuple[dict[str, Any], Collection[str]]:
    """The model's state, and the names for which it has this rank's shard."""
    shards = states[0].get("shards", {})
    if len(states) == 1 and states[0]["step"]["ranks"] == ranks:
        return states[0]["model"], shards
    rest = [{name: value for name, value in state["model"].items() if name not in shards} for state in states]
    whole = dict(same_everywhere(rest, "model"))
    for name, (shape, stride) in shards.items():
        flat = torch.cat([state["model"][name] for state in states])
        whole[name] = flat.as_strided(shape, stride)
    return whole, ()


def _optimizer_state(step: TrainStep, states: Sequence[Mapping[str, Any]], rank: int) -> dict[str, Any]:
    """The optimizer's state as this rank keeps it."""
    saved = [state["optimizer"] for state in states]
    group = step.pipeline.shard_group
    if states[0]["sharded"]:
        whose = [tuple(state.get("shard") or _place(states, number, rank)) for number, state in enumerate(states)]
        if len(states) == 1 and states[0]["step"]["ranks"] > 1:
            _check_own(whose[0], group)
            return dict(saved[0])
        parameters = [p for each in step.optimizer.param_groups for p in each["params"]]
        whole = consolidate([each for _, each in sorted(dict(zip(whose, saved, strict=True)).items())], parameters)
    else:
        whole = same_everywhere(saved, "optimizer")
    return split(whole, *shard_place(step.optimizer)) if is_sharded(step.optimizer) else whole


def _place(states: Sequence[Mapping[str, Any]], number: int, rank: int) -> tuple[int, int]:
    """Whose a state is that does not say so: one of all ranks."""
    alone = len(states) == 1
    return rank if alone else number, states[0]["step"]["ranks"] if alone else len(states)


def _check_own(whose: tuple[int, ...], group: str | None) -> None:
    """Refuse a shard of another division than that of this step."""
    if group is None:
        raise GraphoptError(
            "the optimizer's state is sharded over the ranks, and this step has no shard-optimizer: load it with that "
            "pass, or make a whole state with graphopt.sharded_state.consolidate"
        )
    mine = find_group(group)
    if whose != (mine.rank, mine.size):
        raise GraphoptError(
            f"the optimizer's state on this rank is shard {whose[0]} of {whose[1]}, and this step's passes divide it "
            f"into {mine.size}: load it with the group= and replicas= that it was saved with, or in another number of "
            "ranks"
        )


def same_everywhere(states: Sequence[Any], name: str) -> Any:
    """The one state that all ranks have saved.

    Raises:
        GraphoptError: naming the first place where they differ.
    """
    for rank, state in enumerate(states[1:], start=1):
        where = _difference(states[0], state, name)
        if where:
            raise GraphoptError(
                f"{where} differs between rank 0 and rank {rank} of the checkpoint, so that another number of ranks "
                "cannot go on from it: call step.synchronize() before saving, or load it in as many ranks"
            )
    return states[0]


def _difference(one: Any, other: Any, where: str) -> str:
    """The path of the first difference; empty where there is none."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape and _bits(one) == _bits(other)
        return "" if same else where
    if type(one) is not type(other):
        return where
    if isinstance(one, Mapping):
        if one.keys() != other.keys():
            return where
        pairs = [(f"{where}/{key}", value, other[key]) for key, value in one.items()]
    elif isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return where
        pairs = [(f"{where}/{index}", a, b) for index, (a, b) in enumerate(zip(one, other, strict=True))]
    else:
        return "" if one == other or one != one else where
    return next((found for path, a, b in pairs if (found := _difference(a, b, path))), "")


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
