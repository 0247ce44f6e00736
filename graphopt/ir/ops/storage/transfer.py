"""The ops that move tensors out of the way and back: offload, offload_wait, prefetch, prefetch_wait.

In a program they stand where passes put them::

    handle = graphopt.offload(x, "host")            # starts copying x's storage away
    ...                                             # computing goes on; x may still be read, not written
    away = graphopt.offload_wait(handle, x)         # x may be freed after this
    ...
    y = graphopt.prefetch(away, size, stride, storage_offset, storage_size, dtype, device)    # starts copying back
    ...
    z = graphopt.prefetch_wait(y, away)             # equal to x, bit for bit

A handle is an int64 tensor of shape [1] on the CPU, outside of torch's allocator. It owns the stored bytes: when its
storage is freed, with the last tensor or saved tensor that shares it, they are given up, whatever happened in
between. Until then it can be prefetched any number of times. Copies run in the order in which they are started.

``graphopt.ir.ops.transfers`` does the work; its docstring and ``configure``, ``reserve`` and ``statistics`` say how.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.node import has_side_effect

from graphopt.errors import GraphoptError
from graphopt.ir.ops import transfers

__all__ = ["offload", "offload_wait", "prefetch", "prefetch_wait"]

_DEVICES = ("CPU", "CUDA")

_torch_library: Any = torch.library  # torch leaves it untyped
_library = _torch_library.Library("graphopt", "FRAGMENT")
_library.define("offload(Tensor x, str tier) -> Tensor")
_library.define("offload_wait(Tensor(a) handle, Tensor x) -> Tensor(a)")
_library.define(
    "prefetch(Tensor handle, SymInt[] size, SymInt[] stride, SymInt storage_offset, SymInt storage_size, "
    "ScalarType dtype, Device device) -> Tensor"
)
_library.define("prefetch_wait(Tensor(a) x, Tensor handle) -> Tensor(a)")


def _offload(x: torch.Tensor, tier: str) -> torch.Tensor:
    return transfers.engine().offload(x, tier)


def _offload_wait(handle: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    transfers.engine().offload_wait(handle)
    return handle


def _prefetch(
    handle: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int,
    storage_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    wanted = transfers.StoredTensor(size, stride, storage_offset, storage_size, dtype, device)
    return transfers.engine().prefetch(handle, wanted)


def _prefetch_wait(x: torch.Tensor, handle: torch.Tensor) -> torch.Tensor:
    transfers.engine().prefetch_wait(x, handle)
    return x


def _fake_offload(x: torch.Tensor, tier: str) -> torch.Tensor:
    return torch.empty(1, dtype=torch.int64, device="cpu")


def _fake_prefetch(
    handle: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int,
    storage_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    return transfers.StoredTensor(size, stride, storage_offset, storage_size, dtype, device).allocate()


def _functionalize(op: Any) -> None:
    """Let a compiler that removes mutation (inductor does) pass an op with an aliased result through as it is."""

    def rule(context: Any, *args: Any) -> Any:
        plain = context.unwrap_tensors(args)
        with context.redispatch_to_next():
            return context.wrap_tensors(op(*plain))

    op.py_functionalize_impl(rule)


def _refuse_lazy_values(x: torch.Tensor, tier: str) -> torch.Tensor:
    raise GraphoptError(
        f"graphopt::offload: a tensor of shape {list(x.shape)} is a conjugate or negative view, whose values are not "
        "what its storage holds; offload the tensor that it is a view of"
    )


def _register(name: str, real: Callable[..., Any], fake: Callable[..., Any]) -> None:
    for device in _DEVICES:
        _library.impl(name, real, device)
    _torch_library.register_fake(f"graphopt::{name}", fake, lib=_library)


_register("offload", _offload, _fake_offload)
_register("offload_wait", _offload_wait, lambda handle, x: handle)
_register("prefetch", _prefetch, _fake_prefetch)
_register("prefetch_wait", _prefetch_wait, lambda x, handle: x)
for _key in ("Conjugate", "Negative"):
    _library.impl("offload", _refuse_lazy_values, _key)

offload = torch.ops.graphopt.offload.default
"""``offload(Tensor x, str tier) -> Tensor``: start copying the whole storage of ``x`` to ``"host"`` or ``"disk"``.

Returns the handle. ``x`` must not be written to, and must live, until ``offload_wait``. Raises ``GraphoptError`` for an
unknown tier; where there is no room, ``offload_wait`` does.
"""

offload_wait = torch.ops.graphopt.offload_wait.default
"""``offload_wait(Tensor(a) handle, Tensor x) -> Tensor(a)``: wait until the copy is done; returns the handle.

``x`` is an argument so that it lives until here. On CUDA and to the host the current stream waits, and the thread goes
on. Raises ``GraphoptError`` where the copy failed: no host memory, disk full, and so on.
"""

prefetch = torch.ops.graphopt.prefetch.default
"""``prefetch(Tensor handle, size, stride, storage_offset, storage_size, ScalarType dtype, Device device) -> Tensor``.

Allocates a storage of ``storage_size`` elements on ``device`` and starts copying into it. Returns the tensor of that
size, stride and offset; its values may be read after ``prefetch_wait``. Raises ``GraphoptError`` where the handle holds
nothing, or less than is asked for.
"""

prefetch_wait = torch.ops.graphopt.prefetch_wait.default
"""``prefetch_wait(Tensor(a) x, Tensor handle) -> Tensor(a)``: wait until the copy to ``x`` is done; returns ``x``.

On CUDA and from the host the current stream waits, and the thread goes on. Raises ``GraphoptError`` where the copy
failed.
"""

for _wait in (offload_wait, prefetch_wait):
    _functionalize(_wait)
    # Removing a wait whose result nothing reads would free, or hand out, memory that is being copied.
    has_side_effect(_wait)
