"""The ops of products in 8-bit floating point: scales, casts, and matrix products of what was cast.

A value is multiplied by a scale that takes its largest magnitude to the largest number of the dtype, and rounded. There
is one scale for a whole matrix, or one for each of its rows or columns. In the microscaling format (MX) 32 neighbours
share a scale, a power of two that is kept in 8 bits.

Products are those of CUDA's 8-bit units where the device has them (compute capability 8.9), and elsewhere computed in
float32 from the values that the numbers stand for, as torchao's float8 training is when it emulates; MX products are
computed so everywhere.

Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022 (arXiv 2209.05433), for the dtypes; OCP
Microscaling Formats (MX) Specification 1.0, 2023, section 6.3, for MX.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphopt.ir.ops.define import define, described, require

__all__ = ["MX_BLOCK", "float8_mm", "float8_scale", "mx_mm", "to_float8", "to_mx"]

MX_BLOCK = 32
"""Neighbours that share a scale in the microscaling format."""

_SMALLEST = 1e-12
"""Magnitudes below are taken for it, so that the scale of zeros is finite."""

_E4M3_EXPONENT = 8
"""Of the largest number of float8_e4m3fn, 448 = 1.75 * 2 ** 8."""

_BIAS = 127
"""Of float8_e8m0fnu: byte b stands for 2 ** (b - 127)."""


# --- one scale for a matrix, a row or a column -----------------------------------------------------------------------


def _scale(x: torch.Tensor, dims: Sequence[int], dtype: torch.dtype, power_of_two: bool) -> torch.Tensor:
    found = (torch.finfo(dtype).max / _largest(x, dims).double().clamp_(min=_SMALLEST)).float()
    return torch.exp2(torch.floor(torch.log2(found))) if power_of_two else found


def _largest(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """The largest magnitude, of all or along one dimension, which stays; without a tensor of magnitudes."""
    low, high = torch.aminmax(x, dim=dims[0], keepdim=True) if dims else torch.aminmax(x)
    return torch.maximum(low.neg_(), high)


def _empty_scale(x: torch.Tensor, dims: Sequence[int], dtype: torch.dtype, power_of_two: bool) -> torch.Tensor:
    del dtype, power_of_two
    sizes = [1 if place in dims else size for place, size in enumerate(x.shape)] if dims else []
    return x.new_empty(sizes, dtype=torch.float32)


float8_scale = define(
    "float8_scale(Tensor x, int[] dims, ScalarType dtype, bool power_of_two) -> Tensor", _scale, _empty_scale
)
"""``float8_scale(Tensor x, int[] dims, ScalarType dtype, bool power_of_two) -> Tensor``: what ``to_float8`` scales by.

float32, one for all along ``dims`` (one, which stays with size 1), or a scalar where there is none: the largest number
of ``dtype`` over the largest magnitude, or the power of two below.
"""


def _cast(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    largest = torch.finfo(dtype).max
    scaled = x * scale if x.dtype is torch.float32 else x.float().mul_(scale)
    return scaled.clamp_(-largest, largest).to(dtype)


def _empty_cast(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    del scale
    return torch.empty_like(x, dtype=dtype)


to_float8 = define("to_float8(Tensor x, Tensor scale, ScalarType dtype) -> Tensor", _cast, _empty_cast)
"""``to_float8(Tensor x, Tensor scale, ScalarType dtype) -> Tensor``: ``x * scale`` in 8 bits, at most its largest."""


def _product(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out: torch.dtype, fast: bool
) -> torch.Tensor:
    del fast
    return torch.mm(a.float().div_(scale_a), b.float().div_(scale_b)).to(out)


def _product_on_units(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out: torch.dtype, fast: bool
) -> torch.Tensor:
    """The product on a device, by its 8-bit units where it has them and they take these sizes."""
    sizes = (*a.shape, b.shape[1])
    if torch.cuda.get_device_capability(a.device) < (8, 9) or any(size % 16 for size in sizes):
        return _product(a, b, scale_a, scale_b, out, fast)
    # the units take rows of the first matrix and columns of the second; with scales of rows they give bfloat16
    a, b = a.contiguous(), b.t().contiguous().t()
    by_rows = scale_a.dim() > 0
    given = torch.bfloat16 if by_rows else out
    scales = scale_a.reciprocal(), scale_b.reciprocal()
    found: torch.Tensor = torch.ops.aten._scaled_mm.default(a, b, *scales, None, None, given, fast)
    return found.to(out)


def _empty_product(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out: torch.dtype, fast: bool
) -> torch.Tensor:
    del scale_a, scale_b, fast
    _check_product("float8_mm", a, b)
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out)


def _check_product(op: str, a: torch.Tensor, b: torch.Tensor) -> None:
    fits = a.dim() == b.dim() == 2 and a.shape[1] == b.shape[0]
    require(fits, op, f"it needs two matrices that fit, not {described(a)} and {described(b)}")


float8_mm = define(
    "float8_mm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, ScalarType out, bool fast) -> Tensor",
    _product,
    _empty_product,
    _product_on_units,
)
"""``float8_mm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, ScalarType out, bool fast) -> Tensor``.

