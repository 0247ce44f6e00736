"""``assert`` and ``if …: raise`` on tensors' values in a model's Python: kept as checks of the program.

A program has one path. Where the other one only raises, that path is known without values: the one on which nothing is
raised. The condition becomes an op, which raises when the program runs, as forward would.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import linecache
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, cast

import torch

from graphopt import _torch
from graphopt.ir.ops.check import check_value

__all__ = ["STOP", "kept_as_checks"]


@dataclass(frozen=True)
class _Test:
    """A condition that decides only whether something is raised.

    Attributes:
        expression: the condition.
        wanted: what it has to be, so that nothing is raised.
        error: the name of what is raised.
        message: its text where it is a constant, else the condition's.
        where: file and line.
    """

    expression: ast.expr
    wanted: bool
    error: str
    message: str
    where: str


@contextlib.contextmanager
def kept_as_checks() -> Iterator[None]:
    """While a model's Python is traced, conditions that only raise are kept as checks, and taken for passed."""
    to_bool, item = torch.Tensor.__bool__, torch.Tensor.item

    @functools.wraps(to_bool)
    def decided(tensor: torch.Tensor) -> bool:
        found = _wanted(sys._getframe(1))
        if found is None or tensor.numel() != 1:
            return to_bool(tensor)
        test, wanted = found
        check_value(tensor.detach().reshape(()), wanted, test.error, f"{test.message} ({test.where})")
        return wanted

    @functools.wraps(item)
    def number(tensor: torch.Tensor) -> Any:
        if tensor.numel() != 1 or _test_around(sys._getframe(1)) is None:
            return item(tensor)
        value = tensor.detach().reshape(())
        return value.double() if value.is_floating_point() else value  # as Python's float has it

    torch.Tensor.__bool__ = decided  # type: ignore[method-assign,assignment]
    torch.Tensor.item = number  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.Tensor.__bool__ = to_bool  # type: ignore[method-assign]
        torch.Tensor.item = item  # type: ignore[method-assign]


_Span = tuple[int, int, int, int]
"""First and last line of an expression, first and last column."""


def _span(frame: FrameType) -> _Span | None:
    """The expression that a frame calls, or whose value it has just made and asks for its truth."""
    span = None
    for instruction in _instructions(frame.f_code):
        here = instruction.offset >= frame.f_lasti
        if instruction.opname in _BETWEEN or (here and not instruction.opname.startswith(("CALL", "PRECALL"))):
            if here:
                break
            continue
        positions = instruction.positions
        span = None if positions is None or None in positions else positions
        if here:
            break
    if span is None:
        return None
    return cast(_Span, (span.lineno, span.end_lineno, span.col_offset, span.end_col_offset))


@functools.lru_cache(maxsize=512)
def _instructions(code: CodeType) -> tuple[dis.Instruction, ...]:
    return tuple(dis.get_instructions(code))


_BETWEEN = ("TO_BOOL", "COPY", "NOP", "EXTENDED_ARG", "CACHE", "UNARY_NOT", "NOT_TAKEN", "RESUME")
"""Instructions that may stand between the one that makes a value and the one that branches on it."""


def _test_around(frame: FrameType) -> tuple[_Test, _Span] | None:
    """The condition that decides only whether something is raised, in which a frame evaluates something just now."""
    span = _span(frame)
    if span is None:
        return None
    found = [test for test in _tests(frame.f_code.co_filename) if _covers(test.expression, span)]
    return (found[-1], span) if found else None


def _wanted(frame: FrameType) -> tuple[_Test, bool] | None:
    """What the operand that a frame evaluates just now has to be, so that nothing is raised; None where it is open."""
    around = _test_around(frame)
    if around is None or _may_be_caught(frame):
        return None
    test, span = around
    wanted = _operand(test.expression, test.wanted, span)
    return None if wanted is None else (test, wanted)


def _operand(expression: ast.expr, wanted: bool, span: _Span) -> bool | None:
    """What a part of a condition has to be, so that the condition is ``wanted``.

    Of several operands each decides where one alone can spoil it; of others only the last one does, which is reached
    where those in front of it did not decide.
    """
    if isinstance(expression, ast.UnaryOp) and isinstance(expression.op, ast.Not):
        return _operand(expression.operand, not wanted, span)
    if isinstance(expression, ast.BoolOp):
        each = isinstance(expression.op, ast.And) == wanted
        for operand in expression.values if each else expression.values[-1:]:
            if _covers(operand, span):
                return _operand(operand, wanted, span)
        return None
    return wanted if _is(expression, span) else None


def _covers(expression: ast.expr, span: _Span) -> bool:
    line, last, column, end = span
    first = (expression.lineno, expression.col_offset)
    return first <= (line, column) and (last, end) <= (expression.end_lineno or 0, expression.end_col_offset or 0)


def _is(expression: ast.expr, span: _Span) -> bool:
    place = expression.lineno, expression.end_lineno, expression.col_offset, expression.end_col_offset
    return place == span


def _may_be_caught(frame: FrameType) -> bool:
    """Whether the model's Python may go on behind what is raised here."""
    current: FrameType | None = frame
    while current is not None and current.f_code.co_name != STOP:
        own = current is frame or not current.f_code.co_filename.startswith(_torch.FOLDER)
        if own and any(first <= current.f_lineno <= last for first, last in _tried(current.f_code.co_filename)):
            return True
        current = current.f_back
    return False


STOP = "call_under_trace"
"""The name of the function that calls the model's Python."""


@functools.lru_cache(maxsize=512)
def _tried(filename: str) -> tuple[tuple[int, int], ...]:
    """The first and last lines of every block of a file whose exceptions are handled."""
    blocks = [
        node.body
        for node in ast.walk(_tree(filename))
        if (isinstance(node, ast.Try) and node.handlers)
        or (isinstance(node, ast.With) and any("suppress" in ast.unparse(item.context_expr) for item in node.items))
    ]
    return tuple((block[0].lineno, block[-1].end_lineno or block[-1].lineno) for block in blocks)


@functools.lru_cache(maxsize=512)
def _tree(filename: str) -> ast.Module:
    """A file's Python; empty where its source is not there."""
    try:
        return ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):
        return ast.Module([], [])


@functools.lru_cache(maxsize=512)
def _tests(filename: str) -> tuple[_Test, ...]:
    """Every such condition of a file, outer ones first."""
    return tuple(test for node in ast.walk(_tree(filename)) for test in _test_of(node, filename))


def _test_of(node: ast.AST, filename: str) -> Iterator[_Test]:
    if isinstance(node, ast.Assert):
        yield _Test(node.test, True, "AssertionError", _text(node.msg, node.test), f"{filename}:{node.lineno}")
    elif isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise):
        yield _raising(node.test, False, node.body[-1], filename)
    elif isinstance(node, ast.If) and node.orelse and isinstance(node.orelse[-1], ast.Raise):
        yield _raising(node.test, True, node.orelse[-1], filename)


def _raising(test: ast.expr, wanted: bool, statement: ast.Raise, filename: str) -> _Test:
    raised = statement.exc
    cls = raised.func if isinstance(raised, ast.Call) else raised
    message = raised.args[0] if isinstance(raised, ast.Call) and raised.args else None
    name = cls.id if isinstance(cls, ast.Name) else "RuntimeError"
    return _Test(test, wanted, name, _text(message, test), f"{filename}:{test.lineno}")


def _text(message: ast.expr | None, test: ast.expr) -> str:
    if isinstance(message, ast.Constant):
        return str(message.value)
    return f"a check of forward fails: {ast.unparse(test)}"
