"""The ops of compressed activations: a seed for each step, values as a few bits each, and what these stand for.

A value's elements, in the order in which they are in memory, are cut into groups. Each group has its smallest element
and a step, as float32, and each element the number of steps above the smallest, rounded up or down at random so that
its expectation is the element. All of it is in one tensor of bytes, the groups' numbers in front.

Zeros have a code of their own where they decide something, as those of ``relu`` do in backward.

Source: Chen et al., ActNN, ICML 2021 (arXiv 2104.14129), for groups and stochastic rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from graphopt.ir.ops.define import define, described, require

__all__ = ["dequantize", "is_dense", "quantize", "quantized_bytes", "rounding_seed"]

_PIECE = 1 << 17
"""Elements that are worked on at a time, so that what a call allocates for itself stays small."""

_HEAD = 8
"""Bytes of a group's smallest element and step."""

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def quantized_bytes(elements: int, bits: int, group: int) -> int:
    """Bytes of so many elements, of ``bits`` each, in groups."""
    return -(-elements // group) * (_HEAD + group * bits // 8)


def is_dense(x: torch.Tensor) -> bool:
    """Whether a tensor's elements fill its memory without gaps, each once, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(x.shape, x.stride(), strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _seed() -> torch.Tensor:
    return torch.randint(1 << 31, (), dtype=torch.int64)


def _empty_seed() -> torch.Tensor:
    return torch.empty((), dtype=torch.int64)


def _check(op: str, bits: int, group: int) -> None:
    require(bits in (4, 8), op, f"bits is 4 or 8, got {bits}")
    require(group >= 8 and group % 8 == 0, op, f"group is a multiple of 8, got {group}")


def _parts(packed: torch.Tensor, elements: int, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The groups' numbers, ``[groups, 2]`` of float32, and their codes, ``[groups, bytes]``."""
    groups = -(-elements // group)
    head = packed[: groups * _HEAD].view(torch.float32).view(groups, 2)
    return head, packed[groups * _HEAD :].view(groups, group * bits // 8)


def _pieces(elements: int, group: int) -> Iterator[tuple[slice, slice]]:
    """The groups and the elements of each piece."""
    groups, step = -(-elements // group), max(1, _PIECE // group)
    for start in range(0, groups, step):
        end = min(start + step, groups)
        yield slice(start, end), slice(start * group, min(end * group, elements))


def _quantize(x: torch.Tensor, seed: torch.Tensor, key: int, bits: int, group: int, zeros: bool) -> torch.Tensor:
    packed = _empty_codes(x, seed, key, bits, group, zeros)
    flat = x.as_strided((x.numel(),), (1,), x.storage_offset())
    head, codes = _parts(packed, x.numel(), bits, group)
    generator = torch.Generator(x.device).manual_seed((int(seed) + key * 0x9E3779B9) & 0xFFFFFFFF)
    for groups, elements in _pieces(x.numel(), group):
        part = flat[elements].float()
        missing = (groups.stop - groups.start) * group - part.numel()
        if missing:
            part = torch.cat([part, part[-1:].expand(missing)])
        part = part.view(-1, group)
        rounded = _rounded_but_zeros if zeros else _rounded
        head[groups], code = rounded(part, (1 << bits) - 1, generator)
        codes[groups] = code if bits == 8 else code[:, 0::2].bitwise_or(code[:, 1::2] << 4)
    return packed


def _rounded(part: torch.Tensor, levels: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest element and the step of each group, and steps above the smallest, rounded at random."""
    low, high = torch.aminmax(part, dim=1, keepdim=True)
    return _steps(part, low, high, levels, generator)


def _rounded_but_zeros(
    part: torch.Tensor, levels: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for elements that are not negative: code 0 is zero, and steps begin at the smallest of the others."""
    low = torch.where(part > 0, part, torch.inf).amin(1, keepdim=True)
    high = part.amax(1, keepdim=True)
    low = torch.where(low > high, high, low)
    head, codes = _steps(part, low, high, levels - 1, generator)
    return head, codes.add_(1).mul_(part != 0)


def _steps(
    part: torch.Tensor, low: torch.Tensor, high: torch.Tensor, levels: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    step = (high - low).div_(levels)
    above = part.sub(low).div_(torch.where(step > 0, step, 1.0))
    words = torch.empty((part.numel() + 7) // 8, dtype=torch.int64, device=part.device)
    noise = words.random_(-(2**63), None, generator=generator).view(torch.uint8)[: part.numel()].view_as(part)
    above.add_(noise, alpha=1 / 256).add_(1 / 512).clamp_(0, levels)
    return torch.cat([low, step], 1), above.to(torch.uint8)


def _empty_codes(x: torch.Tensor, seed: torch.Tensor, key: int, bits: int, group: int, zeros: bool) -> torch.Tensor:
    _check("quantize", bits, group)
    require(x.dtype in _DTYPES and is_dense(x), "quantize", f"x is dense, of 16 or 32 bits, got {described(x)}")
    return torch.empty(quantized_bytes(x.numel(), bits, group), dtype=torch.uint8, device=x.device)


def _dequantize(
    packed: torch.Tensor,
    bits: int,
    group: int,
    zeros: bool,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    made = _empty_values(packed, bits, group, zeros, size, stride, dtype)
    flat = made.as_strided((made.numel(),), (1,))
    head, codes = _parts(packed, made.numel(), bits, group)
    for groups, elements in _pieces(made.numel(), group):
        code = codes[groups]
        if bits == 4:
            code = torch.stack([code & 15, code >> 4], -1).view(-1, group)
        count, part = elements.stop - elements.start, flat[elements]
        whole = dtype is torch.float32 and count == code.numel()
        values = part.view_as(code).copy_(code) if whole else code.to(torch.float32)
        values.sub_(int(zeros)).mul_(head[groups, 1:]).add_(head[groups, :1])
        if zeros:
            values.masked_fill_(code == 0, 0.0)
        if not whole:
            part.copy_(values.view(-1)[:count])
    return made


def _empty_values(
    packed: torch.Tensor,
    bits: int,
    group: int,
    zeros: bool,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    _check("dequantize", bits, group)
    made = torch.empty_strided(size, stride, dtype=dtype, device=packed.device)
    wanted = quantized_bytes(made.numel(), bits, group)
    holds = packed.dtype is torch.uint8 and packed.numel() == wanted
    require(holds, "dequantize", f"packed has {wanted} bytes for {list(size)}, got {described(packed)}")
    return made


_tag: Any = torch.Tag

rounding_seed = define("rounding_seed() -> Tensor", _seed, _empty_seed, tags=(_tag.nondeterministic_seeded,))
"""``rounding_seed() -> Tensor``: an int64 on the CPU, drawn from its default generator: one draw."""

quantize = define(
    "quantize(Tensor x, Tensor seed, int key, int bits, int group, bool zeros) -> Tensor", _quantize, _empty_codes
)
"""``quantize(Tensor x, Tensor seed, int key, int bits, int group, bool zeros) -> Tensor``: bytes that stand for ``x``.

``x`` is dense, float32, float16 or bfloat16; ``seed`` and ``key`` decide how elements are rounded. What ``dequantize``
makes of an element is less than a step away from it, where a step is the range of its group over ``2 ** bits - 1``, and
its expectation over seeds is the element, within 1/512 of a step. A group with an element that is not finite, or whose
range is beyond float32, is nowhere finite.

With ``zeros`` no element is negative; zeros stay zeros and all others stay positive, and a step is the range of those
over ``2 ** bits - 2``.
"""

dequantize = define(
    "dequantize(Tensor packed, int bits, int group, bool zeros, SymInt[] size, SymInt[] stride, ScalarType dtype)"
    " -> Tensor",
    _dequantize,
    _empty_values,
)
"""``dequantize(Tensor packed, int bits, int group, bool zeros, SymInt[] size, SymInt[] stride, ScalarType dtype)``.

The tensor of this size, these strides and this dtype that the bytes of ``quantize`` stand for.
"""
