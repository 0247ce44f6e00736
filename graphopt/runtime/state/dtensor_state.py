"""The state of a step for ``torch.distributed.checkpoint``: shards as DTensors, which it puts together and cuts anew.

A shard is a part of the flat sequence of a parameter's elements in the order of memory, as ``torch.chunk`` cuts it. It
is therefore a DTensor of one dimension, with ``Shard(0)`` over the ranks of its group.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from graphopt.errors import GraphoptError, check_type, did_you_mean
from graphopt.ir.node import value_of
from graphopt.ir.ops.communication.groups import Group, find_group
from graphopt.ir.program import Program
from graphopt.rewriting.distributed.sharding.named_shards import is_sharded, plain_shards
from graphopt.rewriting.shards import shard_of
from graphopt.runtime.state.sharded_model import ShardedModel

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["dtensor_state", "load_dtensor_state"]

_PARTS = ("model", "optimizer", "step")


def dtensor_state(
    sharded: ShardedModel, optimizer: torch.optim.Optimizer, group: str | None, program: Program, own: Mapping[str, Any]
) -> dict[str, Any]:
    """What ``TrainStep.sharded_state_dict`` returns.

    Args:
        sharded: the model.
        optimizer: of it.
        group: name of the process group over which the optimizer's state is divided; None where it is not.
        program: that updates; the state that it reads and that the optimizer does not have yet is there as zeros.
        own: ``TrainStep.state_dict``.
    """
    model: dict[str, Any] = {}
    with sharded.described(), torch.no_grad():
        shards = sharded.own_shards()
        for name, value in sharded.model.state_dict(keep_vars=True).items():
            found = shards.get(value) if isinstance(value, torch.Tensor) else None
            if found is not None:
                model[name] = _distributed(found.tensor, found.group, value.numel())
            else:
                model[name] = value.detach() if isinstance(value, torch.Tensor) else value
    return {"model": model, "optimizer": _optimizer_state(sharded, optimizer, group, program), "step": dict(own)}


def _optimizer_state(
    sharded: ShardedModel, optimizer: torch.optim.Optimizer, group: str | None, program: Program
) -> dict[str, Any]:
    """The optimizer's state by the names of parameters."""
    names = _names(sharded, optimizer)
    elements = dict(zip(names, (parameter.numel() for parameter in _listed(optimizer)), strict=True))
    state = plain_shards(optimizer.state_dict())
    kept = {names[index]: dict(entries) for index, entries in state["state"].items()}
    for node, spec in program.inputs_of("state"):
        name, _, key = spec.target.rpartition("/")
        if key not in kept.setdefault(name, {}):
            value = value_of(node)
            kept[name][key] = torch.zeros(value.shape, dtype=value.dtype, device=value.device)
    if is_sharded(optimizer):
        divided = find_group(group or "")
        kept = {
            name: {key: _as_distributed(value, divided, elements[name]) for key, value in entries.items()}
            for name, entries in kept.items()
        }
    groups = [{**each, "params": [names[index] for index in each["params"]]} for each in state["param_groups"]]
    return {"state": kept, "param_groups": groups}


def _as_distributed(value: Any, group: Group, elements: int) -> Any:
    """A piece of an optimizer's state, which is a shard where it has a dimension."""
    return _distributed(value, group, elements) if isinstance(value, torch.Tensor) and value.dim() else value


