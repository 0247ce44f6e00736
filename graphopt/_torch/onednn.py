"""oneDNN (mkldnn): the 16-bit dtypes that it has instructions for on this CPU, and how it is turned off for a while.

torch tells the first in private ops only; its public switch for the second warns about Intel GPUs where there are none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["cpu_computes_in", "without_onednn"]

_QUESTIONS = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}


def cpu_computes_in(dtype: torch.dtype) -> bool:
    """Whether this CPU has instructions for products in a 16-bit dtype; without, they are slower than float32's."""
    name = _QUESTIONS[dtype]
    supported = getattr(torch.ops.mkldnn, name, None) if torch.backends.mkldnn.is_available() else None
    return bool(supported is not None and supported())


@contextlib.contextmanager
def without_onednn() -> Iterator[None]:
    """While the block runs, no op takes a kernel of oneDNN."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)
