"""The op that checks, at its first run, that all ranks of a group hold the same tensor.

In a program it stands where a pass puts it, and nothing reads its result::

    y = aten.add(x, h)                                      # the checkpoint blocks.0
    graphopt.same_on_all_ranks(y, "blocks.0", "1")          # compares digests at the first run, later nothing
"""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch.fx.node import has_side_effect

from graphopt.errors import GraphoptError
from graphopt.ir.ops.communication.groups import find_group

__all__ = ["same_on_all_ranks"]

_compared: set[tuple[object, ...]] = set()
"""What has been compared in this process: group, name, shape and dtype. The same on all ranks of a group."""

_torch_library: Any = torch.library  # torch leaves it untyped
_library = _torch_library.Library("graphopt", "FRAGMENT")
_library.define("same_on_all_ranks(Tensor(a) x, str name, str group) -> Tensor(a)")


def _digest(x: torch.Tensor) -> bytes:
    """A digest of the bits of a tensor's values; what differs in one bit has another one."""
    values = x.detach().cpu().contiguous()
    size = values.numel() * values.element_size()
    return hashlib.blake2b((ctypes.c_char * size).from_address(values.data_ptr()) if size else b"").digest()


def _same_on_all_ranks(x: torch.Tensor, name: str, group: str) -> torch.Tensor:
    key = (group, name, tuple(x.shape), x.dtype)
    if key not in _compared:
        _compare(_digest(x), name, group)
        _compared.add(key)
    return x


def _compare(digest: bytes, name: str, group: str) -> None:
    found = find_group(group)
    digests: list[Any] = [None] * found.size
    dist.all_gather_object(digests, digest, group=found.handle)
    others = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if others:
        raise GraphoptError(
            f"{name!r} on rank {others[0]} of the group {group!r} is not what it is on rank 0: slices of it would make "
            "a mixture of both. The ranks of the group must compute the same values from the same data, as those of a "
            "model-parallel group do; for ranks with data of their own, leave partition-checkpoints out"
        )


def _fake(x: torch.Tensor, name: str, group: str) -> torch.Tensor:
    return x


for _device in ("CPU", "CUDA"):
    _library.impl("same_on_all_ranks", _same_on_all_ranks, _device)
_torch_library.register_fake("graphopt::same_on_all_ranks", _fake, lib=_library)

same_on_all_ranks = torch.ops.graphopt.same_on_all_ranks.default
"""``same_on_all_ranks(Tensor(a) x, str name, str group) -> Tensor(a)``: compares, and returns ``x``.

At the first call with a group, a name, a shape and a dtype, digests of 64 bytes are gathered from all ranks of the
group, each of which has to make the call; a tensor on a device is copied to the host for that. Once they have agreed,
later such calls do nothing. Raises ``GraphoptError`` on every rank, naming the tensor and the first rank whose values
are not those of rank 0.
"""

has_side_effect(same_on_all_ranks)


def _as_it_is(context: Any, *args: Any) -> Any:
    """Let a compiler that removes mutation (inductor does) pass the op, whose result is its argument, as it is."""
    plain = context.unwrap_tensors(args)
    with context.redispatch_to_next():
        return context.wrap_tensors(_op(*plain))


_op: Any = same_on_all_ranks
_op.py_functionalize_impl(_as_it_is)
