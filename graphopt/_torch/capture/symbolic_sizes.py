"""Sizes and numbers that tracing keeps as symbols: their example values, their ranges, and making them.

Symbols live in a ``ShapeEnv`` of ``torch.fx.experimental.symbolic_shapes``, which names their origin by classes of
``torch._dynamo.source`` and their range by classes of ``torch.utils._sympy``; public torch only makes them by tracing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, ValueRangesSLoc
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from graphopt._torch.private_names import VALUES, attribute

__all__ = [
    "SymbolRange",
    "broken_guard",
    "evaluate_number",
    "example_tensor",
    "fake_mode",
    "fixed_size_guard",
    "guard_texts",
    "is_of_sizes",
    "number_hint",
    "open_symbols",
    "size_hint",
    "size_range",
    "size_symbols",
    "sizes_taken_as",
    "symbolic_float",
    "symbolic_size",
    "taken_sizes",
]


@dataclass(frozen=True, slots=True)
class SymbolRange:
    """A size that varies: what it was in the example inputs, and the values that it may take.

    Attributes:
        hint: in the example inputs.
        low: the smallest value; below 2 torch traces other programs.
        high: the largest value; None for no bound.
    """

    hint: int
    low: int = 2
    high: int | None = None


class _Evaluator:
    """Numbers of expressions for given values of their symbols; each expression is computed once."""

    def __init__(self, values: Mapping[str, int]) -> None:
        self.values = dict(values)
        self._values = {name: sympy.Integer(value) for name, value in values.items()}
        self._known: dict[sympy.Expr, Any] = {}
        self._of_nodes: dict[Any, Any] = {}

    def of_node(self, node: Any) -> Any:
        """The number behind a symbolic one; its expression, which torch simplifies at each look, is looked at once."""
        try:
            return self._of_nodes[node]
        except KeyError:
            found = self._of_nodes[node] = self.find(node.expr)
            return found

    def find(self, expression: sympy.Expr) -> Any:
        """The number, or the truth value, of an expression; None where a symbol has no value."""
        if expression not in self._known:
            symbols = {symbol: self._values.get(str(symbol)) for symbol in expression.free_symbols}
            known = None not in symbols.values()
            self._known[expression] = expression.xreplace(symbols) if known else None
        return self._known[expression]


_taken: ContextVar[_Evaluator | None] = ContextVar("sizes", default=None)


@contextlib.contextmanager
def sizes_taken_as(values: Mapping[str, int]) -> Iterator[None]:
    """Let ``size_hint`` and ``number_hint`` give what sizes are for these values of symbols, in place of the example's.

    Args:
        values: by the names of symbols; without any, nothing changes.
    """
    present = _taken.get()
    if not values or (present is not None and present.values == values):
        yield
        return
    token = _taken.set(_Evaluator(values))
    try:
        yield
    finally:
        _taken.reset(token)


def taken_sizes() -> object:
    """What ``size_hint`` goes by at the moment, an object that is the same as long as that is; None for the example."""
    return _taken.get()


def evaluate_number(value: Any, values: Mapping[str, int]) -> Any:
    """What a symbolic number or truth value is for these values of symbols; None where that is not known.

    Args:
        value: of ``torch.SymInt`` and the like; anything else is returned as it is.
        values: by the names of symbols.
    """
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value
    node: Any = value.node
    found = _Evaluator(values).find(node.expr)
    if found is None or not (found.is_number or found.is_Boolean):
        return None
    kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(value)]
    return kind(found)


def size_symbols(size: torch.SymInt) -> list[str]:
    """The names of the symbols in a size; one that is a symbol by itself has its own alone."""
    node: Any = size.node
    return sorted(symbol.name for symbol in node.expr.free_symbols)


def broken_guard(mode: FakeTensorMode, values: Mapping[str, int]) -> str:
    """The first condition on sizes under which a program was traced that does not hold for these values of symbols.

    Args:
        mode: in which it was traced.
        values: by the names of symbols.

    Returns:
        the condition as text; empty where all hold.
    """
    environment: Any = mode.shape_env
    evaluator = _Evaluator(values)
    for guard in _guards(environment):
        if evaluator.find(environment.replace(guard.expr)) != sympy.true:
            return str(guard.expr)
    return ""


def fixed_size_guard(mode: FakeTensorMode, size: int) -> str:
    """The condition by which tracing has fixed a size that was to vary, as text; empty where none is known."""
    for guard in _guards(mode.shape_env):
        expression = guard.expr
        if isinstance(expression, sympy.Eq) and size in (expression.lhs, expression.rhs):
            return str(expression)
    return ""


def guard_texts(mode: FakeTensorMode) -> list[str]:
    """The conditions on sizes under which a program was traced, as text; those that always hold are left out."""
    environment: Any = mode.shape_env
    conditions = [environment.replace(guard.expr) for guard in _guards(environment)]
    return [str(condition) for condition in dict.fromkeys(conditions) if condition != sympy.true]


def open_symbols(mode: FakeTensorMode) -> dict[str, SymbolRange]:
    """The symbols of sizes that a mode has, by their names."""
    environment: Any = mode.shape_env
    if environment is None:
        return {}
    ranges = attribute(environment, "var_to_range", VALUES)
    found = {}
    for symbol, hint in attribute(environment, "backed_var_to_val|var_to_val", VALUES).items():
        if hint.is_Integer:
            found[str(symbol)] = SymbolRange(int(hint), *_bounds(ranges[symbol]))
    return found


def _bounds(values: Any) -> tuple[int, int | None]:
    """The smallest and the largest value of a range (None: unlimited)."""
    high = values.upper
    return int(values.lower), int(high) if high.is_Integer and high < 2**62 else None


def _guards(environment: Any) -> Iterable[Any]:
    return () if environment is None else environment.guards


def size_hint(value: Any) -> int:
    """The size a symbolic dimension had in the example inputs; plain integers are returned as they are.

    Inside of ``sizes_taken_as`` it is the size for the values given there.

    Raises:
        ValueError: for a size that depends on data.
    """
    if isinstance(value, torch.SymInt):
        node = value.node
        evaluator = _taken.get()
        taken = None if evaluator is None else evaluator.of_node(node)
        if taken is not None:
            return int(taken)
        hint = node.hint if node.has_hint() else None
        if hint is None:
            raise ValueError(f"the size {value} depends on data and has no example value")
        return int(hint)
    return int(value)


def number_hint(value: torch.SymFloat) -> float:
    """The number that a symbolic one was in the example inputs."""
    node: Any = value.node
    evaluator = _taken.get()
    taken = None if evaluator is None else evaluator.of_node(node)
    return float(node.hint if taken is None else taken)


def is_of_sizes(value: Any) -> bool:
    """Whether a value is a symbolic number or truth value of open sizes, and not of data."""
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return False
    node: Any = value.node
    return bool(node.has_hint())


def size_range(size: torch.SymInt) -> tuple[int, int | None]:
    """The smallest and the largest value that a symbolic size may take (None: unlimited)."""
    node: Any = size.node
    return _bounds(node.shape_env.bound_sympy(node.expr))


def symbolic_float(name: str, example: float) -> Any:
    """A Python float that tracing keeps as an input instead of a constant."""
    source = ConstantSource(name)
    environment = ShapeEnv()
    symbol = environment.create_unspecified_symbol(example, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    return environment.create_symfloatnode(symbol, hint=example, source=source)


def fake_mode(symbols: Mapping[str, SymbolRange]) -> FakeTensorMode:
    """A mode for example values whose sizes are written with the given symbols."""
    environment = ShapeEnv()
    values = attribute(environment, "backed_var_to_val|var_to_val", VALUES)  # the second before torch 2.12
    ranges = attribute(environment, "var_to_range", VALUES)
    origins = attribute(environment, "var_to_range_sloc", VALUES)
    sources = attribute(environment, "var_to_sources", VALUES)
    place = environment._get_sloc()
    for name, known in symbols.items():
        symbol = sympy.Symbol(name, integer=True, positive=True)
        values[symbol] = sympy.Integer(known.hint)
        ranges[symbol] = ValueRanges(known.low, int_oo if known.high is None else known.high)
        origins[symbol] = ValueRangesSLoc(place, place)
        sources[symbol] = [ConstantSource(name)]
    return FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)


def example_tensor(
    mode: FakeTensorMode, shape: Sequence[Any], stride: Sequence[Any], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A tensor without data in a mode: what ``torch.empty_strided`` gives there, without its detour."""
    return FakeTensor(mode, torch.empty_strided(shape, stride, dtype=dtype, device="meta"), device)


def symbolic_size(mode: FakeTensorMode, name: str, hint: int) -> Any:
    """The symbol called ``name`` of a mode from ``fake_mode`` as a symbolic integer with an example value."""
    assert mode.shape_env is not None
    symbol = next(symbol for symbol in attribute(mode.shape_env, "var_to_range", VALUES) if str(symbol) == name)
    return mode.shape_env.create_symintnode(symbol, hint=hint)
