"""Values for a model without data: each rank keeps its shard of every parameter, and no rank has all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from graphopt.errors import GraphoptError, check_type, did_you_mean, public, whole_number, wrong_argument
from graphopt.ir.ops.communication.groups import find_group
from graphopt.ir.ops.values import is_dense
from graphopt.rewriting.distributed.rank_names import place
from graphopt.runtime.state.sharded_parameter import WaitingShard, become_sharded

__all__ = ["materialize_shards"]

_RESETS = ("reset_parameters", "_reset_parameters")
"""Methods by which modules set their own parameters."""


@public
def materialize_shards(
    model: nn.Module,
    values: Callable[[nn.Module], object] | Mapping[str, torch.Tensor] | None = None,
    *,
    group: str = "",
    min_bytes: int = 65_536,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """Give parameters and buffers on ``meta`` their values, module by module; each rank keeps shards of parameters.

    For ``ShardParameters``: a model made under ``graphopt.without_data()`` or ``torch.device("meta")`` takes no memory,
    and here never more than one module's parameters and this rank's Nth of all. All ranks call it, before the optimizer
    is made. Everywhere parameters are those of the group's first rank. Modules whose tensors have values stay as they
    are.

    Args:
        model: changed in place. Parameters on ``meta`` become new objects, tied ones one object in all their places.
        values: where they come from. A function of a module, called for each one with tensors on ``meta``, behind
            those within it, once its own tensors are there; modules with a tied parameter follow each other. Or a state
            by name, such as ``torch.load(path, mmap=True)``. None calls each module's own ``reset_parameters``; a
            module that has one is made with all that is within it.
        group: name of the process group, as for ``ShardParameters``; with one process all stay whole.
        min_bytes: parameters with fewer bytes stay whole, as for ``ShardParameters``.
        device: where they are to be.

    Returns:
        the model.

    Raises:
        ArgumentError: for arguments of another type.
        GraphoptError: for a tensor that nothing gives values, and for values of another shape, naming it; then some
            modules have their values, and the model is not of use.

    Example:
        >>> with graphopt.without_data():
        ...     large = torch.nn.Linear(1_000, 100)
        >>> large.weight.is_meta, graphopt.materialize_shards(large).weight.is_meta
        (True, False)
    """
    check_type("materialize_shards's model", model, nn.Module, "an nn.Module")
    _check_values(values)
    least = whole_number("materialize_shards's min_bytes", min_bytes, of="bytes")
    places = _Places(model, torch.device(device))
    with torch.no_grad():
        for unit in _units(model, whole=values is None):
            wanted = places.sharing([module for module in unit if next(_own(module), None) is not None])
            if not wanted:
                continue
            made = places.make(wanted)
            _fill(list(dict.fromkeys([*wanted, unit[-1]])), made, values)
            for tensor in made:
                tensor.check()
                tensor.keep(group, least)
    return model


def _check_values(values: object) -> None:
    if not (values is None or isinstance(values, Mapping) or callable(values)):
        hint = "torch.load(path, mmap=True) gives it from a file" if isinstance(values, str) else ""
        raise wrong_argument("materialize_shards's values", values, "a function of a module, or tensors by name", hint)


@dataclass
class _Made:
    """One tensor that takes the place of one on ``meta``.

    Attributes:
        names: of it in the model, one or more.
        tensor: with memory.
        version: of the tensor before it got values.
    """

    names: tuple[str, ...]
    tensor: torch.Tensor
    version: int

    def check(self) -> None:
        """Raise where elements have no value."""
        if self.tensor.is_floating_point() or self.tensor.is_complex():
            missing = bool(self.tensor.isnan().any())
        else:
            missing = self.tensor._version == self.version and not bool(self.tensor.ne(_nothing(self.tensor)).any())
        if missing:
            raise GraphoptError(
                f"nothing gave {self.names[0]!r} values in all of its {self.tensor.numel()} elements: let values=, or "
                "the module's reset_parameters, set it, or make its module with data"
            )

    def keep(self, group: str, least: int) -> None:
        """Take the values of the group's first rank, and of a parameter this rank's shard alone."""
        if place()[1] == 1 or (found := find_group(group)).size == 1:
            return
        dist.broadcast(self.tensor.detach(), group_src=0, group=found.handle)
        if isinstance(self.tensor, nn.Parameter) and self.tensor.nbytes >= least:
            become_sharded(self.names[0], self.tensor, WaitingShard.cut(self.tensor, group))


def _nothing(tensor: torch.Tensor) -> float | bool:
    """What stands in a tensor until it gets a value."""
    if tensor.is_floating_point() or tensor.is_complex():
        return float("nan")
    return False if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).max


class _Places:
    """Where the tensors of a model are that have no data, and what takes their place.

    Args:
        model: of all of them.
        device: where the new ones are.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._places: dict[torch.Tensor, list[tuple[nn.Module, str]]] = {}
        self._names: dict[torch.Tensor, list[str]] = {}
        for prefix, module in model.named_modules():
            for name, tensor in _own(module):
                self._places.setdefault(tensor, []).append((module, name))
                self._names.setdefault(tensor, []).append(f"{prefix}.{name}" if prefix else name)

    def sharing(self, modules: list[nn.Module]) -> list[nn.Module]:
        """Some modules, and those that share tensors with them: tied parameters are whole until all of them are set."""
        found = dict.fromkeys(modules)
        for module in modules:
            for _, tensor in _own(module):
                found |= dict.fromkeys(other for other, _ in self._places[tensor])
        return list(found)

    def make(self, modules: list[nn.Module]) -> list[_Made]:
        """Tensors with memory, and without values, for those of some modules that have none."""
        return [
            self._make(tensor) for tensor in dict.fromkeys(found for module in modules for _, found in _own(module))
        ]

    def _make(self, tensor: torch.Tensor) -> _Made:
        names = tuple(self._names[tensor])
        if not is_dense(tensor):
            raise GraphoptError(f"{names[0]!r} has gaps or overlaps in its memory, and cannot be made without data")
        data = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device)
        data.fill_(_nothing(data))
        made = nn.Parameter(data, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data
        vars(made).update(vars(tensor))
        for module, name in self._places[tensor]:
            if isinstance(made, nn.Parameter):
                module._parameters[name] = made
            else:
                module._buffers[name] = made
        return _Made(names, made, made._version)


def _own(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters and buffers of a module itself that are on ``meta``."""
    for own in (module._parameters, module._buffers):
        for name, tensor in own.items():
            if tensor is not None and tensor.is_meta:
                yield name, tensor


def _units(model: nn.Module, whole: bool) -> Iterator[list[nn.Module]]:
    """The modules that are made together, the innermost first in each.

    Args:
        model: of all of them.
        whole: whether a module that sets its own parameters is made with all that is within it.
    """
    if whole and _reset(model) is not None:
        yield _inside_out(model)
        return
    for child in dict.fromkeys(model.children()):
        yield from _units(child, whole)
    yield [model]


def _inside_out(module: nn.Module) -> list[nn.Module]:
    found: dict[nn.Module, None] = {}
    for child in module.children():
        found |= dict.fromkeys(_inside_out(child))
    return [*found, module]


def _reset(module: nn.Module) -> Callable[[], Any] | None:
    return next((found for name in _RESETS if callable(found := getattr(module, name, None))), None)


def _fill(
    unit: list[nn.Module], made: list[_Made], values: Callable[[nn.Module], object] | Mapping[str, Any] | None
) -> None:
    """Give the tensors of a unit their values."""
    if isinstance(values, Mapping):
        for tensor in made:
            _copy(tensor, values)
        return
    for module in unit:
        if values is not None:
            values(module)
        elif (reset := _reset(module)) is not None:
            reset()


def _copy(made: _Made, values: Mapping[str, Any]) -> None:
    name = next((name for name in made.names if name in values), None)
    if name is None:
        hint = did_you_mean(made.names[0], values) or "give a function of a module for what no file has"
        raise GraphoptError(f"the values have no {made.names[0]!r}; {hint}")
    value = values[name]
    check_type(f"materialize_shards's values[{name!r}]", value, torch.Tensor, "a tensor")
    if value.shape != made.tensor.shape:
        raise GraphoptError(
            f"the values give {name!r} the shape {list(value.shape)}, and the model wants {list(made.tensor.shape)}"
        )
    made.tensor.copy_(value)
