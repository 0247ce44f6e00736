"""What a value is without its data: shapes, dtypes, bytes, and how they are written."""

from __future__ import annotations

from typing import Any

import torch

from graphopt import _torch

__all__ = ["DTYPE_NAMES", "format_bytes", "storage_bytes", "tensors_of", "type_text"]

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8",
    torch.bool: "b8", torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Every tensor in a node's value, in order (a value is a tensor, a number, or a tuple or list of them)."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors_of(item)]
    return []


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


def format_bytes(count: float) -> str:
    """Bytes as people read them, in powers of ten: ``67.1 MB``."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f} B"
