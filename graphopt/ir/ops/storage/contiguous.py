"""The ops that keep several tensors in one block of memory: block, store.

In a program they stand where a pass puts them::

    block = graphopt.block(4096, torch.float32, device("cpu"), 0)     # uninitialised memory for all of them
    a = graphopt.store(block, x, 0)                                   # equal to x, bit for bit; x can be freed
    b = graphopt.store(block, y, 2048)

Each part of a block is written once, before it is read: what ``store`` returns never changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.node import has_side_effect

__all__ = ["block", "store"]

_torch_library: Any = torch.library  # torch leaves it untyped
_library = _torch_library.Library("graphopt", "FRAGMENT")
_library.define("block(int elements, ScalarType dtype, Device device, int number) -> Tensor")
_library.define("store(Tensor(a) block, Tensor x, int offset) -> Tensor(a)")


def _block(elements: int, dtype: torch.dtype, device: torch.device, number: int) -> torch.Tensor:
    return torch.empty(elements, dtype=dtype, device=device)


def _store(block: torch.Tensor, x: torch.Tensor, offset: int) -> torch.Tensor:
    part = _part(block, x, offset)
    part.copy_(x)
    return part


def _part(block: torch.Tensor, x: torch.Tensor, offset: int) -> torch.Tensor:
    return block.as_strided(x.shape, x.stride(), offset)


def _functionalize(op: Any) -> None:
    """Let a compiler that removes mutation (inductor does) pass an op with an aliased result through as it is."""

    def rule(context: Any, *args: Any) -> Any:
        plain = context.unwrap_tensors(args)
        with context.redispatch_to_next():
            return context.wrap_tensors(op(*plain))

    op.py_functionalize_impl(rule)


def _register(name: str, key: str, real: Callable[..., Any], fake: Callable[..., Any]) -> None:
    _library.impl(name, real, key)
    _torch_library.register_fake(f"graphopt::{name}", fake, lib=_library)


_register("block", "CompositeExplicitAutograd", _block, _block)
_register("store", "CompositeExplicitAutograd", _store, _part)

block = torch.ops.graphopt.block.default
"""``block(int elements, ScalarType dtype, Device device, int number) -> Tensor``: memory for ``elements`` elements.

Its values mean nothing before ``store``. Blocks of one program have different numbers, so that no compiler takes two of
them for one.
"""

store = torch.ops.graphopt.store.default
"""``store(Tensor(a) block, Tensor x, int offset) -> Tensor(a)``: copy ``x`` to where ``offset`` elements lie before it.

Returns a tensor of the shape and strides of ``x`` on the block's memory. The elements of ``x`` must lie in its storage
without gaps or overlap, and what one store writes no other one may.
"""

has_side_effect(block)
has_side_effect(store)
_functionalize(store)
