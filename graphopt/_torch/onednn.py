"""Which 16-bit dtypes oneDNN (mkldnn) has instructions for on this CPU; torch tells in private ops only."""

from __future__ import annotations

import torch

__all__ = ["cpu_computes_in"]

_QUESTIONS = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}


def cpu_computes_in(dtype: torch.dtype) -> bool:
    """Whether this CPU has instructions for products in a 16-bit dtype; without, they are slower than float32's."""
    name = _QUESTIONS[dtype]
    supported = getattr(torch.ops.mkldnn, name, None) if torch.backends.mkldnn.is_available() else None
    return bool(supported is not None and supported())
