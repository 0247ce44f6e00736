"""Ops that only check a value, such as the one behind ``torch.linalg.inv``, traced as plain calls.

Newer torch releases give such ops effect tokens, inputs and outputs that order them among each other. A program is in
order by itself, so the registration (``torch._library.simple_registry``) is put aside while tracing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx.node import has_side_effect

__all__ = ["plain_checks"]

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