The product of the matrices that ``a`` and ``b`` from ``to_float8`` stand for, in the dtype ``out``. ``fast`` lets CUDA
add up in fewer bits.
"""


# --- 32 neighbours share a scale -------------------------------------------------------------------------------------


def _blocks(x: torch.Tensor, dim: int) -> torch.Tensor:
    """A matrix with blocks of neighbours along a dimension in a dimension of their own, behind it."""
    require(x.shape[dim] % MX_BLOCK == 0, "to_mx", f"dimension {dim} is no multiple of {MX_BLOCK}: {described(x)}")
    blocks: torch.Tensor = x.unflatten(dim, (-1, MX_BLOCK))  # type: ignore[no-untyped-call]
    return blocks


def _to_mx(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = _blocks(x.float(), dim)
    largest = _largest(blocks, [dim + 1])
    # of zeros and of what is below the smallest scale: that one; frexp gives the exponent above the leading bit's
    exponent = (torch.frexp(largest).exponent - 1 - _E4M3_EXPONENT).clamp_(-_BIAS, _BIAS)
    exponent = torch.where(largest > 0, exponent, -_BIAS)
    bound = torch.finfo(torch.float8_e4m3fn).max
    scaled = torch.ldexp(blocks, -exponent).clamp_(-bound, bound)
    scale = (exponent + _BIAS).to(torch.uint8).view(torch.float8_e8m0fnu).squeeze(dim + 1)
    return scaled.flatten(dim, dim + 1).to(torch.float8_e4m3fn), scale


def _empty_mx(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    _blocks(x, dim)
    sizes = [size // MX_BLOCK if place == dim else size for place, size in enumerate(x.shape)]
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_empty(sizes, dtype=torch.float8_e8m0fnu)


to_mx = define("to_mx(Tensor x, int dim) -> (Tensor data, Tensor scale)", _to_mx, _empty_mx)
"""``to_mx(Tensor x, int dim) -> (Tensor data, Tensor scale)``: a matrix in MXFP8, in blocks of 32 along a dimension.

``data`` is float8_e4m3fn, of the shape of ``x``; ``scale`` float8_e8m0fnu, a 32nd as long along ``dim``. The scale of a
block is the power of two that takes its largest magnitude to the largest binade of the dtype; what is beyond the
largest number there becomes it.
"""


def _mx_values(data: torch.Tensor, scale: torch.Tensor, dim: int) -> torch.Tensor:
    """What an MX matrix stands for, in float32."""
    values = data.float()
    _blocks(values, dim).mul_(torch.exp2(scale.view(torch.uint8).float().sub_(_BIAS)).unsqueeze(dim + 1))
    return values


def _mx_product(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out: torch.dtype
) -> torch.Tensor:
    return torch.mm(_mx_values(a, scale_a, 1), _mx_values(b, scale_b, 0)).to(out)


def _empty_mx_product(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out: torch.dtype
) -> torch.Tensor:
    del scale_a, scale_b
    _check_product("mx_mm", a, b)
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out)


mx_mm = define(
    "mx_mm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, ScalarType out) -> Tensor",
    _mx_product,
    _empty_mx_product,
)
"""``mx_mm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, ScalarType out) -> Tensor``: of what ``to_mx`` gave.

``a`` has its blocks along dimension 1, ``b`` along dimension 0.
"""
