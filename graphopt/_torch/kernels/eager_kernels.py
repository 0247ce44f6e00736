"""Ops for which torch has another implementation when it traces: they are traced as eager mode runs them.

For some ops torch registers Python implementations, in smaller ops, that only tracing takes: interpolation in 59 calls
in place of one, other sums in margin losses. They round otherwise and take more memory. While a model is captured they
are put aside. The registrations (``OpOverload.py_kernels``) and the cache in front of them have no public accessor.

oneDNN (mkldnn): the 16-bit dtypes that it has instructions for on this CPU, and how it is turned off for a while.

torch tells the first in private ops only; its public switch for the second warns about Intel GPUs where there are none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch._C import DispatchKey

__all__ = ["cpu_computes_in", "eager_kernels", "without_onednn"]

_KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)

_OPS = (
    "_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa", "_upsample_lanczos2d_aa", "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "upsample_bicubic2d", "upsample_bilinear2d",
    "upsample_linear1d", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_trilinear3d",
    "multi_margin_loss", "multilabel_margin_loss_forward", "hardshrink", "softshrink",
)  # fmt: skip
"""The ops, in all overloads. Others stay as they are: dropout, which has to be one known op, and what reads values."""


_RECURRENT = ("gru", "lstm", "rnn_relu", "rnn_tanh")
"""The same for layers that run as one kernel on a CPU."""


def _overloads(names: Iterable[str]) -> Iterator[Any]:
    for name in names:
        packet = getattr(torch.ops.aten, name, None)
        for overload in packet.overloads() if packet is not None else ():
            yield getattr(packet, overload)


@contextlib.contextmanager
def eager_kernels(ours: Mapping[Any, Callable[..., Any]], *, on_cpu: bool = True) -> Iterator[None]:
    """While the block runs, these ops are traced by the kernels that eager mode takes.

    Args:
        ours: what other ops are traced as on a CPU.
        on_cpu: whether it is a CPU whose kernels are traced.
    """
    saved: list[tuple[Any, dict[Any, Any]]] = []
    if not on_cpu:
        ours = {}
    for op in {*_overloads((*_OPS, *_RECURRENT) if on_cpu else _OPS), *ours}:
        saved.append((op, {key: op.py_kernels.pop(key) for key in _KEYS if key in op.py_kernels}))
        if op in ours:
            op.py_kernels.update(dict.fromkeys(_KEYS, ours[op]))
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, known in saved:
            for key in _KEYS:
                op.py_kernels.pop(key, None)
            op.py_kernels.update(known)
            op._dispatch_cache.clear()


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
