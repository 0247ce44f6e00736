"""Values compared to the last bit: signs of zero count, not-a-number equals itself; where the first difference is."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = ["SAME", "close", "difference", "first_difference"]

SAME = "the same bits"
"""What is said of torch's own tracing where it differs from eager mode exactly as a program does."""


def difference(one: Any, other: Any) -> str:
    """How two tensors differ, or an empty text where they do not.

    Dtype, shape, strides, whether a gradient is required, and every bit count, but for those of not-a-number.
    """
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        same = type(one) is type(other) and (one == other or one != one)
        return "" if same else f"{_short(one)} and {_short(other)}"
    for what in ("dtype", "shape", "requires_grad"):
        if getattr(one, what) != getattr(other, what):
            return f"{what} {getattr(one, what)} and {getattr(other, what)}"
    if one.layout != other.layout:
        return f"layout {one.layout} and {other.layout}"
    if one.numel() and one.layout == torch.strided and _steps(one) != _steps(other):
        return f"strides {one.stride()} and {other.stride()}"
    return _values(_dense(one.detach()), _dense(other.detach()))


def first_difference(one: Any, other: Any) -> str:
    """The first place at which two nested values differ, and how; an empty text where they are the same."""
    (ours, form), (theirs, other_form) = pytree.tree_flatten_with_path(one), pytree.tree_flatten_with_path(other)
    if form != other_form:
        places = [{pytree.keystr(path) for path, _ in leaves} for leaves in (ours, theirs)]
        only = sorted(places[0] ^ places[1])
        return f"structure: {', '.join(only[:4])}" if only else f"structure {_short(one)} and {_short(other)}"
    for (path, mine), (_, their) in zip(ours, theirs, strict=True):
        if found := difference(mine, their):
            return f"{pytree.keystr(path)}: {found}"
    return ""


def close(one: Any, other: Any) -> bool:
    """Whether two nested values differ by rounding at most."""
    (ours, form), (theirs, other_form) = pytree.tree_flatten(one), pytree.tree_flatten(other)
    if form != other_form:
        return False
    for mine, their in zip(ours, theirs, strict=True):
        if not isinstance(mine, torch.Tensor) or not mine.is_floating_point():
            if difference(mine, their):
                return False
        elif not torch.allclose(_dense(mine.detach()), _dense(their.detach()), 1e-4, 1e-5, equal_nan=True):
            return False
    return True


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def _steps(tensor: torch.Tensor) -> list[int]:
    """The strides of the dimensions that have more than one element."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _values(one: torch.Tensor, other: torch.Tensor) -> str:
    if one.is_complex():
        one, other = torch.view_as_real(one.resolve_conj()), torch.view_as_real(other.resolve_conj())
    if not one.is_floating_point():
        return "" if torch.equal(one, other) else "values"
    equal = ((one == other) & (one.signbit() == other.signbit())) | (one.isnan() & other.isnan())
    if bool(equal.all()):
        return ""
    wrong = int((~equal).sum())
    far = (one.double() - other.double()).abs()[~equal]
    size = float(far.max()) if wrong else 0.0
    what = "sign of zero" if size == 0 else f"by up to {size:.3g}, largest value {float(other.abs().max()):.3g}"
    return f"{wrong} of {one.numel()} elements: {what}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{type(value).__name__} …"
