"""Results of a call that hide tensors, which a program cannot return: refused, or left out where they are caches."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch

from graphopt import _torch
from graphopt.capture.call.assigned_buffers import IN_PARTS
from graphopt.capture.guards.locations import is_traced
from graphopt.errors import CaptureError, GraphBreakError

__all__ = ["returnable"]


def returnable(result: Any) -> tuple[Any, list[str]]:
    """A result without caches of keys and values, which are for generating text, and where it had some.

    Raises:
        CaptureError: for numbers that depend on sizes which are open.
        GraphBreakError: for tensors in what a call cannot build again, and for numbers that are read from tensors.
    """
    places, spec = _torch.pytree.tree_flatten_with_path(result)
    leaves, left_out = [], []
    for place, leaf in places:
        hidden = not isinstance(leaf, torch.Tensor) and (is_traced(leaf) or isinstance(leaf, Iterator))
        if hidden and _is_cache(leaf):
            left_out.append(re.sub(r"^\.|^\['(\w+)'\]", r"\1", _torch.pytree.keystr(place)))
        elif _torch.is_of_sizes(leaf):
            raise CaptureError(
                "the result holds a number that depends on a size, and the sizes of the call are open: read it from "
                "the batch, or return it as a tensor"
            )
        elif isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise GraphBreakError(
                "the result holds a number that is read from a tensor (.item()), which a program does not do: return "
                f"the tensor{IN_PARTS}"
            )
        elif hidden:
            raise GraphBreakError(
                f"the result holds tensors in an object of {type(leaf).__name__}, which a program cannot make: return "
                f"them in a tuple, a dictionary, a named tuple or a dataclass{IN_PARTS}"
            )
        leaves.append(None if hidden else leaf)
    return (_torch.pytree.tree_unflatten(leaves, spec) if left_out else result), left_out


def _is_cache(value: object) -> bool:
    """Whether a value is a cache of ``transformers``, as models return where their ``config.use_cache`` is set."""
    kinds = [(kind.__module__.partition(".")[0], kind.__name__) for kind in type(value).__mro__]
    return any(package == "transformers" and name.endswith("Cache") for package, name in kinds)