def _distributed(shard: torch.Tensor, group: Group, elements: int) -> DTensor:
    """A shard as the part of a flat tensor that this rank has; shares memory with it."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = DeviceMesh.from_group(group.handle, shard.device.type)
    return DTensor.from_local(
        shard.detach(), mesh, [Shard(0)], run_check=False, shape=torch.Size([elements]), stride=(1,)
    )


# --- loading ---------------------------------------------------------------------------------------------------------


def _checked(state: object) -> Mapping[str, Any]:
    """The state, where it is one of ``sharded_state_dict``.

    Raises:
        ArgumentError: for what is no mapping.
        GraphoptError: for other keys.
    """
    expected = "what TrainStep.sharded_state_dict() returned"
    check_type("state", state, Mapping, expected)
    assert isinstance(state, Mapping)
    for part in _PARTS:
        if part not in state:
            raise GraphoptError(f"the state has no {part!r}: give {expected}, which has {', '.join(_PARTS)}")
        check_type(f"the state's {part!r}", state[part], Mapping, "a dict")
    for part in ("state", "param_groups"):
        if part not in state["optimizer"]:
            raise GraphoptError(f"the state's 'optimizer' has no {part!r}: give {expected}")
    for name, entries in state["optimizer"]["state"].items():
        check_type(f"the state of {name!r}", entries, Mapping, "a dict")
    return state


def load_dtensor_state(
    sharded: ShardedModel,
    optimizer: torch.optim.Optimizer,
    group: str | None,
    state: object,
    load_own: Callable[[Mapping[str, Any]], None],
) -> None:
    """Take over a whole state; all ranks come here together.

    Args:
        sharded: the model, whose parameters may be whole or in shards.
        optimizer: of it.
        group: name of the process group over which the passes of the step divide its state; None where none does.
        state: what ``dtensor_state`` returned.
        load_own: ``TrainStep.load_state_dict``, which changes nothing where it raises.

    Raises:
        ArgumentError: for what is no state.
        GraphoptError: for names and shapes that are not those of model, optimizer and passes; nothing is changed then.
    """
    parts = _checked(state)
    kept = _optimizer_state_here(sharded, optimizer, group, parts["optimizer"], parts["step"].get("steps", 0))
    _check_model(sharded, parts["model"])
    load_own(parts["step"])
    _load_model(sharded, parts["model"])
    optimizer.load_state_dict(kept)


def _check_model(sharded: ShardedModel, state: Mapping[str, Any]) -> None:
    """Look whether a state is the model's.

    Args:
        sharded: the model.
        state: by the names of its ``state_dict``.

    Raises:
        GraphoptError: for names and shapes that are not the model's.
    """
    with sharded.described():
        known = sharded.model.state_dict(keep_vars=True)
        _check_names("the model", state, known)
        for name, here in known.items():
            if isinstance(here, torch.Tensor):
                flat = _is_distributed(state[name])
                _check_shape(name, state[name], torch.Size([here.numel()]) if flat else here.shape)


def _load_model(sharded: ShardedModel, state: Mapping[str, Any]) -> None:
    """Take over the model's part; all ranks come here together.

    Args:
        sharded: the model, whose parameters may be whole or in shards.
        state: whole tensors, and DTensors of flat ones, by the names of the model's ``state_dict``.

    Raises:
        GraphoptError: for shards of another division.
    """
    with sharded.described(), torch.no_grad():
        own = sharded.own_shards()
        plain = {}
        for name, here in sharded.model.state_dict(keep_vars=True).items():
            shard = own.get(here) if isinstance(here, torch.Tensor) else None
            if shard is not None:
                shard.tensor.copy_(_part(name, state[name], here, shard.first, shard.length))
            else:
                plain[name] = _whole(name, state[name], here) if isinstance(here, torch.Tensor) else state[name]
        sharded.model.load_state_dict(plain, strict=False)


def _optimizer_state_here(
    sharded: ShardedModel, optimizer: torch.optim.Optimizer, group: str | None, state: Mapping[str, Any], steps: int
) -> dict[str, Any]:
    """The optimizer's part as ``load_state_dict`` takes it on this rank; all ranks come here together.

    Args:
        sharded: the model.
        optimizer: of it.
        group: name of the process group over which the passes of the step divide its state; None where none does.
        state: by the names of parameters.
        steps: the updates made so far: before the first one, zeros stand for no state.

    Raises:
        GraphoptError: for names and shapes that are not the optimizer's.
    """
    names = _names(sharded, optimizer)
    numbers = {name: index for index, name in enumerate(names)}
    parameters = _listed(optimizer)
    divided = find_group(group) if group is not None else None
    _check_known("the optimizer", state["state"], numbers)
    begins = not steps and not any(_has_values(entries) for entries in state["state"].values())
    kept: dict[int, dict[str, Any]] = {}
    for name, entries in state["state"].items() if not begins else ():
        parameter = parameters[numbers[name]]
        kept[numbers[name]] = {
            key: _entry(f"{name}/{key}", value, parameter, divided) for key, value in entries.items()
        }
    grouped = _grouped(names, optimizer)
    if [each.get("params") for each in state["param_groups"]] != grouped:
        raise GraphoptError(
            "the state is of other groups of parameters than the optimizer's: make it of the same parameters in the "
            "same order"
        )
    pairs = zip(state["param_groups"], grouped, strict=True)
    groups = [{**each, "params": [numbers[name] for name in mine]} for each, mine in pairs]
    return {"state": kept, "param_groups": groups}


def _has_values(entries: Mapping[str, Any]) -> bool:
    """Whether some element of a parameter's state is not zero, on whatever rank."""
    tensors = (value for value in entries.values() if isinstance(value, torch.Tensor))
    return any(bool((value.full_tensor() if _is_distributed(value) else value).any()) for value in tensors)


