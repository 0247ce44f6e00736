"""nn.Module (+ loss, + optimizer) → Program: forward by torch.export, joint by differentiation, step by tracing.

In reading order: ``one_program``, ``session``, ``border``.
"""

from __future__ import annotations

from graphopt.capture.devices.meta_tensors import without_data
from graphopt.capture.one_program import capture
from graphopt.capture.session import CaptureSession

__all__ = ["CaptureSession", "capture", "without_data"]
