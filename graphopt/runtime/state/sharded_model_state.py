"""The state of a model of which each rank keeps shards: as the shards of this rank, or whole on the first one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from graphopt.errors import GraphoptError
from graphopt.ir.ops.communication.collectives import ALL_GATHER, WAIT
from graphopt.ir.ops.communication.groups import Group, find_group
from graphopt.rewriting.distributed.rank_names import place
from graphopt.rewriting.distributed.sharding.named_shards import is_sharded, plain_shards
from graphopt.rewriting.shards import piece_of, shard_of
from graphopt.runtime.state.sharded_model import OwnShard, ShardedModel

__all__ = ["full_state", "load_model_state", "model_state"]


def model_state(sharded: ShardedModel) -> tuple[dict[str, Any], dict[str, list[list[int]]]]:
    """The model's state, with this rank's shards where parameters are without memory.

    Args:
        sharded: the model.

    Returns:
        tensors by name, as ``state_dict`` gives them, but flat ones for shards; and the names of these, with the shape
        and the strides of their parameters.
    """
    with sharded.described():
        state = sharded.model.state_dict(keep_vars=True)
        own = sharded.own_shards()
        found: dict[str, Any] = {}
        shards = {}
        for name, value in state.items():
            if value in own:
                found[name] = own[value].tensor
                shards[name] = [list(value.shape), list(value.stride())]
            else:
                found[name] = value.detach() if isinstance(value, torch.Tensor) else value
    return found, shards


def load_model_state(sharded: ShardedModel, state: Mapping[str, Any], shards: Collection[str]) -> None:
    """Take over a model's state; all ranks come here together.

    Args:
        sharded: the model, whose parameters may be whole or in shards.
        state: by the names of ``state_dict``; whole tensors, but for those that ``shards`` names.
        shards: the names for which it has this rank's shard, cut over all ranks.

    Raises:
        GraphoptError: for names and shapes that are not the model's.
    """
    with sharded.described(), torch.no_grad():
        known = sharded.model.state_dict(keep_vars=True)
        own = sharded.own_shards()
        apart = {name for name, value in known.items() if name in shards or value in own}
        rest = {name: value for name, value in state.items() if name not in apart}
        found = sharded.model.load_state_dict(rest, strict=False)
        for name in sorted((set(found.missing_keys) | apart) - set(state)):
            raise GraphoptError(f"the checkpoint has no {name!r}, which the model has")
        for name in sorted(found.unexpected_keys):
            raise GraphoptError(f"the checkpoint has {name!r}, which the model has not")
        for name in (name for name in state if name in apart):
            shard = own.get(known[name])
            if name in shards:
                _load_shard(name, known[name], shard, state[name])
            elif shard is not None:
                _cut_to_shard(name, known[name], shard, state[name])


def _load_shard(name: str, parameter: torch.Tensor, own: OwnShard | None, value: torch.Tensor) -> None:
    """Take over this rank's shard of a parameter, which may be whole."""
    rank, ranks = place()
    length = shard_of(parameter.numel(), rank, ranks)[1]
    if value.shape != (length,):
        raise GraphoptError(f"{name!r} has {len(value)} elements on this rank in the checkpoint, and {length} here")
    if own is None:
        parameter.copy_(_gathered(value, parameter, find_group("")))
    else:
        own.tensor.copy_(value)


def _cut_to_shard(name: str, parameter: torch.Tensor, own: OwnShard, value: torch.Tensor) -> None:
    """Take over this rank's part of a whole tensor."""
    if value.shape != parameter.shape:
        raise GraphoptError(
            f"{name!r} has the shape {list(value.shape)} in the checkpoint, and {list(parameter.shape)} here"
        )
    laid_out = torch.empty_strided(parameter.shape, parameter.stride(), dtype=value.dtype).copy_(value)
    own.tensor.copy_(laid_out.as_strided([value.numel()], [1])[own.first : own.first + own.length])


def full_state(sharded: ShardedModel, optimizer: torch.optim.Optimizer, group: str) -> dict[str, Any]:
    """Model and optimizer whole, on the host of the first rank; all ranks come here together.

    Args:
        sharded: the model.
        optimizer: whose state may be this rank's shard.
        group: name of the process group over which that is divided.

    Returns:
        ``model`` and ``optimizer``; nothing on the other ranks, of which none has more than one tensor whole at a time.
    """
    first = place()[0] == 0
    model: dict[str, Any] = {}
    with sharded.described(), torch.no_grad():
        own = sharded.own_shards()
        for name, value in sharded.model.state_dict(keep_vars=True).items():
            whole = _gathered(own[value].tensor, value, own[value].group) if value in own else value
            if first:
                model[name] = _on_host(whole)
    state = plain_shards(optimizer.state_dict())
    parameters = [parameter for each in optimizer.param_groups for parameter in each["params"]]
    kept: dict[Any, dict[Any, Any]] = {}
    for index, entries in state["state"].items():
        kept[index] = {}
        for key, value in entries.items():
            whole = value
            if is_sharded(optimizer) and isinstance(value, torch.Tensor) and value.dim():
                whole = _gathered(value, parameters[index], find_group(group))
            if first:
                kept[index][key] = _on_host(whole)
    return {"model": model, "optimizer": {**state, "state": kept}} if first else {}


def _gathered(shard: torch.Tensor, parameter: torch.Tensor, group: Group) -> torch.Tensor:
    """A whole tensor, laid out as a parameter is, of the shards of all ranks of a group."""
    padded = shard.new_zeros(piece_of(parameter.numel(), group.size))
    padded[: len(shard)].copy_(shard)
    whole: torch.Tensor = WAIT(ALL_GATHER(padded, group.size, group.name))
    return whole.as_strided(parameter.shape, parameter.stride(), 0)


def _on_host(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone(memory_format=torch.preserve_format).cpu()
