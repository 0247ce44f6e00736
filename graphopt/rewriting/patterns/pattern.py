"""Finding a piece of a program by its shape: a pattern is a Python function over aten ops, traced once.

``Pattern(lambda x, w: aten.t(aten.mm(x, w)))`` matches every transpose of a product. The function's arguments are
wildcards: each stands for any value, the same one wherever it appears. Everything else has to be equal: ops (an op
without its overload, ``aten.mul``, stands for all of its overloads), numbers, lists, and options left out are the op's
defaults. ``aten.add`` and ``aten.mul`` match with their operands either way round, as they give the same bits.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.proxy import GraphAppendingTracer

from graphopt import _torch
from graphopt.errors import GraphoptError
from graphopt.ir.ops import schema

__all__ = ["Match", "Mismatch", "Pattern", "Traced", "trace"]

aten = torch.ops.aten

_OPERATORS = {
    operator.add: aten.add,
    operator.sub: aten.sub,
    operator.mul: aten.mul,
    operator.truediv: aten.div,
    operator.neg: aten.neg,
}
"""What Python's operators on tensors are in a program."""

_COMMUTATIVE = ("aten::add", "aten::mul")
"""Ops whose first two operands can be exchanged without changing a bit."""


@dataclass(frozen=True, slots=True)
class Traced:
    """A function over aten ops as a small graph: its arguments as placeholders, and the value that it returns."""

    arguments: tuple[fx.Node, ...]
    result: Any

    @property
    def calls(self) -> list[fx.Node]:
        """The calls, in order."""
        if not self.arguments:
            return []
        return [node for node in self.arguments[0].graph.nodes if node.op == "call_function"]


def trace(function: Callable[..., Any]) -> Traced:
    """Run a function on symbols, and note which ops it calls.

    Args:
        function: takes positional arguments only; calls ops of ``torch.ops``, ``+ - * /`` and ``[i]``.

    Raises:
        GraphoptError: for a function that calls anything else, naming it.
    """
    graph = fx.Graph()
    tracer = GraphAppendingTracer(graph)
    names = [name for name, p in inspect.signature(function).parameters.items() if p.kind is not p.VAR_KEYWORD]
    proxies = [fx.Proxy(graph.placeholder(name), tracer) for name in names]
    result = function(*proxies)
    for node in graph.nodes:
        if node.op != "placeholder":
            _as_op(node)
    unwrapped = _torch.pytree.tree_map(lambda value: value.node if isinstance(value, fx.Proxy) else value, result)
    return Traced(tuple(proxy.node for proxy in proxies), unwrapped)


def _as_op(node: fx.Node) -> None:
    """Let a traced call name an op of torch, or refuse it."""
    if node.op == "call_function":
        node.target = _OPERATORS.get(node.target, node.target)  # type: ignore[arg-type]
        if isinstance(node.target, (_torch.OpOverload, _torch.OpOverloadPacket)) or node.target is operator.getitem:
            return
    called = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    hint = f"torch.ops.aten.{called}" if hasattr(aten, str(called)) else "an op of torch.ops"
    raise GraphoptError(f"a pattern consists of ops as programs have them, and {called!r} is none: write {hint}")


