"""Calling a function on tensors of a class with ``__torch_function__`` as if they were plain ones.

Uses ``torch._C.DisableTorchFunctionSubclass``, which torch's own documentation of subclasses uses too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["call_plainly"]


def call_plainly(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a function of torch; ``__torch_function__`` of its arguments is not asked."""
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs)
