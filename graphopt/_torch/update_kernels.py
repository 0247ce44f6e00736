"""Kernels for values without data that torch lacks: those of the fused updates, which write and return nothing.

Without one, torch runs the real kernel on zeros of the parameters' sizes: four times a model's memory, for nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.library import Library

__all__ = ["without_zeros"]

_UPDATES = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")

_library: list[Library] = []
"""The registrations, which end with this object."""


def _writes(*_: Any, **__: Any) -> None:
    """Sizes, dtypes and places of what an update writes stay as they are."""


def without_zeros() -> None:
    """Register the kernels that the installed torch lacks; once in a process."""
    if _library:
        return
    library = Library("aten", "IMPL", "Meta")
    for name in _UPDATES:
        packet = getattr(torch.ops.aten, name, None)
        for overload in packet.overloads() if packet is not None else ():
            full = name if overload == "default" else f"{name}.{overload}"
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{full}", "Meta"):
                library.impl(full, _writes)
    _library.append(library)
