"""Numbers of Python's that a graph of Dynamo's takes, as tensors: one program then serves all of their values.

A number goes the way of a tensor without dimensions through the kernels of arithmetic, to the same bits, as long as
the result has the dtype that it has for a number. Where that is not so, and where an op needs the number itself (an
exponent, a bound, a rate, a size), the number stays one, and a program is for one value of it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

__all__ = ["open_numbers"]

_ARITHMETIC: set[Any] = {operator.add, operator.sub, operator.mul, operator.truediv, "add", "sub", "mul", "div"}
_ARITHMETIC |= {torch.add, torch.sub, torch.mul, torch.div}
_IN_PLACE: set[Any] = {operator.iadd, operator.isub, operator.imul, operator.itruediv, "add_", "sub_", "mul_", "div_"}
_COMPARISONS: set[Any] = {operator.gt, operator.ge, operator.lt, operator.le, operator.eq, operator.ne}
_COMPARISONS |= {torch.gt, torch.ge, torch.lt, torch.le, torch.eq, torch.ne, "gt", "ge", "lt", "le", "eq", "ne"}

_REVERSED: dict[Any, Any] = {
    operator.add: torch.add,
    operator.mul: torch.mul,
    operator.sub: torch.rsub,
    operator.truediv: torch.mul,
}
"""What Python calls for a number before a tensor; for a quotient, of the tensor's reciprocal."""


@dataclass(frozen=True, slots=True)
class _Number:
    """A number in a graph.

    Attributes:
        places: the inputs that it is computed from.
        whole: whether it is one of Python's ``int``.
        rounded: whether it is such a one, computed from a ``float``, and its tensor is of floating point.
    """

    places: frozenset[int]
    whole: bool = False
    rounded: bool = False


@dataclass
class _Uses:
    """Which numbers of a graph may be tensors.

    Attributes:
        numbers: the nodes that are numbers.
        closed: the inputs that are not to be tensors.
    """

    numbers: dict[fx.Node, _Number] = field(default_factory=dict)
    closed: set[int] = field(default_factory=set)

    def take(self, node: fx.Node) -> None:
        """Look at a node that takes numbers."""
        given = [self.numbers[before] for before in node.all_input_nodes if before in self.numbers]
        places = frozenset[int]().union(*(number.places for number in given))
        made = self._computed(node, places)
        if made is not None:
            self.numbers[node] = made
        elif not self._reaches_tensors(node):
            self.closed |= places

    def settle(self) -> None:
        """Close what is computed with together with what is closed."""
        mixed = [set(number.places) for number in self.numbers.values() if len(number.places) > 1]
        while any(group & self.closed and not group <= self.closed for group in mixed):
            self.closed.update(*(group for group in mixed if group & self.closed))

    def _computed(self, node: fx.Node, places: frozenset[int]) -> _Number | None:
        """The number that a node computes of numbers, where tensors of float64 give what Python does."""
        if node.kwargs or not all(self._is_number(argument) for argument in node.args):
            return None
        whole = [isinstance(a, int) or (isinstance(a, fx.Node) and self.numbers[a].whole) for a in node.args]
        if node.target is torch.sym_int and not whole[0]:
            return _Number(places, whole=True, rounded=True)
        divides = node.target is operator.truediv and isinstance(node.args[1], (int, float)) and node.args[1] != 0
        if node.target in (operator.add, operator.sub, operator.mul, operator.neg) or divides:
            return None if all(whole) else _Number(places)  # whole numbers of Python's have no end
        return None

    def _is_number(self, argument: Any) -> bool:
        return argument in self.numbers if isinstance(argument, fx.Node) else isinstance(argument, (int, float))

    def _reaches_tensors(self, node: fx.Node) -> bool:
        """Whether a node computes with a tensor what it computes with a number."""
        if node.kwargs:
            return False
        if node.target is torch.where and len(node.args) == 3 and node.args[0] not in self.numbers:
            values = node.args[1:]
            return all(n in self.numbers or (_dtype(n).is_floating_point and _dimensions(n)) for n in values) and any(
                n not in self.numbers for n in values
            )
        if len(node.args) != 2 or node.target not in _ARITHMETIC | _IN_PLACE | _COMPARISONS:
            return False
        first, second = node.args
        if second in self.numbers:
            return self._fits(first, self.numbers[second], plain=node.target not in _ARITHMETIC)  # type: ignore[index]
        return node.target in _REVERSED and self._fits(second, self.numbers[first])  # type: ignore[index]

    def _fits(self, tensor: Any, number: _Number, *, plain: bool = False) -> bool:
        """Whether a number may be a tensor beside this one.

        Args:
            tensor: of the graph.
            number: beside it.
            plain: whether the tensor has to be of floating point.
        """
        value = _example(tensor)
        if value is None or value.is_complex():
            return False
        if value.is_floating_point():
            return value.dim() > 0 or value.dtype in _EXACT
        result = torch.result_type(value, 1 if number.whole else 1.0)
        return not plain and not number.rounded and (number.whole or result in _EXACT)


