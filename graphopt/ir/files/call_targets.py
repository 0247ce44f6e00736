"""What the calls of a program may call, by name: registered ops, and a fixed list of Python functions on sizes."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from graphopt import _torch
from graphopt.ir.files.checked_json import Field
from graphopt.ir.ops import register_all

__all__ = ["PYTHON_FUNCTIONS", "read_target"]

PYTHON_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{
        f"operator.{name}": getattr(operator, name)
        for name in (
            "getitem", "add", "sub", "mul", "floordiv", "truediv", "mod", "pow", "neg", "pos", "eq", "ne", "lt", "le",
            "gt", "ge", "and_", "or_", "not_", "xor", "invert", "lshift", "rshift", "abs",
        )
    },
    **{
        f"math.{name}": getattr(math, name)
        for name in ("ceil", "floor", "trunc", "sqrt", "exp", "log", "log2", "log10", "pow", "sin", "cos", "tan")
    },
    **{
        f"torch.{name}": getattr(torch, name)
        for name in (
            "sym_max", "sym_min", "sym_float", "sym_int", "sym_not", "sym_ite", "sym_sum", "sym_sqrt", "sym_fresh_size",
        )
        if hasattr(torch, name)
    },
    **{f"torch.{name}": getattr(torch, name) for name in ("_sym_sqrt", "_sym_log2") if hasattr(torch, name)},
}  # fmt: skip
"""Every function that a program calls beside ops: on sizes, and ``getitem``."""


def read_target(field: Field) -> Any:
    """What a call calls: an op by its overload, or one of a fixed list.

    Raises:
        GraphoptError: for anything else, with its place.
    """
    text = field.text(longest=400)
    if text in PYTHON_FUNCTIONS:
        return PYTHON_FUNCTIONS[text]
    space, _, rest = text.partition(".")
    if space == "higher_order":
        return _higher_order(field, rest)
    name, _, overload = rest.partition(".")
    pieces = (space, name, overload or "default")
    if not all(piece.isidentifier() and piece.isascii() and not piece.startswith("__") for piece in pieces):
        raise field.error(f"{text!r:.80} names no op: an op is written aten.mul.Tensor")
    if space in ("operator", "math", "torch", "builtins"):
        raise field.error(f"a program calls no {text!r:.80}; its functions are {', '.join(PYTHON_FUNCTIONS)}")
    if space == "graphopt":
        register_all()
    found = _op(*pieces)
    if found is None:
        raise field.error(f"this installation has no op {text!r:.80}: import the package that registers it first")
    return found


def _op(space: str, name: str, overload: str) -> _torch.OpOverload | None:
    """An op that is registered; names that ``torch.ops`` has for other things (``load_library``) are none."""
    if not _torch.is_registered(f"{space}::{name}"):
        return None
    packet = getattr(getattr(torch.ops, space), name, None)
    if not isinstance(packet, _torch.OpOverloadPacket):
        return None
    found = getattr(packet, overload, None) if overload in packet.overloads() else None  # type: ignore[no-untyped-call]
    return found if isinstance(found, _torch.OpOverload) else None


def _higher_order(field: Field, name: str) -> Any:
    known = {
        "run_and_save_rng_state": _torch.run_and_save_rng_state,
        "run_with_rng_state": _torch.run_with_rng_state,
        "graphopt_custom_function": _torch.custom_function,
        "graphopt_inner_gradients": _torch.inner_gradients,
        **_torch.higher_order_ops(),
    }
    return Field(name, field.path).one_of(known)
