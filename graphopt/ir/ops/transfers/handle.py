"""Handles: tensors that stand for bytes stored elsewhere, and that give them up when they die."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable

import torch

from graphopt.errors import GraphoptError

__all__ = ["block_id", "make_handle"]


class _Cell(ctypes.c_int64):
    """The eight bytes of a handle."""


def make_handle(number: int, released: Callable[[int], object]) -> torch.Tensor:
    """A CPU tensor of shape [1], dtype int64, that holds ``number``; its memory is not from torch's allocator.

    Args:
        number: the id of a block.
        released: called with ``number`` when the tensor's storage is freed, so when the last tensor, view or saved
            tensor that shares it is gone; in whichever thread that happens, also in the middle of a garbage collection.
    """
    cell = _Cell(number)
    weakref.finalize(cell, released, number)
    return torch.frombuffer(cell, dtype=torch.int64, count=1)


def block_id(handle: torch.Tensor) -> int:
    """The number in a handle.

    Raises:
        GraphoptError: for a tensor that cannot be a handle.
    """
    if handle.dtype != torch.int64 or tuple(handle.shape) != (1,) or handle.device.type != "cpu":
        raise GraphoptError(
            f"a {handle.dtype} tensor of shape {list(handle.shape)} on {handle.device} is no handle: "
            "a handle is what graphopt::offload returns, int64 of shape [1] on the CPU"
        )
    return int(handle.item())
