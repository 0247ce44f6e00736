"""Sizes written as expressions of symbols, such as ``2*s0 + 1``: read by a small parser, with bounds on everything.

Conditions on sizes written as text, such as ``Eq(Mod(s0, 2), 0)``: read by a small parser, never run as Python.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import math
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from graphopt.errors import GraphoptError
from graphopt.ir.files.checked_json import Field

__all__ = ["SizeCondition", "evaluate_size", "read_condition", "read_size"]

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


_LONGEST_CONDITION = 2_000

_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_EQUALITIES: dict[str, Callable[[Any, Any], bool]] = {"Eq": operator.eq, "Ne": operator.ne}
_JOINED: dict[type[ast.operator], Callable[[bool, bool], bool]] = {ast.BitAnd: operator.and_, ast.BitOr: operator.or_}


@dataclass(frozen=True)
class SizeCondition:
    """A condition on sizes that was read, such as ``Eq(Mod(s0, 2), 0)`` or ``(s0 < 8) | (s1 >= 4)``.

    Attributes:
        text: as it was written.
    """

    text: str
    _tree: ast.expr

    def holds(self, values: Mapping[str, int]) -> bool:
        """Whether it is true for values of the symbols; one that cannot be computed for them (``1/0``) is not."""
        try:
            return _truth(self._tree, Field(self.text), values)
        except (GraphoptError, ArithmeticError, ValueError, TypeError):
            return False


def read_condition(field: Field, symbols: Collection[str]) -> SizeCondition:
    """A condition on sizes, which is computed for values of symbols and never evaluated as Python.

    Args:
        field: the text, as sympy prints it.
        symbols: the names of symbols that it may be made of.

    Raises:
        GraphoptError: for what is no condition, with its place.
    """
    text = field.text(longest=_LONGEST_CONDITION)
    try:
        tree = ast.parse(text, mode="eval").body
        with contextlib.suppress(ArithmeticError):  # a condition that has no answer for these values is one too
            _truth(tree, field, dict.fromkeys(symbols, 2))
        return SizeCondition(text, tree)
    except GraphoptError:
        raise
    except Exception as error:  # of the parser, of numbers of other kinds
        raise field.error(f"{text!r:.80} is no condition on sizes: {type(error).__name__}: {error!s:.80}") from error


def _truth(tree: ast.expr, field: Field, values: Mapping[str, int]) -> bool:
    """Whether a condition holds; every part of it is computed, so that one which is no condition is always found."""
    if isinstance(tree, ast.Constant) and isinstance(tree.value, bool):
        return tree.value
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.Invert):
        return not _truth(tree.operand, field, values)
    if isinstance(tree, ast.BinOp) and type(tree.op) in _JOINED:
        return _JOINED[type(tree.op)](_truth(tree.left, field, values), _truth(tree.right, field, values))
    if isinstance(tree, ast.Compare) and len(tree.ops) == 1 and type(tree.ops[0]) in _COMPARISONS:
        return _COMPARISONS[type(tree.ops[0])](
            evaluate_size(tree.left, field, values), evaluate_size(tree.comparators[0], field, values)
        )
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and tree.func.id in _EQUALITIES:
        left, right = (evaluate_size(item, field, values) for item in tree.args)
        return _EQUALITIES[tree.func.id](left, right)
    raise field.error(f"{ast.unparse(tree)!r:.80} is no comparison of sizes, and none of &, | and ~ of such")
