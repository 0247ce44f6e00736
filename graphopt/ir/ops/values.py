"""What a value is without its data: shapes, dtypes, bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from graphopt import _torch

__all__ = [
    "DTYPE_NAMES",
    "cuda_indices",
    "is_dense",
    "storage_bytes",
    "tensors_of",
    "type_text",
]

_FLOATS = {torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
_INTEGERS = {torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8"}
_COMPLEX = {torch.complex64: "c64", torch.complex128: "c128"}

DTYPE_NAMES: dict[torch.dtype, str] = {**_FLOATS, **_INTEGERS, torch.bool: "b8", **_COMPLEX}


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Every tensor in a node's value, in order (a value is a tensor, a number, or a tuple or list of them)."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors_of(item)]
    return []


def cuda_indices(tensors: Iterable[torch.Tensor]) -> list[int]:
    """The indices of the CUDA devices that tensors are on: whose random generators what is done to them may use."""
    found = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    return sorted({torch.cuda.current_device() if device.index is None else device.index for device in found})


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements lie in memory without gaps and without overlap, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def storage_bytes(tensor: torch.Tensor) -> int:
    """Bytes that a fresh contiguous-or-strided allocation for ``tensor`` takes (symbolic sizes by example)."""
    sizes = [_torch.size_hint(size) for size in tensor.shape]
    if not sizes:
        return tensor.element_size()
    if min(sizes) == 0:
        return 0
    strides = [_torch.size_hint(stride) for stride in tensor.stride()]
    extent = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return extent * tensor.element_size()


def type_text(value: Any) -> str:
    """A short type, such as ``f32[8, 256]`` or ``(f32[8], i64[])``; empty for values that are not tensors."""
    if isinstance(value, torch.Tensor):
        sizes = ", ".join(str(size) for size in value.shape)
        dtype = DTYPE_NAMES.get(value.dtype, str(value.dtype).removeprefix("torch."))
        device = "" if value.device.type == "cpu" else f"@{value.device}"
        return f"{dtype}[{sizes}]{device}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(type_text(item) or 'None' for item in value)})"
    if isinstance(value, torch.SymInt):
        return f"Sym({value})"
    return "" if value is None else type(value).__name__
