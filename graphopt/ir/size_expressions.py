"""Sizes written as expressions of symbols, such as ``2*s0 + 1``: read by a small parser, with bounds on everything."""

from __future__ import annotations

import ast
import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

from graphopt.errors import GraphoptError
from graphopt.ir.checked_json import Field

__all__ = ["evaluate_size", "read_size"]

_LONGEST_EXPRESSION = 500
_LARGEST_EXPONENT = 8

_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Max": lambda *values: functools.reduce(torch.sym_max, values),
    "Min": lambda *values: functools.reduce(torch.sym_min, values),
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "IntTrueDiv": operator.truediv,
    "FloatTrueDiv": operator.truediv,
    "PowByNatural": lambda value, exponent: _power(value, exponent),
    "ModularIndexing": lambda value, divisor, modulus: value // divisor % modulus,
    "CeilToInt": math.ceil,
    "FloorToInt": math.floor,
    "TruncToInt": math.trunc,
    "ToFloat": torch.sym_float,
}
"""How expressions of sizes are computed again when they are read."""


def read_size(field: Field, symbols: Mapping[str, Any]) -> Any:
    """A size: a number, or an expression of symbols, which is computed and never evaluated as Python.

    Args:
        field: a whole number, or an object with ``expression`` and ``hint``.
        symbols: symbolic integers by their names.

    Raises:
        GraphoptError: for what is no size, with its place.
    """
    if not field.is_object:
        return field.whole(0)
    expression = field.parts(("expression", "hint"))["expression"]
    text = expression.text(longest=_LONGEST_EXPRESSION)
    try:
        found = evaluate_size(ast.parse(text, mode="eval").body, expression, symbols)
    except GraphoptError:
        raise
    except Exception as error:  # of the parser, of sympy: all of them say that this is no size
        raise expression.error(f"{text!r:.80} is no size: {type(error).__name__}: {error!s:.80}") from error
    return found if isinstance(found, torch.SymInt) else Field(found, expression.path).whole(0)


def evaluate_size(tree: ast.expr, field: Field, symbols: Mapping[str, Any]) -> Any:
    """A size written as an expression, computed from the symbols: sympy would read ``//`` as another function."""
    if isinstance(tree, ast.Constant) and type(tree.value) in (int, float):
        return Field(tree.value, field.path).whole() if isinstance(tree.value, int) else tree.value
    if isinstance(tree, ast.Name) and tree.id in symbols:
        return symbols[tree.id]
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
        return -evaluate_size(tree.operand, field, symbols)
    if isinstance(tree, ast.BinOp):
        return _binary(tree, field, symbols)
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and not tree.keywords:
        function = Field(tree.func.id, field.path).one_of(_FUNCTIONS)
        return function(*(evaluate_size(item, field, symbols) for item in tree.args))
    raise field.error(
        f"{ast.unparse(tree)!r:.80} is none of the symbols {sorted(symbols)[:10]} and no function that sizes "
        f"are made of ({', '.join(_FUNCTIONS)})"
    )


def _binary(tree: ast.BinOp, field: Field, symbols: Mapping[str, Any]) -> Any:
    if isinstance(tree.op, ast.Mult):
        # numbers last: sympy would multiply a number into a sum at once, and print the product differently
        factors = sorted(_factors(tree), key=lambda factor: isinstance(factor, ast.Constant))
        return functools.reduce(operator.mul, [evaluate_size(factor, field, symbols) for factor in factors])
    left, right = evaluate_size(tree.left, field, symbols), evaluate_size(tree.right, field, symbols)
    if isinstance(tree.op, ast.Pow):
        return _power(left, right)
    if type(tree.op) not in _ARITHMETIC:
        raise field.error(f"{ast.unparse(tree)!r:.80} is no arithmetic that sizes are made of")
    return _ARITHMETIC[type(tree.op)](left, right)


def _power(value: Any, exponent: Any) -> Any:
    if not isinstance(exponent, int) or not 0 <= exponent <= _LARGEST_EXPONENT:
        raise ValueError(f"an exponent is a whole number from 0 to {_LARGEST_EXPONENT}")
    return value**exponent


def _factors(tree: ast.expr) -> list[ast.expr]:
    if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Mult):
        return [*_factors(tree.left), *_factors(tree.right)]
    return [tree]
