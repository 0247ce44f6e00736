"""Ops whose results are laid out otherwise without data than with: traced, they get the strides that kernels give.

For some pointwise ops torch computes on tensors without data in smaller ops (``torch._decomp``), or has rules for them
(``torch._subclasses.fake_impls``), whose result follows another argument's strides than that of the kernel, where
arguments are laid out differently. What follows would be traced as views that the real tensors do not have.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._subclasses.fake_impls import op_implementations_checks
from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = ["eager_layouts"]

_CONTIGUOUS = -1
"""In place of an argument: the result is contiguous, whatever the arguments are."""

_LAID_OUT_AS = {
    "_log_softmax_backward_data.default": _CONTIGUOUS,
    "binary_cross_entropy_backward.default": 1,
    "copysign.Tensor": 0,
    "elu_backward.default": 0,
    "hardsigmoid_backward.default": 0,
    "hardswish_backward.default": 0,
    "hardtanh_backward.default": 0,
    "huber_loss_backward.default": _CONTIGUOUS,
    "logit_backward.default": 0,
    "mse_loss_backward.default": _CONTIGUOUS,
    "native_dropout_backward.default": 0,
    "pow.Scalar": _CONTIGUOUS,
    "smooth_l1_loss_backward.default": _CONTIGUOUS,
    "softplus_backward.default": 0,
    "special_xlog1py.default": 0,
    "xlogy.Tensor": 0,
}
"""By op, the position of the argument whose strides its result has on a CPU."""


@contextlib.contextmanager
def eager_layouts() -> Iterator[None]:
    """While the block runs, the results of these ops have the strides that kernels give them."""
    saved: dict[Any, Any] = {}
    for op, place in _overloads():
        saved[op] = decomposition_table[op]
        decomposition_table[op] = _laid_out(saved[op], place)
    ours = (_UNDECOMPOSED.__contains__, _without_data)
    op_implementations_checks.insert(0, ours)
    FakeTensorMode.cache_clear()  # it has results of before
    try:
        yield
    finally:
        decomposition_table.update(saved)
        op_implementations_checks.remove(ours)
        FakeTensorMode.cache_clear()


def _overloads() -> Iterator[tuple[Any, int]]:
    for name, place in _LAID_OUT_AS.items():
        packet, _, overload = name.partition(".")
        found = getattr(getattr(torch.ops.aten, packet, None), overload, None)
        if found in decomposition_table:
            yield found, place


def _laid_out(theirs: Callable[..., Any], place: int) -> Callable[..., Any]:
    """A decomposition whose result is laid out as the kernel's."""

    @functools.wraps(theirs)  # torch looks at its name and module
    def decomposed(*args: Any, **kwargs: Any) -> Any:
        result = theirs(*args, **kwargs)
        if isinstance(result, torch.Tensor) and result.device.type == "cpu":
            return _like_kernels(args, place, result.shape, result.dtype, result)
        return result

    return decomposed


def _without_data(mode: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    """What an op that is not decomposed returns for tensors without data."""
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    if kwargs or any(tensor.device.type != "cpu" for tensor in tensors):
        return NotImplemented
    dtype = op(*(torch.ones((), dtype=arg.dtype) if isinstance(arg, torch.Tensor) else arg for arg in args)).dtype
    with mode:
        shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
        found = _like_kernels(args, _UNDECOMPOSED[op], shape, dtype, None)
    return NotImplemented if found is None else found


def _like_kernels(args: tuple[Any, ...], place: int, shape: Any, dtype: torch.dtype, otherwise: Any) -> Any:
    if place == _CONTIGUOUS:
        return torch.empty(shape, dtype=dtype)
    source = args[place]
    if source.shape != shape or not torch.ops.aten.is_non_overlapping_and_dense.default(source):
        return otherwise
    return torch.empty_like(source, dtype=dtype)


_UNDECOMPOSED = {
    op: place for op, place in _overloads() if decomposition_table[op].__module__.startswith("torch._refs")
}
"""The ops whose smaller ones torch does not take for tensors without data."""
