"""What can be kept in float32 one by one, where a bisection looks for what has to be."""

from __future__ import annotations

from typing import Literal

__all__ = ["By"]

By = Literal["module", "op"]
"""What is denied: modules by path (``layers.0.mlp``), or ops by name (``softmax``)."""
