"""Autocast for a device that a program stands for: torch turns it off where the device is not here."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["autocast_of_others"]


@contextlib.contextmanager
def autocast_of_others() -> Iterator[None]:
    """While a model is captured for CUDA on tensors of the CPU, its ``torch.autocast("cuda")`` is one for the CPU.

    The regions that are captured so say which calls run under autocast, and to which dtype; what is cast in them is
    decided later, by the rules for the device that the tensors stand for. Autocast for the CPU is off meanwhile, as it
    does nothing to tensors on CUDA.
    """
    original = torch.autocast.__init__

    @functools.wraps(original)
    def init(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> None:
        if device_type == "cuda":
            dtype = torch.get_autocast_dtype("cuda") if dtype is None else dtype
            original(self, "cpu", dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)
        else:
            original(self, device_type, dtype=dtype, enabled=False, cache_enabled=cache_enabled)

    torch.autocast.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = original  # type: ignore[method-assign]
