"""A check of a value that forward makes: where it fails, what forward raises in eager mode is raised."""

from __future__ import annotations

import torch
from torch.fx.node import has_side_effect

from graphopt.ir.ops.define import define

__all__ = ["ERRORS", "check_value"]

ERRORS: dict[str, type[Exception]] = {
    cls.__name__: cls
    for cls in (
        AssertionError,
        ValueError,
        RuntimeError,
        TypeError,
        IndexError,
        KeyError,
        ArithmeticError,
        NotImplementedError,
        FloatingPointError,
    )
}
"""What may be raised; anything else is a ``RuntimeError``."""


def _check(value: torch.Tensor, wanted: bool, error: str, message: str) -> None:
    if bool(value) != wanted:
        raise ERRORS.get(error, RuntimeError)(message)


def _check_on_device(value: torch.Tensor, wanted: bool, error: str, message: str) -> None:
    torch.ops.aten._assert_async.msg(value == wanted, message)  # the host does not wait


def _nothing(*_: object) -> None:
    """The op returns nothing."""


check_value = define(
    "check_value(Tensor value, bool wanted, str error, str message) -> ()", _check, _nothing, _check_on_device
)
"""Raise where ``bool(value)`` is not ``wanted``.

Args:
    value: one element.
    wanted: what it has to be.
    error: the name of what is raised, one of ``ERRORS``; on a GPU the device fails by an assertion instead, later.
    message: its text.
"""

has_side_effect(check_value)  # so that no graph loses it as dead
