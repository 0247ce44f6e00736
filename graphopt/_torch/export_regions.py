"""An exported graph that is flat, with calls that switch autocast and the grad mode where the model's code does.

``torch.export`` makes regions of them, in two passes that know nothing of each other: a region without gradients inside
of one under autocast gets gradients, and other nestings fail. The passes (``torch._export.passes``) are imported where
they are called, and no option turns them off.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["AUTOCAST_BEGINS", "AUTOCAST_ENDS", "SETS_GRAD_MODE", "without_regions"]

AUTOCAST_BEGINS = torch.amp.autocast_mode._enter_autocast
"""Called with a device, a dtype, whether autocast is on, and whether it caches casts."""

AUTOCAST_ENDS = torch.amp.autocast_mode._exit_autocast
"""Called with what ``AUTOCAST_BEGINS`` gave."""

SETS_GRAD_MODE = torch._C._set_grad_enabled
"""Called with whether gradients are on from here."""


@contextlib.contextmanager
def without_regions() -> Iterator[None]:
    """While the block runs, ``torch.export`` leaves these calls in its graphs."""
    autocast: Any = importlib.import_module("torch._export.passes.replace_autocast_with_hop_pass")
    grad_mode: Any = importlib.import_module("torch._export.passes.replace_set_grad_with_hop_pass")
    saved = autocast.replace_autocast_with_hop_pass, grad_mode.replace_set_grad_with_hop_pass

    def as_it_is(module: Any, signature: Any) -> tuple[Any, Any]:
        return module, signature

    autocast.replace_autocast_with_hop_pass = as_it_is
    grad_mode.replace_set_grad_with_hop_pass = as_it_is
    try:
        yield
    finally:
        autocast.replace_autocast_with_hop_pass, grad_mode.replace_set_grad_with_hop_pass = saved
