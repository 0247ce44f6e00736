"""What a value is without its data: shapes, dtypes, bytes, and how they are written."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch

from graphopt import _torch

__all__ = [
    "DTYPE_NAMES",
    "counted",
    "cuda_indices",
    "format_bytes",
    "format_seconds",
    "is_dense",
    "parse_bytes",
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


_DECIMAL_UNITS = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BINARY_UNITS = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_UNITS = {"": 1, "b": 1, **_DECIMAL_UNITS, **_BINARY_UNITS}


def parse_bytes(text: str) -> int:
    """Bytes from text such as ``8GB`` (powers of ten), ``512 MiB`` (powers of two), ``1000000`` or ``8e9``.

    Raises:
        ValueError: for anything else.
    """
    match = re.fullmatch(r"\s*((?:\d+\.?\d*|\.\d+)(?:[eE][+]?\d{1,3})?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"{text!r:.60} is not a number of bytes: {_meant(match)}write 8GB, 512MiB or 1000000")
    count = float(match[1]) * _UNITS[match[2].lower()]
    if count >= 2**63:
        raise ValueError(f"{text!r:.60} is more than any memory has")
    return int(count)


def _meant(match: re.Match[str] | None) -> str:
    """What a number with an unknown unit probably means: ``8G`` is ``8GB`` to many."""
    letters = match[2].lower().removesuffix("yte").removesuffix("ytes") if match is not None else ""
    unit = next((known for known in (f"{letters}b", letters) if known in _UNITS and len(known) > 1), "")
    return f"did you mean {match[1]}{unit[:-1].upper().replace('I', 'i')}B? " if match is not None and unit else ""


_NO_PLURAL = frozenset({"as", "bias", "is", "its", "this"})


def counted(count: int, what: str) -> str:
    """A number of things: ``3 calls``, ``1 call``, ``1 copy held``.

    Args:
        count: how many.
        what: the things in the plural, before or behind the words that say more of them.
    """
    if count != 1:
        return f"{count} {what}"
    words = what.split(" ")
    for place, word in enumerate(words):
        if word.endswith("s") and word not in _NO_PLURAL and not word.endswith("ss"):
            words[place] = _one(word)
            break
    return f"1 {' '.join(words)}"


def _one(word: str) -> str:
    if word.endswith("ies"):
        return f"{word[:-3]}y"
    return word[:-2] if word.endswith(("sses", "xes", "ches", "shes")) else word[:-1]


def format_bytes(count: float) -> str:
    """Bytes as people read them, in powers of ten: ``67.1 MB``."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f} B"


def format_seconds(seconds: float) -> str:
    """Seconds as people read them, to three figures: ``1.41 s``, ``23.6 ms``, ``8.39 µs``."""
    rounded = float(f"{seconds:.3g}")
    if not rounded:
        return "0 s"
    units = (("s", 1), ("ms", 10**3), ("µs", 10**6))
    unit, factor = next((pair for pair in units if abs(rounded) * pair[1] >= 1), units[-1])
    number = rounded * factor
    return f"{number:.0f} {unit}" if abs(number) >= 100 else f"{number:#.3g} {unit}"
