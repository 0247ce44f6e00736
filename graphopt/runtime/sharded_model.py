"""A model whose parameters are without memory between steps, since each rank keeps shards of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from graphopt import _torch
from graphopt.errors import GraphoptError
from graphopt.ir.ops.groups import find_group
from graphopt.ir.state import PassState
from graphopt.runtime.state_store import StateStore

__all__ = ["ShardedModel", "ShardedParameter"]

_WITHOUT_DATA = (
    "shape", "dtype", "device", "layout", "requires_grad", "grad", "is_leaf", "grad_fn", "ndim", "is_cuda", "is_meta",
    "is_sparse",
)  # fmt: skip
"""What may be asked of a parameter that has no memory: properties."""

_FUNCTIONS = {
    torch.Tensor.size, torch.Tensor.stride, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.nelement,
    torch.Tensor.element_size, torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.Tensor.storage_offset,
    torch.Tensor.is_contiguous, torch.Tensor.requires_grad_, torch.Tensor.__len__, torch.Tensor.__repr__,
}  # fmt: skip
_ALLOWED = _FUNCTIONS | {
    accessor
    for name in _WITHOUT_DATA
    for accessor in (getattr(torch.Tensor, name).__get__, getattr(getattr(torch.Tensor, name), "__set__", None))
    if accessor is not None
}


class ShardedParameter(nn.Parameter):
    """What a parameter is while its values are in the shards of all ranks: who reads it is told so."""

    graphopt_name: str

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Give what needs no values, and refuse everything else.

        Raises:
            GraphoptError: with the parameter's name, and what to write.
        """
        del types
        if func is torch.Tensor.__repr__:
            return f"<sharded parameter {args[0].graphopt_name!r}, without memory on this rank>"
        if func not in _ALLOWED:
            found = [item for item in _flat((args, kwargs)) if type(item) is ShardedParameter]
            name = found[0].graphopt_name if found else "a parameter"
            raise GraphoptError(
                f"{getattr(func, '__name__', func)} reads {name!r}, of which each rank keeps a shard "
                "(shard-parameters): do so inside of `with step.whole_parameters():`, on all ranks"
            )
        return _torch.call_plainly(func, args, kwargs or {})


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
    elif isinstance(value, dict):
        yield from _flat(list(value.values()))
    else:
        yield value


def _become(parameter: nn.Parameter, kind: type[nn.Parameter]) -> None:
    """Let a parameter be of another class: the same object, to which torch's functions are applied in another way."""
    parameter.__class__ = kind


class ShardedModel:
    """Takes the memory of parameters away whose shards a store keeps, and gives it back for a while.

    Args:
        model: whose parameters.
        store: has the shards.
    """

    def __init__(self, model: nn.Module, store: StateStore) -> None:
        self._model = model
        self._store = store
        self._shards: dict[str, tuple[str, PassState]] = {}
        self._whole = 0

    def refuse_step(self) -> None:
        """Raise where parameters are whole for a while: a step would take their memory away.

        Raises:
            GraphoptError: saying so.
        """
        if self._whole and self._shards:
            raise GraphoptError(
                "a step inside of `with step.whole_parameters():`, where parameters are whole: call it outside"
            )

    def take(self, states: Mapping[str, PassState]) -> None:
        """Let parameters be their shards from now on.

        One that has memory, since it is new to this, or was replaced, gives its shard the values that it has.

        Args:
            states: what the passes of a program keep, by name.
        """
        for target, state in states.items():
            if state.shard is not None:
                self._shards[state.source] = target, state
        with torch.no_grad():
            for name, (target, state) in self._shards.items():
                parameter = self._model.get_parameter(name)
                if type(parameter) is not ShardedParameter and parameter.untyped_storage().nbytes():
                    self._store[target].copy_(state.create(parameter))
                    self._free(name, parameter)

    def _free(self, name: str, parameter: nn.Parameter) -> None:
        nothing = torch.empty_strided(
            parameter.shape, parameter.stride(), dtype=parameter.dtype, device=parameter.device
        )
        nothing.untyped_storage().resize_(0)
        parameter.data = nothing
        _become(parameter, ShardedParameter)
        parameter.graphopt_name = name  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def described(self) -> Iterator[None]:
        """Let parameters be plain ones, without memory, for who looks at their shapes and dtypes only."""
        named = [(name, self._model.get_parameter(name)) for name in self._shards] if not self._whole else []
        empty = [(name, parameter) for name, parameter in named if type(parameter) is ShardedParameter]
        for _, parameter in empty:
            _become(parameter, nn.Parameter)
        try:
            yield
        finally:
            for _, parameter in empty:
                _become(parameter, ShardedParameter)

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Let parameters be whole on all ranks, which have to come here together; what is changed is taken over."""
        self._whole += 1
        try:
            if self._whole == 1:
                self._gather()
            yield
        finally:
            self._whole -= 1
            if not self._whole:
                self.take({})

    def _gather(self) -> None:
        with torch.no_grad():
            for name, (target, state) in self._shards.items():
                parameter = self._model.get_parameter(name)
                if type(parameter) is not ShardedParameter:
                    continue
                _become(parameter, nn.Parameter)
                group = find_group(state.group)
                found = self._store[target].new_empty(group.size * state.shape[0])
                dist.all_gather_into_tensor(found, self._store[target], group=group.handle)
                parameter.data = found.as_strided(parameter.shape, parameter.stride(), 0).clone(
                    memory_format=torch.preserve_format
                )