def _entry(what: str, value: Any, parameter: torch.Tensor, divided: Group | None) -> Any:
    """A piece of the optimizer's state as this rank keeps it."""
    if not isinstance(value, torch.Tensor) or not value.dim():
        return value
    if divided is None:
        return _whole(what, value, parameter)
    return _part(what, value, parameter, *shard_of(parameter.numel(), divided.rank, divided.size))


def _whole(what: str, value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """All elements, in a parameter's shape."""
    if not _is_distributed(value):
        _check_shape(what, value, parameter.shape)
        return value
    _check_shape(what, value, torch.Size([parameter.numel()]))
    return value.full_tensor().as_strided(parameter.shape, parameter.stride())


def _part(what: str, value: torch.Tensor, parameter: torch.Tensor, first: int, length: int) -> torch.Tensor:
    """The elements of this rank, in the order of memory."""
    if not _is_distributed(value):
        _check_shape(what, value, parameter.shape)
        laid_out = torch.empty_strided(parameter.shape, parameter.stride(), dtype=value.dtype).copy_(value)
        return laid_out.as_strided([value.numel()], [1])[first : first + length].clone()
    _check_shape(what, value, torch.Size([parameter.numel()]))
    local: torch.Tensor = value.to_local()
    if local.shape != (length,):
        raise GraphoptError(
            f"{what!r} has {local.numel()} elements on this rank in the state, and {length} here: load the checkpoint "
            "into step.sharded_state_dict() of this step, which torch.distributed.checkpoint cuts anew"
        )
    return local


def _is_distributed(value: torch.Tensor) -> TypeGuard[DTensor]:
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


def _check_shape(what: str, value: torch.Tensor, shape: torch.Size) -> None:
    if value.shape != shape:
        raise GraphoptError(f"{what!r} has the shape {list(value.shape)} in the state, and {list(shape)} here")


def _check_names(whose: str, state: Collection[str], known: Collection[str]) -> None:
    """Refuse a state that lacks something, or has something else."""
    _check_known(whose, state, known)
    for name in known:
        if name not in state:
            raise GraphoptError(f"the state has no {name!r}, which {whose} has")


def _check_known(whose: str, state: Collection[str], known: Collection[str]) -> None:
    for name in state:
        if name not in known:
            hint = did_you_mean(name, known)
            raise GraphoptError(f"the state has {name!r}, which {whose} has not{f'; {hint}' if hint else ''}")


# --- names -----------------------------------------------------------------------------------------------------------


def _listed(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for each in optimizer.param_groups for parameter in each["params"]]


def _grouped(names: list[str], optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """The names of each of the optimizer's groups."""
    found = iter(names)
    return [[next(found) for _ in each["params"]] for each in optimizer.param_groups]


def _names(sharded: ShardedModel, optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of the optimizer's parameters, in its order; the number of one that the model does not have."""
    names = {id(parameter): name for name, parameter in sharded.model.named_parameters()}
    return [names.get(id(parameter), str(index)) for index, parameter in enumerate(_listed(optimizer))]
