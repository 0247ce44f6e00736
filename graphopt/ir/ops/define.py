"""How ops are defined and what they say about wrong arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphopt.errors import GraphoptError

__all__ = ["define", "described", "require"]

_torch_library: Any = torch.library  # torch leaves it untyped
_library = _torch_library.Library("graphopt", "FRAGMENT")


def define(
    schema: str,
    real: Callable[..., Any],
    fake: Callable[..., Any],
    cuda: Callable[..., Any] | None = None,
    *,
    tags: Sequence[Any] = (),
) -> Any:
    """Make an op of the namespace ``graphopt`` known to torch, and return it.

    Args:
        schema: name, arguments and results.
        real: computes it.
        fake: makes results of the same shapes, strides, dtypes and devices.
        cuda: computes it for CUDA tensors; None for ``real``.
        tags: what else torch should know (``torch.Tag``).
    """
    name, _, arguments = schema.partition("(")
    _library.define(schema, tags=tuple(tags))
    if "Tensor" in arguments.partition("->")[0]:
        _library.impl(name, real, "CPU")
        _library.impl(name, cuda or real, "CUDA")
    else:
        _library.impl(name, real, "CompositeExplicitAutograd")
    _torch_library.register_fake(f"graphopt::{name}", fake, lib=_library)
    return getattr(torch.ops.graphopt, name).default


def require(holds: bool, op: str, message: str) -> None:
    """Raise ``GraphoptError`` with the op's name where an argument is wrong."""
    if not holds:
        raise GraphoptError(f"graphopt::{op}: {message}")


def described(x: torch.Tensor | None) -> str:
    """A tensor's dtype and shape, for messages."""
    return "None" if x is None else f"{x.dtype} of shape {list(x.shape)}"
