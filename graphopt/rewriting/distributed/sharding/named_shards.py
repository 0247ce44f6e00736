"""Shards in ``optimizer.state_dict()`` by names that say whose they are.

An optimizer whose state is sharded gives each rank other tensors under the same names and in the same shapes. With the
rank in the name, a checkpoint of all ranks holds all of them, and another rank's shard is refused instead of loaded.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch

from graphopt.errors import GraphoptError
from graphopt.rewriting.distributed.rank_names import own_name, owner, owner_of_all, place, plain_name

__all__ = ["accept_named_shards", "is_sharded", "name_shards", "plain_shards", "shard_place"]

_accepting: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_sharded: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()
"""Which shard an optimizer has, and of how many."""


def is_sharded(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's state is this rank's shard of it."""
    return optimizer in _sharded


def shard_place(optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Which shard of the state this rank has, and of how many; those of all ranks where nothing is said."""
    return _sharded.get(optimizer, place())


def accept_named_shards(optimizer: torch.optim.Optimizer) -> None:
    """Let ``load_state_dict`` take shards with this rank's name, and refuse those of another; once for an optimizer.

    State that was loaded before is looked at as well.

    Raises:
        GraphoptError: where it is another rank's.
    """
    if optimizer not in _accepting:
        optimizer.register_load_state_dict_pre_hook(_before_loading)
        _accepting.add(optimizer)
    for parameter, kept in list(optimizer.state.items()):
        if any(isinstance(key, str) and owner(key) for key in kept):
            optimizer.state[parameter] = _own(kept, shard_place(optimizer))


def name_shards(optimizer: torch.optim.Optimizer, rank: int, ranks: int) -> None:
    """Let ``state_dict`` give shards by names that say which they are.

    Args:
        optimizer: whose state is this rank's shard.
        rank: of the group over which it is divided.
        ranks: of that group.
    """
    if optimizer not in _sharded:
        optimizer.register_state_dict_post_hook(_after_saving)
    _sharded[optimizer] = rank, ranks


def plain_shards(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state of an optimizer with plain names, whosever it is."""
    return {**state, "state": {index: _plain(kept) for index, kept in state["state"].items()}}


def _after_saving(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """The state with a rank in the name of each shard.

    Under the plain name stands a tensor without elements, so that an optimizer which knows nothing of shards fails at
    its next step, where it would else begin anew without a word.
    """
    rank, ranks = shard_place(optimizer)
    if ranks == 1:
        return state
    named = {}
    for index, kept in state["state"].items():
        shards = {key for key, value in kept.items() if isinstance(value, torch.Tensor) and value.dim() > 0}
        named[index] = {key: value.new_empty(0) if key in shards else value for key, value in kept.items()}
        named[index] |= {own_name(key, rank, ranks): kept[key] for key in kept if key in shards}
    return {**state, "state": named}


def _before_loading(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "state": {index: _own(kept, shard_place(optimizer)) for index, kept in state["state"].items()}}


def _own(kept: Any, mine: tuple[int, int]) -> Any:
    """The state of one parameter under plain names."""
    if not isinstance(kept, Mapping):
        return kept
    whose = owner_of_all(key for key in kept if isinstance(key, str))
    if whose is not None and whose != mine:
        rank, ranks = mine
        raise GraphoptError(
            f"the optimizer's state is the shard of rank {whose[0]} of {whose[1]}, and this is rank {rank} of {ranks}: "
            "load what this rank saved itself, or graphopt.sharded_state.consolidate the states of all ranks"
        )
    return _plain(kept) if whose is not None else kept


def _plain(kept: Mapping[Any, Any]) -> dict[Any, Any]:
    """The state of one parameter under plain names, each shard in place of what stood for it."""
    shards = {plain_name(key): value for key, value in kept.items() if isinstance(key, str) and owner(key)}
    return {key: shards.get(key, value) for key, value in kept.items() if not (isinstance(key, str) and owner(key))}
