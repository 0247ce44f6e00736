"""What kernels allocate for themselves, by formula: for programs without data, whose kernels are not run.

The formulas follow the sources of torch's kernels (``aten/src/ATen/native/cuda``, ``.../transformers/cuda/flash_attn``
and ``aten/src/ATen/native/cpu``). Where bytes depend on values, such as how many different rows an embedding looks up,
they are what the kernel takes at most. Ops that are made to need nothing beside their results have no formula; the few
whose kernels choose their workspace on the device, convolutions and linear algebra, are taken from the device's profile
where they were measured for it, and named in the log elsewhere. cuDNN keeps no workspace between calls: each
convolution allocates its own from torch's allocator and frees it, as a temporary.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from graphopt import _torch
from graphopt.analysis.costs.isolated_call import real_call, sizes
from graphopt.ir.node import value_of
from graphopt.ir.ops.layers.loss_gradient import rows_at_a_time

__all__ = ["described_call", "is_chosen_on_device", "temporary_bytes"]

logger = logging.getLogger("graphopt")

_FLOAT = 4
_INDEX = 8

_told: set[tuple[str, str]] = set()
"""The ops, by device, that the log has named."""

_CHOSEN_ON_DEVICE = ("convolution", "convolution_backward", "_fft_r2c", "_fft_c2c", "_fft_c2r", "_cudnn_rnn")
"""Ops whose libraries choose an algorithm, and with it a workspace, when they see the device."""

_NOT_COUNTED = "is not counted: the peak may be higher by its workspace (graphopt profile --calls measures it there)"
_FILTERS_COUNTED = (
    "is counted for filters of 3 × 3 in float32, as Winograd's algorithm transforms them: the peak may be higher where "
    "it takes more"
)


def is_chosen_on_device(node: fx.Node) -> bool:
    """Whether a call's library chooses what it allocates for itself when it sees the device."""
    target, _, _ = real_call(node)
    return isinstance(target, _torch.OpOverload) and _is_chosen(_name(target))


def _name(target: _torch.OpOverload) -> str:
    return str(target._schema.name.partition("::")[2])


def _is_chosen(name: str) -> bool:
    return name in _CHOSEN_ON_DEVICE or name.startswith(("linalg_", "_linalg_"))


def described_call(node: fx.Node) -> str:
    """Equal for calls that run alike on any device: op, dtypes, shapes, strides where they are not dense, and numbers.

    By this text a device's profile knows what a call allocates for itself (``DeviceProfile.temporaries``).
    """
    target, args, kwargs = real_call(node)
    given = [_described(argument) for argument in args]
    given += [f"{name}={_described(argument)}" for name, argument in kwargs.items()]
    return f"{target}({', '.join(given)})"


def _described(argument: Any) -> str:
    value = value_of(argument) if isinstance(argument, fx.Node) else argument
    if isinstance(value, torch.Tensor):
        shape, strides = list(sizes(value.shape)), list(sizes(value.stride()))
        dense = strides == list(torch.empty(shape, device="meta").stride())
        return f"{str(value.dtype).removeprefix('torch.')}{shape}{'' if dense else f' strides {strides}'}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_described, value))}]"
    return str(_torch.size_hint(value) if isinstance(value, torch.SymInt) else value)


def temporary_bytes(node: fx.Node, device: str, kind: str, measured: Mapping[str, int] = MappingProxyType({})) -> int:
    """Bytes that a call allocates and frees again while it runs, beyond its results.

    Args:
        node: a call of a program without data.
        device: what the program is for, for people.
        kind: the type of this device, ``"cuda"`` or ``"cpu"``.
        measured: what calls allocate there whose libraries choose it on the device, by ``described_call``.
    """
    target, args, _ = real_call(node)
    if not isinstance(target, _torch.OpOverload):
        return 0
    name = _name(target)
    if measured and _is_chosen(name):
        known = measured.get(described_call(node))
        if known is not None:
            return known
    formula = (_CUDA if kind == "cuda" else _CPU).get(name)
    if formula is not None:
        found = formula(*(value_of(arg) if isinstance(arg, fx.Node) else arg for arg in args))
        if name in _CHOSEN_ON_DEVICE:
            _tell(name, device, _FILTERS_COUNTED)
        return found
    if _is_chosen(name):
        _tell(name, device, _NOT_COUNTED)
    return 0


