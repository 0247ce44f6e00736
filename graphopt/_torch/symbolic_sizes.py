"""Sizes and numbers that tracing keeps as symbols: their example values, their ranges, and making them.

Symbols live in a ``ShapeEnv`` of ``torch.fx.experimental.symbolic_shapes``, which names their origin by classes of
``torch._dynamo.source`` and their range by classes of ``torch.utils._sympy``; public torch only makes them by tracing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from graphopt._torch.private_names import VALUES, attribute

__all__ = ["example_tensor", "fake_mode", "number_hint", "size_hint", "size_range", "symbolic_float", "symbolic_size"]


def size_hint(value: Any) -> int:
    """The size a symbolic dimension had in the example inputs; plain integers are returned as they are.

    Raises:
        ValueError: for a size that depends on data.
    """
    if isinstance(value, torch.SymInt):
        node = value.node
        hint = node.hint if node.has_hint() else None
        if hint is None:
            raise ValueError(f"the size {value} depends on data and has no example value")
        return int(hint)
    return int(value)


def number_hint(value: torch.SymFloat) -> float:
    """The number that a symbolic one was in the example inputs."""
    node: Any = value.node
    return float(node.hint)


def size_range(size: torch.SymInt) -> tuple[int, int | None]:
    """The smallest and the largest value that a symbolic size may take (None: unlimited)."""
    node: Any = size.node
    bounds = node.shape_env.bound_sympy(node.expr)
    high = bounds.upper
    return int(bounds.lower), int(high) if high.is_Integer and high < 2**62 else None


def symbolic_float(name: str, example: float) -> Any:
    """A Python float that tracing keeps as an input instead of a constant."""
    source = ConstantSource(name)
    environment = ShapeEnv()
    symbol = environment.create_unspecified_symbol(example, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    return environment.create_symfloatnode(symbol, hint=example, source=source)


def fake_mode(symbols: Mapping[str, int]) -> FakeTensorMode:
    """A mode for example values whose sizes are written with the given symbols (name to example value)."""
    environment = ShapeEnv()
    values = attribute(environment, "backed_var_to_val|var_to_val", VALUES)  # the second before torch 2.12
    ranges = attribute(environment, "var_to_range", VALUES)
    for name, hint in symbols.items():
        symbol = sympy.Symbol(name, integer=True, positive=True)
        values[symbol] = sympy.Integer(hint)
        ranges[symbol] = ValueRanges(2, int_oo)
    return FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)


def example_tensor(
    mode: FakeTensorMode, shape: Sequence[Any], stride: Sequence[Any], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A tensor without data in a mode: what ``torch.empty_strided`` gives there, without its detour for fixed sizes."""
    if all(type(number) is int for number in (*shape, *stride)):
        data = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return FakeTensor(mode, data, device)
    with mode:
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)


def symbolic_size(mode: FakeTensorMode, name: str, hint: int) -> Any:
    """The symbol called ``name`` of a mode from ``fake_mode`` as a symbolic integer with an example value."""
    assert mode.shape_env is not None
    symbol = next(symbol for symbol in attribute(mode.shape_env, "var_to_range", VALUES) if str(symbol) == name)
    return mode.shape_env.create_symintnode(symbol, hint=hint)
