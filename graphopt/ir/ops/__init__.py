"""Ops that passes insert, and what graphopt needs to know of the ops that torch has.

In reading order: ``schema``, ``values``, ``define``, ``inplace``, ``boundary``, ``check``.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil

__all__ = ["register_all"]


@functools.cache
def register_all() -> None:
    """Make every op of graphopt known to torch, for programs that were written elsewhere; the first call does it."""
    for module in pkgutil.walk_packages(__path__, f"{__name__}."):
        importlib.import_module(module.name)
