"""Which low precision a device computes faster in."""

from __future__ import annotations

import torch

from graphopt import _torch
from graphopt.ir.host import device_argument

__all__ = ["fast_dtype"]


def fast_dtype(device: torch.device | str = "cpu") -> torch.dtype | None:
    """bfloat16 where the device has instructions for it, else float16 where it has these, else None.

    Args:
        device: a CPU or a CUDA device; the answer is None for any other.

    Raises:
        ArgumentError: for what is no device.

    Example:
        >>> graphopt.fast_dtype("cpu") in (None, torch.bfloat16, torch.float16)
        True
    """
    kind = device_argument("fast_dtype's device", device).type
    for dtype in (torch.bfloat16, torch.float16):
        if kind == "cpu" and _torch.cpu_computes_in(dtype):
            return dtype
        if kind == "cuda" and torch.cuda.is_available():
            native = dtype is torch.float16 or torch.cuda.is_bf16_supported(including_emulation=False)
            if native:
                return dtype
    return None
