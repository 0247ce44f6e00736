"""nn.Module (+ loss, + optimizer) → Program: forward by torch.export, joint by differentiation, step by tracing.

In reading order: ``session``, ``border``.
"""

from __future__ import annotations

from graphopt.capture.devices.meta_tensors import without_data
from graphopt.capture.session import CaptureSession, capture

__all__ = ["CaptureSession", "capture", "without_data"]