def _tell(name: str, device: str, counted: str) -> None:
    if (name, device) not in _told:
        _told.add((name, device))
        logger.warning(
            "what aten.%s allocates for itself on %s is chosen there by a library and %s", name, device, counted
        )


def _numel(value: Any) -> int:
    return math.prod(sizes(value.shape))


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


# --- CUDA ------------------------------------------------------------------------------------------------------------


def _embedding_backward(gradient: Any, indices: Any, rows: Any, *_: Any) -> int:
    """Indices are sorted with their places; each run of equal ones is summed in pieces of ten, in float32."""
    count = _numel(indices)
    if count <= 3072:
        return 0
    width = sizes(gradient.shape)[-1]
    pieces = -(-count // 10) + min(count, _torch.size_hint(rows))
    sorted_places = 4 * count * indices.element_size()
    return int(sorted_places + pieces * width * max(_FLOAT, gradient.element_size()) + 3 * pieces * _INDEX)


def _norm_backward(columns: int) -> int:
    """Partial sums of the two gradients of weights, 256 rows of each at most."""
    return 2 * 256 * columns * _FLOAT


def _layer_norm_backward(_gradient: Any, _x: Any, shape: Any, *_: Any) -> int:
    return _norm_backward(math.prod(sizes(shape)))


def _rms_norm_backward(_gradient: Any, _x: Any, shape: Any, *_: Any) -> int:
    return _layer_norm_backward(None, None, shape) // 2


def _flash_backward(_gradient: Any, query: Any, key: Any, *_: Any) -> int:
    """The gradient of the queries is summed in float32, with one number for each row.

    Where several heads of queries share one of keys, gradients of keys and values are made for each of them first.
    """
    batch, heads, queries, width = sizes(query.shape)
    groups, keys = sizes(key.shape)[1:3]
    rows, columns = _up(queries, 128), _up(width, 32 if width <= 128 else 64)
    sums = batch * heads * rows * (columns + 1) * _FLOAT
    expanded = 2 * batch * keys * heads * _up(width, 8) * query.element_size() if groups != heads else 0
    return sums + expanded


def _efficient_backward(_gradient: Any, query: Any, key: Any, value: Any, *_: Any) -> int:
    """One number for each row, and for 16-bit tensors the three gradients in float32 while they are summed."""
    batch, heads, queries = sizes(query.shape)[:3]
    rows = batch * heads * queries * _FLOAT
    halves = query.element_size() == 2
    return rows + (sum(_numel(tensor) for tensor in (query, key, value)) * _FLOAT if halves else 0)


def _convolution(_x: Any, filters: Any, _bias: Any, *how: Any) -> int:
    """Filters of 3 × 3 as Winograd's algorithm transforms them: 5 × 5 numbers for each, for results of 3 × 3.

    So by a recording of cuDNN in float32 (JasperSolt/EoR_NN, 10cd0b4, snapshot.pickle), in four of its six convolutions
    within 2 %: 204,800 bytes for 64 × 32 filters, 51,200 for 32 × 16, forward and for the gradient of what is
    convolved; gradients of filters take nothing there. Of other convolutions nothing is known without the device.
    """
    stride, _, dilation, transposed, _, groups = how[:6]
    plain = {*stride, *dilation, groups} == {1} and not transposed
    shape = sizes(filters.shape)
    if not plain or shape[2:] != (3, 3) or filters.dtype != torch.float32:
        return 0
    return shape[0] * shape[1] * 25 * _FLOAT


def _convolution_backward(_gradient: Any, x: Any, filters: Any, _bias: Any, *how: Any) -> int:
    return _convolution(x, filters, None, *how) if how[-1][0] else 0


def _loss_gradient(kind: str) -> Callable[..., int]:
    """The gradient of the log-probabilities, a few rows at a time."""

    def rows_at_once(log_probs: Any, *_: Any) -> int:
        rows, columns = sizes(log_probs.shape)
        return int(min(rows, rows_at_a_time(columns, kind)) * columns * log_probs.element_size())

    return rows_at_once


def _sorted_indices(x: Any, indices: Any, *_: Any) -> int:
    """An accumulating write sorts flat indices with their places; two copies of each while it does."""
    tensors = [value_of(i) if isinstance(i, fx.Node) else i for i in indices]
    shapes = [sizes(t.shape) for t in tensors if isinstance(t, torch.Tensor)]
    return 4 * _INDEX * max(map(math.prod, shapes), default=0)


def _sort(x: Any, *_: Any) -> int:
    """Keys and places a second time, since a radix sort goes to and fro."""
    return int(_numel(x) * (x.element_size() + _INDEX))


def _to_float8(x: Any, *_: Any) -> int:
    """Scaled numbers in float32."""
    return _numel(x) * _FLOAT


def _to_mx(x: Any, *_: Any) -> int:
    """Numbers in float32, and scaled ones."""
    return _numel(x) * _FLOAT * (1 if x.dtype is torch.float32 else 2)


def _float8_product(a: Any, b: Any, scale: Any, _scale: Any, out: Any, *_: Any) -> int:
    """Of units for 8 bits: operands laid out as they take them, and what they give where that is another dtype."""
    copied = sum(_numel(matrix) for matrix, strides in ((a, (-1, 1)), (b, (1, -1))) if not _lies(matrix, strides))
    narrow = scale.dim() > 0 and out is not torch.bfloat16
    return copied + (2 * sizes(a.shape)[0] * sizes(b.shape)[1] if narrow else 0)


def _lies(matrix: Any, strides: tuple[int, int]) -> bool:
    return any(found == wanted for found, wanted in zip(sizes(matrix.stride()), strides, strict=True))


def _product_of_values(a: Any, b: Any, _a: Any, _b: Any, out: Any, *_: Any) -> int:
    """What 8-bit operands stand for in float32, and the product where it is of another dtype."""
    product = 0 if out is torch.float32 else sizes(a.shape)[0] * sizes(b.shape)[1]
    return (_numel(a) + _numel(b) + product) * _FLOAT


_CUDA: dict[str, Callable[..., int]] = {
    "float8_mm": _float8_product,
    "mx_mm": _product_of_values,
    "to_float8": _to_float8,
    "to_mx": _to_mx,
    "loss_gradient": _loss_gradient("cuda"),
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "embedding_dense_backward": _embedding_backward,
    "native_layer_norm_backward": _layer_norm_backward,
    "fused_rms_norm_backward": _rms_norm_backward,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "index_put": _sorted_indices,
    "_unsafe_index_put": _sorted_indices,
    "index_put_": _sorted_indices,
    "sort": _sort,
    "argsort": _sort,
}


# --- CPU -------------------------------------------------------------------------------------------------------------


def _cpu_blocks(queries: int) -> tuple[int, int]:
    """Rows of queries and of keys that a thread works on at a time."""
    rows = 256 if queries >= 768 else 64 if queries >= 192 else 32
    return min(rows, queries), 512


def _cpu_flash(query: Any, key: Any, *_: Any) -> int:
    """Scores, sums and results of one block for each thread, in float32, and for 16-bit tensors scores again."""
    queries, width = sizes(query.shape)[2:]
    rows, columns = _cpu_blocks(queries)
    columns = min(columns, sizes(key.shape)[2])
    each = rows * (columns + 2 + width) * _FLOAT
    halves = rows * columns * query.element_size() if query.element_size() == 2 else 0
    return torch.get_num_threads() * (each + halves)


def _cpu_flash_backward(_gradient: Any, query: Any, key: Any, *_: Any) -> int:
    queries = sizes(query.shape)[2]
    rows, columns = _cpu_blocks(queries)
    columns = min(columns, sizes(key.shape)[2])
    halves = 2 * rows * columns * query.element_size() if query.element_size() == 2 else 0
    return torch.get_num_threads() * (2 * rows * columns * _FLOAT + rows * _FLOAT + halves)


def _cpu_layer_norm_backward(_gradient: Any, _x: Any, shape: Any, *_: Any) -> int:
    return 2 * torch.get_num_threads() * math.prod(sizes(shape)) * _FLOAT


_CPU: dict[str, Callable[..., int]] = {
    "float8_mm": _product_of_values,
    "mx_mm": _product_of_values,
    "to_float8": _to_float8,
    "to_mx": _to_mx,
    "loss_gradient": _loss_gradient("cpu"),
    "_scaled_dot_product_flash_attention_for_cpu": _cpu_flash,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _cpu_flash_backward,
    "native_layer_norm_backward": _cpu_layer_norm_backward,
}
