"""An exported graph that is flat, with calls that switch autocast and the grad mode where the model's code does.

``torch.export`` makes regions of them, in two passes that know nothing of each other: a region without gradients inside
of one under autocast gets gradients, and other nestings fail. The passes (``torch._export.passes``) are imported where
they are called, and no option turns them off.

Ops that only check a value, such as the one behind ``torch.linalg.inv``, traced as plain calls.

Newer torch releases give such ops effect tokens, inputs and outputs that order them among each other. A program is in
order by itself, so the registration (``torch._library.simple_registry``) is put aside while tracing.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx.node import has_side_effect

__all__ = ["AUTOCAST_BEGINS", "AUTOCAST_ENDS", "SETS_GRAD_MODE", "plain_checks", "without_regions"]

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


_CHECKS = ("aten::_linalg_check_errors",)

has_side_effect(torch.ops.aten._linalg_check_errors.default)  # so that no graph loses a check as dead


@contextlib.contextmanager
def plain_checks() -> Iterator[None]:
    """While the block runs, ops that check values are traced without effect tokens."""
    registry = getattr(getattr(torch._library, "simple_registry", None), "singleton", None)
    holders: list[Any] = [getattr(registry.find(name), "effect", None) for name in _CHECKS] if registry else []
    known = [(holder, holder._effect) for holder in holders if getattr(holder, "_effect", None) is not None]
    for holder, _ in known:
        holder._effect = None
    try:
        yield
    finally:
        for holder, effect in known:
            holder._effect = effect
