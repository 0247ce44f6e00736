"""What a whole step saves beside model and optimizer, whether it fits, and states for other numbers of ranks.

Most of a state is the same on every rank. What passes accumulate on each rank by itself (residuals, momenta of sparse
exchange), and gradients in the middle of an accumulation, differ: each rank saves its own, and loads its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from graphopt.errors import GraphoptError, check_type, public, shown, whole_number, wrong_argument
from graphopt.rewriting.distributed.rank_names import own_name, owner_of_all, place, plain_name

__all__ = ["STATE_VERSION", "check_state", "named_state", "place", "plain_state", "redistribute"]

STATE_VERSION = 4
_KEYS = {"version", "rank", "ranks", "local", "steps", "numbers", "accumulate", "mean", "batches", "gradients", "held"}


def named_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state in which the names of tensors that are this rank's own say so.

    ``torch.distributed.checkpoint`` then keeps them apart.
    """
    rank, ranks, local = state["rank"], state["ranks"], set(state["local"])
    held = {own_name(name, rank, ranks) if name in local else name: kept for name, kept in state["held"].items()}
    gradients = {own_name(name, rank, ranks): gradient for name, gradient in state["gradients"].items()}
    return {**state, "held": held, "gradients": gradients}


def plain_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state with plain names, which is the rank's that the names say.

    Raises:
        GraphoptError: for one that is no state of a step, and for names of several ranks.
    """
    _check_version(state)
    _check_entries(state)
    whose = owner_of_all([*state["held"], *state["gradients"]])
    found = {**state}
    if whose is not None:
        found["rank"], found["ranks"] = whose
    for part in ("held", "gradients"):
        found[part] = {plain_name(name): tensor for name, tensor in state[part].items()}
        if len(found[part]) != len(state[part]):
            twice = next(name for name in state[part] if name != plain_name(name) and plain_name(name) in state[part])
            raise GraphoptError(f"the state holds {plain_name(twice)!r} twice, with the name of a rank and without")
    return found


def check_state(state: Mapping[str, Any], parameters: Mapping[str, torch.Tensor]) -> None:
    """Whether a saved state can be loaded here.

    Args:
        state: with plain names.
        parameters: of the model, by name.

    Raises:
        ArgumentError: for what is no state, and for entries of another type.
        GraphoptError: for a state of another version, with keys that mean nothing here or gradients of parameters that
            the model does not have, and for another rank's, or another number of ranks', where ranks differ.
    """
    _check_version(state)
    _check_entries(state)
    _check_gradients(state, parameters)
    if not state["local"] and not state["gradients"]:
        return
    rank, ranks = place()
    differs = f"the state holds what differs from rank to rank ({(*state['local'], *state['gradients'])[0]} first)"
    if state["ranks"] != ranks:
        raise GraphoptError(
            f"{differs}, and was saved by {state['ranks']} ranks; here are {ranks}: load every rank's state, and give "
            "each rank its part of graphopt.redistribute(states, ranks)"
        )
    if state["rank"] != rank:
        raise GraphoptError(f"{differs}, and is rank {state['rank']}'s; this is rank {rank}: load what it saved itself")


def _check_gradients(state: Mapping[str, Any], parameters: Mapping[str, torch.Tensor]) -> None:
    unknown = sorted(set(state["gradients"]) - set(parameters))
    if unknown:
        raise GraphoptError(f"the state holds gradients of {unknown[:3]}, which the model does not have")
    for name, gradient in state["gradients"].items():
        if gradient.shape != parameters[name].shape:
            raise GraphoptError(
                f"the state holds a gradient of shape {list(gradient.shape)} of {name!r}, whose shape is "
                f"{list(parameters[name].shape)}"
            )


def _check_version(state: Mapping[str, Any]) -> None:
    given: object = state
    if not isinstance(given, Mapping):
        hint = "torch.load(path) gives it from a file" if isinstance(given, str) else ""
        raise wrong_argument("state", given, "what TrainStep.state_dict() returned", hint)
    if state.get("version") != STATE_VERSION or set(state) != _KEYS:
        raise GraphoptError(
            f"this is no state of a TrainStep of this version: expected the keys {sorted(_KEYS)} and version "
            f"{STATE_VERSION}, got {sorted(map(str, state))} and version {shown(state.get('version'))}"
        )


def _check_entries(state: Mapping[str, Any]) -> None:
    """Refuse entries of another type than those that ``state_dict`` gives."""
    for key, least in (("steps", 0), ("batches", 0), ("rank", 0), ("accumulate", 1), ("ranks", 1)):
        whole_number(f"the state's {key!r}", state[key], least=least)
        _check_size(f"the state's {key!r}", state[key])
    check_type("the state's 'mean'", state["mean"], bool, "True or False")
    for key in ("gradients", "held"):
        check_type(f"the state's {key!r}", state[key], Mapping, "a dict of tensors by name")
        _check_names(key, state[key])
        for name, value in state[key].items():
            check_type(f"the state's {key!r} of {name!r}", value, torch.Tensor, "a tensor")
    check_type("the state's 'numbers'", state["numbers"], Mapping, "a dict of numbers by name")
    _check_names("numbers", state["numbers"])
    for name, value in state["numbers"].items():
        check_type(f"the state's 'numbers' of {name!r}", value, (int, float), "a number")
        _check_size(f"the state's 'numbers' of {name!r}", value)
    check_type("the state's 'local'", state["local"], (list, tuple), "a list of names")
    _check_names("local", state["local"])


def _check_names(key: str, names: Iterable[object]) -> None:
    for name in names:
        check_type(f"a name in the state's {key!r}", name, str, "a name")


def _check_size(what: str, number: float) -> None:
    if isinstance(number, int) and abs(number) >= 2**63:  # as many as a float can hold
        raise GraphoptError(f"{what} is a number of {number.bit_length()} bits, which no step counts to")


@public
def redistribute(states: Sequence[Mapping[str, Any]], ranks: int) -> list[dict[str, Any]]:
    """The states of a step for another number of ranks.

    What has not been exchanged yet is neither lost nor counted twice: residuals, momenta and waiting gradients act on
    the parameters through their mean over the ranks, so every new rank gets the mean of the old ones. Counts are
    summed, and rank 0 goes on with the sum. With as many ranks as before the states are returned as they are.

    Args:
        states: of all ranks, from ``TrainStep.state_dict``, in any order.
        ranks: how many there will be.

    Returns:
        a state for each new rank, in the order of the ranks.

    Raises:
        ArgumentError: for what are no states, and for a number of ranks that is none.
        GraphoptError: where a rank's state is missing, or the states are not of one step.

    Example:
        >>> step = graphopt.optimize_step(model, optimizer, loss=loss)
        >>> saved = [step.prepare(x).state_dict()]
        >>> len(graphopt.redistribute(saved, ranks=2))
        2
    """
    ranks = whole_number("redistribute's ranks", ranks, least=1, of="ranks")
    if isinstance(states, (Mapping, str)) or not isinstance(states, Sequence):
        hint = "one rank's state is [state]" if isinstance(states, Mapping) else ""
        raise wrong_argument("redistribute's states", states, "a list with step.state_dict() of every rank", hint)
    if not states:
        raise GraphoptError("redistribute needs the state of every rank, got none")
    for state in states:
        _check_version(state)
        _check_entries(state)
    old = sorted(map(plain_state, states), key=lambda state: state["rank"])
    _check_complete(old)
    _check_one_step(old)
    if len(old) == ranks:
        return [dict(state) for state in old]
    return [_for_rank(old, rank, ranks) for rank in range(ranks)]


def _check_complete(states: Sequence[Mapping[str, Any]]) -> None:
    """Refuse states, in the order of their ranks, among which a rank's is missing or there twice."""
    count = states[0]["ranks"] if states else 0
    if [state["rank"] for state in states] != list(range(count)):
        found = ", ".join(str(state["rank"]) for state in states) or "none"
        raise GraphoptError(f"redistribute needs the state of each of the {count} ranks; got those of {found}")


def _check_one_step(states: Sequence[Mapping[str, Any]]) -> None:
    """Refuse states that ranks have saved at different times, or of different steps."""
    for key in ("steps", "accumulate", "mean", "batches", "local"):
        values = [state[key] for state in states]
        if any(value != values[0] for value in values):
            raise GraphoptError(f"the states are not of one step: {key!r} is {values}")


def _for_rank(old: Sequence[Mapping[str, Any]], rank: int, ranks: int) -> dict[str, Any]:
    held = {name: tensor.clone() for name, tensor in old[0]["held"].items()}
    for name in old[0]["local"]:
        held[name] = _share([state["held"][name] for state in old], rank)
    gradients = {name: _share([state["gradients"][name] for state in old], rank) for name in old[0]["gradients"]}
    return {**old[0], "rank": rank, "ranks": ranks, "held": held, "gradients": gradients}


def _share(tensors: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
    """A new rank's share: the mean, or for counts the sum on rank 0."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor.to(total.device)
    if total.is_floating_point():
        return total.div_(len(tensors))
    return total if rank == 0 else torch.zeros_like(total)