_EXACT = (torch.float32, torch.float64)
"""The dtypes in which kernels take a tensor without dimensions as they take a number, also where it is cast before."""


def open_numbers(
    graph: fx.GraphModule, numbers: frozenset[int], sources: Sequence[str]
) -> tuple[fx.GraphModule, frozenset[int]]:
    """A graph that takes tensors in the place of numbers, where these give the same bits.

    Args:
        graph: as Dynamo gives it to a backend.
        numbers: the inputs that are tensors which stand for a ``float``.
        sources: what inputs are in the function that was cut.

    Returns:
        The graph, which is the given one where nothing is to be changed; and the inputs that are to be tensors without
        dimensions, of ``float64`` or ``int64``.
    """
    uses = _Uses()
    for place, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        if place in numbers:
            uses.numbers |= dict.fromkeys(node.users, _Number(frozenset((place,))))
        elif isinstance(node.meta.get("example_value"), torch.SymInt) and node.users:
            uses.numbers[node] = _Number(frozenset((place,)), whole=True)
            if ".size()" in sources[place]:
                uses.closed.add(place)  # which the shapes of a call tell anyway
    known = set(uses.numbers)
    for node in graph.graph.nodes:
        if node not in known and any(before in uses.numbers for before in node.all_input_nodes):
            uses.take(node)
    uses.settle()
    opened = {node: number for node, number in uses.numbers.items() if not number.places & uses.closed}
    if not opened:
        return graph, frozenset()
    made = fx.GraphModule(graph, _with_tensors(graph.graph, opened))
    return made, frozenset[int]().union(*(number.places for number in opened.values()))


def _with_tensors(graph: fx.Graph, opened: Mapping[fx.Node, _Number]) -> fx.Graph:
    """A copy of a graph in which some numbers are tensors."""
    made = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "call_method" and node.target == "item" and node in opened:
            copies[node] = copies[node.args[0]]
            continue
        copies[node] = copy = made.node_copy(node, copies.__getitem__)
        if node.op == "placeholder" or opened.keys().isdisjoint(node.all_input_nodes):
            continue
        with made.inserting_before(copy):
            if node in opened:
                _compute_number(node, copy, opened)
            elif len(node.args) == 2:
                _put_beside_tensor(node, copy, first=node.args[0] in opened)
    return made


def _compute_number(node: fx.Node, copy: fx.Node, opened: Mapping[fx.Node, _Number]) -> None:
    """Compute a number of numbers in float64, as Python does."""
    if node.target is torch.sym_int:
        copy.target = torch.trunc
    for before, argument in zip(node.args, copy.args, strict=True):
        if isinstance(before, fx.Node) and opened[before].whole and not opened[before].rounded:
            copy.replace_input_with(argument, _inserted(copy, torch.Tensor.double, argument))  # type: ignore[arg-type]


def _put_beside_tensor(node: fx.Node, copy: fx.Node, *, first: bool) -> None:
    """Give a call of a tensor and a number a tensor in the place of the number."""
    tensor, number = reversed(copy.args) if first else copy.args
    if first:
        copy.target = _REVERSED[node.target]
        tensor = _inserted(copy, torch.reciprocal, tensor) if node.target is operator.truediv else tensor
    copy.args = tensor, _inserted(copy, _like_a_number, number, tensor)


def _inserted(copy: fx.Node, target: Callable[..., Any], *args: Any) -> fx.Node:
    """A new call before another one, as if it was made by the same line of the same module."""
    made = copy.graph.call_function(target, args)
    made.meta = {key: copy.meta[key] for key in ("nn_module_stack", "stack_trace") if key in copy.meta}
    return made


def _like_a_number(number: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A number as a tensor that gives the dtype beside another one which the number itself gives."""
    wanted = torch.result_type(tensor, 1.0 if number.is_floating_point() else 1)
    return number if torch.result_type(tensor, number) is wanted else number.to(wanted)


def _example(value: Any) -> torch.Tensor | None:
    """What stands for a value of a graph; None for what is no plain tensor."""
    found = value.meta.get("example_value") if isinstance(value, fx.Node) else None
    return found if isinstance(found, torch.Tensor) and found.layout is torch.strided else None


def _dtype(value: Any) -> torch.dtype:
    found = _example(value)
    return torch.bool if found is None else found.dtype


def _dimensions(value: Any) -> int:
    found = _example(value)
    return 0 if found is None else found.dim()
