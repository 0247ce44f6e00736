"""The state of an optimizer whose update is sharded: of all ranks together, and of one rank of another number.

Each rank's ``optimizer.state_dict()`` holds its shard of every parameter's state, flat, in the order of the parameter's
memory. To go on with another number of ranks, or without ``ShardOptimizer``, put the states of all ranks together::

    whole = consolidate([torch.load(f"optimizer-{rank}.pt") for rank in range(2)], parameters)
    optimizer.load_state_dict(whole)                 # before the first step; ShardOptimizer takes its shard of it
    optimizer.load_state_dict(split(whole, rank, 3))  # the same, made elsewhere
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from graphopt.errors import GraphoptError, check_type, whole_number, wrong_argument
from graphopt.rewriting.distributed.rank_names import owner
from graphopt.rewriting.distributed.sharding.named_shards import plain_shards
from graphopt.rewriting.shards import NUMBERS, shard_of

__all__ = ["consolidate", "split"]


def consolidate(states: Sequence[dict[str, Any]], parameters: Iterable[torch.Tensor]) -> dict[str, Any]:
    """The state of an unsharded optimizer, of the states that all ranks have saved.

    Args:
        states: ``optimizer.state_dict()`` of every rank, in the order of the ranks.
        parameters: of the optimizer, in its order; only shapes and strides matter (``meta`` tensors do).

    Returns:
        a new ``state_dict``, on the device of the first rank's state.

    Raises:
        ArgumentError: for what are no states or parameters.
        GraphoptError: where a rank's state is missing, or does not fit the parameters.

    Example:
        >>> state = {"state": {0: {"momentum_buffer": torch.arange(4.0)}}, "param_groups": []}
        >>> shards = [graphopt.sharded_state.split(state, rank, 2) for rank in range(2)]
        >>> graphopt.sharded_state.consolidate(shards, [torch.zeros(4)])["state"][0]["momentum_buffer"]
        tensor([0., 1., 2., 3.])
    """
    _check_states(states)
    shapes = _listed(parameters)
    _check_order(states)
    states = [plain_shards(state) for state in states]
    first = states[0]["state"]
    for rank, state in enumerate(states):
        if {index: set(kept) for index, kept in state["state"].items()} != {i: set(kept) for i, kept in first.items()}:
            raise GraphoptError(f"the states of rank 0 and rank {rank} are not of one optimizer: they hold other names")
    unknown = [index for index in first if index >= len(shapes)]
    if unknown:
        raise GraphoptError(f"the state is of {max(unknown) + 1} parameters at least, and {len(shapes)} are given")
    merged = {
        index: {key: _merge([s["state"][index][key] for s in states], shapes[index], f"{index}/{key}") for key in kept}
        for index, kept in first.items()
    }
    return {**states[0], "state": merged}


def _check_states(states: object) -> None:
    """Refuse what is no list of the states of all ranks."""
    if isinstance(states, Mapping) or not isinstance(states, Sequence):
        hint = "one rank's state is [state]" if isinstance(states, Mapping) else ""
        raise wrong_argument("consolidate's states", states, "a list with optimizer.state_dict() of every rank", hint)
    if not states:
        raise GraphoptError("consolidate needs the state of every rank, got none")
    for rank, state in enumerate(states):
        _check_state(f"consolidate's states[{rank}]", state)


def _check_state(argument: str, state: object) -> None:
    if not isinstance(state, Mapping) or "state" not in state:
        hint = "torch.load(path) gives it from a file" if isinstance(state, str) else ""
        raise wrong_argument(argument, state, "an optimizer's state_dict(), with the key 'state'", hint)


def _listed(parameters: object) -> list[torch.Tensor]:
    """The parameters as a list."""
    if not isinstance(parameters, Iterable) or isinstance(parameters, (str, torch.Tensor)):
        hint = "give [parameter] for one" if isinstance(parameters, torch.Tensor) else "model.parameters() gives them"
        raise wrong_argument("consolidate's parameters", parameters, "the optimizer's parameters, in its order", hint)
    found = list(parameters)
    for index, item in enumerate(found):
        check_type(f"consolidate's parameters[{index}]", item, torch.Tensor, "a tensor")
    return found


def _check_order(states: Sequence[dict[str, Any]]) -> None:
    """Refuse states whose names say that they are not those of all ranks, in their order."""
    for rank, state in enumerate(states):
        named = {owner(key) for kept in state["state"].values() for key in kept if isinstance(key, str)} - {None}
        if named and named != {(rank, len(states))}:
            found = ", ".join(f"rank {of[0]} of {of[1]}" for of in sorted(item for item in named if item))
            raise GraphoptError(
                f"consolidate needs the states of all ranks in their order: number {rank} of {len(states)} is {found}"
            )


def _merge(parts: list[Any], parameter: torch.Tensor, what: str) -> Any:
    """One piece of state of all ranks; what has no dimension is the same on all of them."""
    if not isinstance(parts[0], torch.Tensor) or parts[0].dim() == 0:
        return parts[0].clone() if isinstance(parts[0], torch.Tensor) else parts[0]
    elements = parameter.numel()
    for rank, part in enumerate(parts):
        expected = shard_of(elements, rank, len(parts))[1]
        if part.shape != (expected,):
            raise GraphoptError(
                f"rank {rank}'s state {what} has the shape {list(part.shape)}; its shard of {elements} elements over "
                f"{len(parts)} ranks has {expected}: give the states of all ranks in their order, and the parameters "
                "in the optimizer's"
            )
    flat = torch.cat([part.to(parts[0].device) for part in parts])
    return flat.as_strided(parameter.shape, parameter.stride()).clone(memory_format=torch.preserve_format)


def split(state: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """One rank's shard of the state of an unsharded optimizer.

    Args:
        state: ``optimizer.state_dict()``, or what ``consolidate`` gave.
        rank: whose shard, from 0 on.
        ranks: how many there are.

    Returns:
        a new ``state_dict``.

    Raises:
        ArgumentError: for what is no state, and for ranks that are no whole numbers.
        GraphoptError: where there is no such rank.

    Example:
        >>> state = {"state": {0: {"momentum_buffer": torch.arange(4.0)}}, "param_groups": []}
        >>> graphopt.sharded_state.split(state, rank=1, ranks=2)["state"][0]["momentum_buffer"]
        tensor([2., 3.])
    """
    _check_state("split's state", state)
    ranks = whole_number("split's ranks", ranks, least=1, of="ranks")
    check_type("split's rank", rank, int, "a rank, counted from 0")
    if not 0 <= rank < ranks:
        raise GraphoptError(f"there is no rank {rank} of {ranks} ranks: they are counted from 0")
    shards = {
        index: {key: _shard(key, value, rank, ranks) for key, value in kept.items()}
        for index, kept in state["state"].items()
    }
    return {**state, "state": shards}


def _shard(key: str, value: Any, rank: int, ranks: int) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.dim() == 0 and key in NUMBERS:
        return value.clone()
    first, length = shard_of(value.numel(), rank, ranks)
    return value.as_strided([value.numel()], [1])[first : first + length].clone()
