"""Ops whose results are laid out otherwise without data than with: traced, they get the strides that kernels give.

For some ops torch computes on tensors without data in smaller ops (``torch._decomp``), or has rules for them
(``torch._subclasses.fake_impls``), whose result follows another argument's strides than that of the kernel, where
arguments are laid out differently. What follows would be traced as views that the real tensors do not have.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_impls import op_implementations_checks
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from graphopt._torch.capture.fake_tensors import device_kind
from graphopt._torch.kernels.odd_strides import lays_out_anew, odd_strides, with_new_strides

__all__ = ["eager_layouts", "in_kernels_layout"]

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

_DECOMPOSED_POINTWISE = ("_prelu_kernel.default", "threshold_backward.default")
"""Pointwise ops that torch computes in smaller ones on tensors without data, before it comes to any rule."""


class _Kernels:
    """What torch makes of ops without data, in the layout of their kernels.

    Attributes:
        rules: see ``_formatted``.
        busy: ops that torch is computing its own way now, and the smaller ones that they may consist of.
    """

    def __init__(self) -> None:
        self.rules = dict(_formatted())
        self.busy: list[Any] = []

    @contextlib.contextmanager
    def _left_to_torch(self, op: Any) -> Iterator[None]:
        self.busy.append(op)
        try:
            yield
        finally:
            self.busy.pop()

    def laid_out(self, mode: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        """The result of an op that lays it out by a memory format."""
        place, several = self.rules[op]
        with self._left_to_torch(op), mode:
            return _formatted_result(op(*args, **kwargs), place, several, args)

    def pointwise(self, mode: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        """The result for tensors with odd strides, or for 16-bit ones of which some are expanded."""
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        odd, halves = any(map(odd_strides, tensors)), _has_expanded_half(tensors)
        if not odd and not halves:
            return NotImplemented
        anew = odd and lays_out_anew(op, args, kwargs)
        with self._left_to_torch(op), mode:
            result = op(*args, **kwargs)
            if anew or not halves:
                return with_new_strides(result) if anew else result
            like = op(*pytree.tree_map_only(torch.Tensor, _as_float32, args), **kwargs)
            if not isinstance(result, torch.Tensor) or like.shape != result.shape:
                return result
            return torch.empty_strided(result.shape, like.stride(), dtype=result.dtype)

    def as_a_whole(self, op: Any, theirs: Callable[..., Any]) -> Callable[..., Any]:
        """A decomposition of a pointwise op, in which the smaller ops go torch's way."""

        @functools.wraps(theirs)
        def decomposed(*args: Any, **kwargs: Any) -> Any:
            with self._left_to_torch(op):
                result = theirs(*args, **kwargs)
            return with_new_strides(result) if lays_out_anew(op, args, kwargs) else result

        return decomposed


@contextlib.contextmanager
def eager_layouts() -> Iterator[None]:
    """While the block runs, the results of these ops have the strides that kernels give them."""
    saved: dict[Any, Any] = {}
    kernels = _Kernels()
    for op in map(_overload, _DECOMPOSED_POINTWISE):
        if op in decomposition_table:
            saved[op] = decomposition_table[op]
            decomposition_table[op] = kernels.as_a_whole(op, saved[op])
    for op, place in _overloads():
        saved[op] = decomposition_table[op]
        decomposition_table[op] = _laid_out(saved[op], place)
    for op in kernels.rules.keys() & decomposition_table.keys():
        saved[op] = decomposition_table[op]
        decomposition_table[op] = _formatted_decomposition(saved[op], *kernels.rules[op])
    ours = [
        (_UNDECOMPOSED.__contains__, _without_data),
        (lambda op: op in kernels.rules and not kernels.busy, kernels.laid_out),
        (lambda op: _is_pointwise(op) and not kernels.busy, kernels.pointwise),
    ]
    op_implementations_checks[:0] = ours
    FakeTensorMode.cache_clear()  # it has results of before
    try:
        yield
    finally:
        decomposition_table.update(saved)
        op_implementations_checks[:] = [each for each in op_implementations_checks if each not in ours]
        FakeTensorMode.cache_clear()


def in_kernels_layout(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Any:
    """What torch makes of one call without data, in the layout of the op's kernel.

    Args:
        op: that was called; functions that are no ops have no kernel.
        args: without data.
        kwargs: without data.
        result: of the call outside of ``eager_layouts``; pointwise ops on odd strides are left as they are.
    """
    name = f"{op.overloadpacket.__name__}.{op._overloadname}" if isinstance(op, torch._ops.OpOverload) else ""
    if name not in _IN_FORMAT_OF and name not in _LAID_OUT_AS:
        return result
    named = [argument.name for argument in op._schema.arguments[len(args) :]]
    given = (*args, *(kwargs[key] for key in named if key in kwargs))
    if name in _IN_FORMAT_OF:
        return _formatted_result(result, _IN_FORMAT_OF[name], len(op._schema.returns) > 1, given)
    if isinstance(result, torch.Tensor) and device_kind(result) == "cpu":
        return _like_kernels(given, _LAID_OUT_AS[name], result.shape, result.dtype, result)
    return result


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


_ALSO_POINTWISE = frozenset(("aten::threshold_backward",))
"""Ops that compute each element by itself, though torch does not say so of them."""


@functools.cache
def _is_pointwise(op: Any) -> bool:
    if getattr(op, "_schema", None) is None or op._schema.is_mutable:
        return False
    return torch.Tag.pointwise in op.tags or op.name() in _ALSO_POINTWISE


def _has_expanded_half(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether tensors on a CPU are of one 16-bit dtype, and some of them repeat elements, and others do not.

    Without data torch converts each of them to float32 first, which lays out what is expanded anew. Kernels do so only
    where dtypes differ.
    """
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
