"""A parameter whose values are in the shards of all ranks: the same object, without memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphopt import _torch
from graphopt.errors import GraphoptError
from graphopt.ir.ops.communication.collectives import ALL_GATHER, WAIT
from graphopt.ir.ops.communication.groups import find_group, talking
from graphopt.rewriting.shards import piece_of, shard_of

__all__ = [
    "ShardedParameter",
    "WaitingShard",
    "become_plain",
    "become_sharded",
    "become_whole",
    "hide",
    "is_sharded",
    "take_waiting",
    "waiting_shard",
]

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
    graphopt_waiting: WaitingShard | None

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


@dataclass(frozen=True, slots=True)
class WaitingShard:
    """This rank's shard of a parameter that no step keeps yet.

    Attributes:
        tensor: of shape [ceil(elements / ranks)], the last elements zeros where there are fewer.
        group: name of the process group.
    """

    tensor: torch.Tensor
    group: str

    @classmethod
    def cut(cls, parameter: torch.Tensor, group: str) -> WaitingShard:
        """This rank's shard of a parameter that is whole.

        Args:
            parameter: dense.
            group: name of the process group.
        """
        found = find_group(group)
        first, length = shard_of(parameter.numel(), found.rank, found.size)
        tensor = parameter.detach().new_zeros(piece_of(parameter.numel(), found.size))
        tensor[:length].copy_(parameter.detach().as_strided([parameter.numel()], [1])[first : first + length])
        return cls(tensor, found.name)


def is_sharded(parameter: torch.Tensor) -> bool:
    """Whether a parameter's values are in shards."""
    return type(parameter) is ShardedParameter


def become_sharded(name: str, parameter: nn.Parameter, waiting: WaitingShard | None = None) -> None:
    """Take a parameter's memory away; torch's functions are refused from now on.

    Args:
        name: of the parameter, for errors.
        parameter: the same object afterwards.
        waiting: this rank's shard, which waits at the parameter for a step; None where one keeps it already.
    """
    nothing = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=parameter.device)
    nothing.untyped_storage().resize_(0)
    parameter.data = nothing
    parameter.graphopt_name = name  # type: ignore[attr-defined]
    parameter.graphopt_waiting = waiting  # type: ignore[attr-defined]
    parameter.__class__ = ShardedParameter


def hide(parameter: nn.Parameter) -> None:
    """Refuse torch's functions again for a parameter that ``become_plain`` opened, and that is without memory still."""
    if not parameter.untyped_storage().nbytes():
        parameter.__class__ = ShardedParameter


def become_plain(parameter: nn.Parameter) -> None:
    """Let torch's functions be applied to a parameter again, whether it has memory or not."""
    parameter.__class__ = nn.Parameter


def become_whole(parameter: nn.Parameter, shard: torch.Tensor, group: str) -> None:
    """Gather a parameter from all ranks of a group, which have to come here together.

    Args:
        parameter: without memory; a plain one with memory afterwards.
        shard: this rank's, of shape [ceil(elements / ranks)].
        group: name of the process group.
    """
    become_plain(parameter)
    found = find_group(group)
    with talking():
        whole = WAIT(ALL_GATHER(shard, found.size, found.name))
    parameter.data = whole.as_strided(parameter.shape, parameter.stride(), 0).clone(memory_format=torch.preserve_format)


def waiting_shard(parameter: torch.Tensor | None) -> WaitingShard | None:
    """The shard that waits at a parameter; None where there is none."""
    return getattr(parameter, "graphopt_waiting", None)


def take_waiting(parameter: torch.Tensor) -> WaitingShard | None:
    """The shard that waits at a parameter, for who keeps it from now on."""
    found = waiting_shard(parameter)
    if found is not None:
        parameter.graphopt_waiting = None  # type: ignore[attr-defined]
    return found
