"""Conditions on sizes written as text, such as ``Eq(Mod(s0, 2), 0)``: read by a small parser, never run as Python."""

from __future__ import annotations

import ast
import contextlib
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from graphopt.errors import GraphoptError
from graphopt.ir.checked_json import Field
from graphopt.ir.size_expressions import evaluate_size

__all__ = ["SizeCondition", "read_condition"]

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
