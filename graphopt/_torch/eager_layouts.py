"""Ops whose results are laid out otherwise without data than with: traced, they get the strides that kernels give.

For some ops torch computes on tensors without data in smaller ops (``torch._decomp``), or has rules for them
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
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_impls import op_implementations_checks
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from graphopt._torch.fake_tensors import device_kind

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

_SUM = -2
"""In place of an argument: the layout of a sum of the arguments, broadcast."""

_IN_FORMAT_OF = {
    "_log_softmax.default": _CONTIGUOUS,
    "_native_batch_norm_legit.default": 0,
    "_native_batch_norm_legit.no_stats": 0,
    "_native_batch_norm_legit_functional.default": 0,
    "_softmax.default": _CONTIGUOUS,
    "_softmax_backward_data.default": _CONTIGUOUS,
    "batch_norm_backward.default": 1,
    "channel_shuffle.default": 0,
    "div.Tensor_mode": _SUM,
    "logaddexp.default": _SUM,
    "max_unpool2d.default": 0,
    "native_batch_norm.default": 0,
    "native_batch_norm_backward.default": 1,
    "native_group_norm.default": 0,
    "native_layer_norm.default": _CONTIGUOUS,
    "native_layer_norm_backward.default": _CONTIGUOUS,
    "normal.Tensor_Tensor": _CONTIGUOUS,
    "reflection_pad2d_backward.default": 1,
    "reflection_pad3d.default": 0,
    "reflection_pad3d_backward.default": 1,
    "replication_pad2d_backward.default": 1,
    "replication_pad3d.default": 0,
    "replication_pad3d_backward.default": 1,
}
"""By op, the position of the argument in whose memory format (contiguous, or channels last) the first result is."""


@contextlib.contextmanager
def eager_layouts() -> Iterator[None]:
    """While the block runs, the results of these ops have the strides that kernels give them."""
    saved: dict[Any, Any] = {}
    rules, busy = dict(_formatted()), list[Any]()

    def laid_out(mode: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        """What torch makes of an op without data, in its kernel's layout."""
        place, several = rules[op]
        busy.append(op)  # so that torch goes its way now
        try:
            with mode:
                return _formatted_result(op(*args, **kwargs), place, several, args)
        finally:
            busy.pop()

    def halves(mode: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        """What torch makes of 16-bit tensors one of which is expanded, laid out as it would be in float32."""
        if not _has_expanded_half((args, kwargs)):
            return NotImplemented
        busy.append(op)
        try:
            with mode:
                result, like = op(*args, **kwargs), op(*pytree.tree_map_only(torch.Tensor, _as_float32, args), **kwargs)
        finally:
            busy.pop()
        if not isinstance(result, torch.Tensor) or like.shape != result.shape:
            return result
        with mode:
            return torch.empty_strided(result.shape, like.stride(), dtype=result.dtype)

    for op, place in _overloads():
        saved[op] = decomposition_table[op]
        decomposition_table[op] = _laid_out(saved[op], place)
    for op in rules.keys() & decomposition_table.keys():
        saved[op] = decomposition_table[op]
        decomposition_table[op] = _formatted_decomposition(saved[op], *rules[op])
    ours = [
        (_UNDECOMPOSED.__contains__, _without_data),
        (lambda op: op in rules and not busy, laid_out),
        (lambda op: _is_pointwise(op) and not busy, halves),
    ]
    op_implementations_checks[:0] = ours
    FakeTensorMode.cache_clear()  # it has results of before
    try:
        yield
    finally:
        decomposition_table.update(saved)
        op_implementations_checks[:] = [each for each in op_implementations_checks if each not in ours]
        FakeTensorMode.cache_clear()


def _overloads() -> Iterator[tuple[Any, int]]:
    for name, place in _LAID_OUT_AS.items():
        found = _overload(name)
        if found in decomposition_table:
            yield found, place


def _formatted() -> Iterator[tuple[Any, tuple[int, bool]]]:
    """The ops that lay out their first result by a memory format: as which argument, and whether there are more."""
    for name, place in _IN_FORMAT_OF.items():
        found = _overload(name)
        if found is not None:
            yield found, (place, len(found._schema.returns) > 1)


def _overload(name: str) -> Any:
    packet, _, which = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), which, None)


def _formatted_decomposition(theirs: Callable[..., Any], place: int, several: bool) -> Callable[..., Any]:
    """A decomposition whose first result is laid out as the kernel's."""

    @functools.wraps(theirs)
    def decomposed(*args: Any, **kwargs: Any) -> Any:
        return _formatted_result(theirs(*args, **kwargs), place, several, args)

    return decomposed


def _formatted_result(result: Any, place: int, several: bool, args: tuple[Any, ...]) -> Any:
    """The result of an op with its first tensor in the kernel's layout."""
    first = result[0] if several else result
    if not isinstance(first, torch.Tensor) or first.dim() < 3 or device_kind(first) != "cpu":
        return result
    if place == _SUM:
        like = torch.empty_like(torch.ops.aten.add.Tensor(*args[:2]), dtype=first.dtype)
    elif place == _CONTIGUOUS:
        like = torch.empty_like(first, memory_format=torch.contiguous_format)
    else:
        like = torch.empty_like(first, memory_format=suggest_memory_format(args[place]))
    return (like, *result[1:]) if several else like


@functools.cache
def _is_pointwise(op: Any) -> bool:
    return torch.Tag.pointwise in getattr(op, "tags", ()) and not op._schema.is_mutable


def _has_expanded_half(given: Any) -> bool:
    """Whether tensors on a CPU are of one 16-bit dtype, and some of them repeat elements, and others do not.

    Without data torch converts each of them to float32 first, which lays out what is expanded anew. Kernels do so only
    where dtypes differ.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor)]
    if len(tensors) < 2 or {tensor.dtype for tensor in tensors} not in ({torch.float16}, {torch.bfloat16}):
        return False
    expanded = [tensor.dim() > 1 and 0 in tensor.stride() for tensor in tensors]
    return any(expanded) and not all(expanded) and all(device_kind(tensor) == "cpu" for tensor in tensors)


def _as_float32(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=torch.float32)


def _laid_out(theirs: Callable[..., Any], place: int) -> Callable[..., Any]:
    """A decomposition whose result is laid out as the kernel's."""

    @functools.wraps(theirs)  # torch looks at its name and module
    def decomposed(*args: Any, **kwargs: Any) -> Any:
        result = theirs(*args, **kwargs)
        if isinstance(result, torch.Tensor) and device_kind(result) == "cpu":
            return _like_kernels(args, place, result.shape, result.dtype, result)
        return result

    return decomposed


def _without_data(mode: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    """What an op that is not decomposed returns for tensors without data."""
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    if kwargs or any(device_kind(tensor) != "cpu" for tensor in tensors):
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
