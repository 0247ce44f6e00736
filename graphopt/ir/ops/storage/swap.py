"""The ops for tensors that reside on the host or on a disk: swap_in, swap_out, move_out, and a wait for each.

In a program they stand where passes put them, around the calls that need the tensor::

    m = graphopt.swap_in(at, "disk", device)    # starts copying the tensor at to the device
    ...                                         # computing goes on
    m = graphopt.swap_in_wait(m, at)            # equal to at, bit for bit
    m.mul_(0.9)                                 # the update
    graphopt.swap_out(at, m, "disk")            # starts copying m back
    ...                                         # m may be read, not written
    graphopt.swap_out_wait(at, m)               # m may be freed after this

A tensor is placed on a tier by ``graphopt.ir.ops.transfers.residents()``. For one that is in memory like any other, the
ops copy at once: a program computes the same wherever its inputs are. ``move_out`` is for what a program creates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.node import has_side_effect

from graphopt.ir.ops.transfers import checked_tier, residents

__all__ = ["move_out", "move_out_wait", "swap_in", "swap_in_wait", "swap_out", "swap_out_wait"]

_torch_library: Any = torch.library  # torch leaves it untyped
_library = _torch_library.Library("graphopt", "FRAGMENT")
_library.define("swap_in(Tensor at, str tier, Device device) -> Tensor")
_library.define("swap_in_wait(Tensor(a) x, Tensor at) -> Tensor(a)")
_library.define("swap_out(Tensor(a!) at, Tensor x, str tier) -> ()")
_library.define("swap_out_wait(Tensor(a!) at, Tensor x) -> ()")
_library.define("move_out(Tensor x, str tier) -> Tensor")
_library.define("move_out_wait(Tensor(a) at, Tensor x) -> Tensor(a)")


def _swap_in(at: torch.Tensor, tier: str, device: torch.device) -> torch.Tensor:
    return residents().fetch(at, device)


def _swap_in_wait(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    residents().wait_fetched(x, at)
    return x


def _swap_out(at: torch.Tensor, x: torch.Tensor, tier: str) -> None:
    residents().put_back(at, x)


def _swap_out_wait(at: torch.Tensor, x: torch.Tensor) -> None:
    residents().wait_put_back(at)


def _move_out(x: torch.Tensor, tier: str) -> torch.Tensor:
    return residents().move(x, checked_tier(tier))


def _move_out_wait(at: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    residents().wait_moved(at)
    return at


def _fake_swap_in(at: torch.Tensor, tier: str, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(at.shape, at.stride(), dtype=at.dtype, device=device)


def _fake_move_out(x: torch.Tensor, tier: str) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")


def _register(name: str, real: Callable[..., Any], fake: Callable[..., Any]) -> None:
    for device in ("CPU", "CUDA"):
        _library.impl(name, real, device)
    _torch_library.register_fake(f"graphopt::{name}", fake, lib=_library)


_register("swap_in", _swap_in, _fake_swap_in)
_register("swap_in_wait", _swap_in_wait, lambda x, at: x)
_register("swap_out", _swap_out, lambda at, x, tier: None)
_register("swap_out_wait", _swap_out_wait, lambda at, x: None)
_register("move_out", _move_out, _fake_move_out)
_register("move_out_wait", _move_out_wait, lambda at, x: at)

swap_in = torch.ops.graphopt.swap_in.default
"""``swap_in(Tensor at, str tier, Device device) -> Tensor``: start copying ``at`` from its tier to a device.

The result has the sizes and strides of ``at``, and its values after ``swap_in_wait``. A copy to the same tensor that is
under way is waited for.
"""

swap_in_wait = torch.ops.graphopt.swap_in_wait.default
"""``swap_in_wait(Tensor(a) x, Tensor at) -> Tensor(a)``: wait for the copy of ``swap_in``; returns ``x``.

Raises ``GraphoptError`` where the copy failed.
"""

swap_out = torch.ops.graphopt.swap_out.default
"""``swap_out(Tensor(a!) at, Tensor x, str tier) -> ()``: start copying ``x`` to where ``at`` resides.

``x`` must not be written to, and must live, until ``swap_out_wait``.
"""

swap_out_wait = torch.ops.graphopt.swap_out_wait.default
"""``swap_out_wait(Tensor(a!) at, Tensor x) -> ()``: wait for the copy of ``swap_out``.

Raises ``GraphoptError`` where the copy failed: the disk is full, say.
"""

move_out = torch.ops.graphopt.move_out.default
"""``move_out(Tensor x, str tier) -> Tensor``: start copying a new tensor to a tier; returns the one that resides there.

``x`` must not be written to, and must live, until ``move_out_wait``. Raises ``GraphoptError`` where there is no room.
"""

move_out_wait = torch.ops.graphopt.move_out_wait.default
"""``move_out_wait(Tensor(a) at, Tensor x) -> Tensor(a)``: wait for the copy of ``move_out``; returns ``at``.

Raises ``GraphoptError`` where the copy failed.
"""

for _wait in (swap_in_wait, move_out_wait):
    # Removing a wait whose result nothing reads would hand out memory that is being copied.
    has_side_effect(_wait)