@dataclass(frozen=True, slots=True)
class Match:
    """An occurrence of a pattern.

    Attributes:
        root: the call whose result is the pattern's result.
        calls: every call of the occurrence, by the node of the pattern.
        values: what each wildcard stands for, by its name: a node of the program, or a number.
    """

    root: fx.Node
    calls: Mapping[fx.Node, fx.Node]
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Why a call is no occurrence: how many calls of the pattern were found, and what differed then."""

    node: fx.Node
    found: int
    reason: str


@dataclass
class _Binding:
    """What is bound while one occurrence is looked for."""

    calls: dict[fx.Node, fx.Node] = field(default_factory=dict)
    wildcards: dict[fx.Node, Any] = field(default_factory=dict)

    def copy(self) -> _Binding:
        return _Binding(dict(self.calls), dict(self.wildcards))

    def take(self, other: _Binding) -> None:
        self.calls, self.wildcards = other.calls, other.wildcards


class Pattern:
    """A function over aten ops as something to be found in programs.

    Args:
        function: whose result is one call of an op; see the module.

    Raises:
        GraphoptError: for a function that calls what is no op, or that returns one of its arguments.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._traced = trace(function)
        if not isinstance(self._traced.result, fx.Node) or self._traced.result.op != "call_function":
            raise GraphoptError("a pattern returns the result of one op: what is to be replaced")
        used = set().union(*(node.all_input_nodes for node in self._traced.calls))
        unused = [node.name for node in self._traced.arguments if node not in used]
        if unused:
            raise GraphoptError(f"the pattern's argument {unused[0]!r} stands nowhere in it")

    @property
    def arguments(self) -> tuple[fx.Node, ...]:
        """The wildcards."""
        return self._traced.arguments

    @property
    def root_name(self) -> str:
        """The short name of the op whose result is the pattern's."""
        return _target_name(self._traced.result.target)

    def could_start(self, node: fx.Node) -> bool:
        """Whether a call is of the op of the pattern's result."""
        return node.op == "call_function" and _same_op(self._traced.result.target, node.target)

    def match(self, node: fx.Node) -> Match | Mismatch:
        """The occurrence whose result is ``node``, or why there is none."""
        binding = _Binding()
        reason = self._call(self._traced.result, node, binding)
        if reason:
            return Mismatch(node, len(binding.calls), reason)
        values = {wildcard.name: value for wildcard, value in binding.wildcards.items()}
        return Match(node, binding.calls, values)

    # Each of these returns "" where it matches, and what differs where it does not.

    def _call(self, wanted: fx.Node, node: fx.Node, binding: _Binding) -> str:
        if wanted in binding.calls:
            return "" if binding.calls[wanted] is node else f"{wanted.name} would be two different calls"
        if not _same_op(wanted.target, node.target):
            return f"{node.name} is {schema.op_name(node)}, not {_target_name(wanted.target)}"
        binding.calls[wanted] = node
        found = _arguments(node.target, node.args, node.kwargs)
        orders = _orders(node, _arguments(node.target, wanted.args, wanted.kwargs))
        reason = ""
        for index, order in enumerate(orders):
            attempt = binding.copy()
            attempt_reason = self._all(order, found, node, attempt)
            if not attempt_reason:
                binding.take(attempt)
                return ""
            if index == 0:
                reason = attempt_reason
                binding.calls.update(attempt.calls)
        return reason

    def _all(self, wanted: Mapping[str, Any], found: Mapping[str, Any], node: fx.Node, binding: _Binding) -> str:
        for name, value in wanted.items():
            reason = self._value(value, found.get(name), binding)
            if reason:
                return f"argument {name} of {node.name}: {reason}"
        return ""

    def _value(self, wanted: Any, found: Any, binding: _Binding) -> str:
        if isinstance(wanted, fx.Node) and wanted.op == "placeholder":
            known = binding.wildcards.setdefault(wanted, found)
            return "" if known is found or _equal(known, found) else f"{wanted.name} would be both {known} and {found}"
        if isinstance(wanted, fx.Node):
            if isinstance(found, fx.Node) and found.op == "call_function":
                return self._call(wanted, found, binding)
            return f"{found} is no op {_target_name(wanted.target)}"
        if isinstance(wanted, (list, tuple)) and isinstance(found, (list, tuple)):
            if len(wanted) != len(found):
                return f"{len(found)} items, not {len(wanted)}"
            reasons = (self._value(one, other, binding) for one, other in zip(wanted, found, strict=True))
            return next((reason for reason in reasons if reason), "")
        return "" if _equal(wanted, found) else f"{found!r}, not {wanted!r}"


def _equal(one: Any, other: Any) -> bool:
    """Whether two constants are the same; numbers of different types are not."""
    return type(one) is type(other) and bool(one == other)


def _same_op(wanted: Any, target: Any) -> bool:
    if isinstance(wanted, _torch.OpOverloadPacket):
        return isinstance(target, _torch.OpOverload) and target.overloadpacket is wanted
    return bool(wanted is target)


def _target_name(target: Any) -> str:
    return "getitem" if target is operator.getitem else str(target).removeprefix("aten.")


def _arguments(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of ``target`` by name, with the op's defaults for those that are not given."""
    if not isinstance(target, _torch.OpOverload):
        return {str(index): value for index, value in enumerate(args)}
    found = {}
    for index, argument in enumerate(target._schema.arguments):
        given = args[index] if index < len(args) else kwargs.get(argument.name, argument.default_value)
        found[argument.name] = given
    return found


def _orders(node: fx.Node, wanted: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The pattern's arguments, and for a commutative op with its first two exchanged."""
    yield wanted
    target = node.target
    if isinstance(target, _torch.OpOverload) and target._schema.name in _COMMUTATIVE and wanted.get("alpha", 1) == 1:
        first, second = list(wanted)[:2]
        yield {**wanted, first: wanted[second], second: wanted[first]}
