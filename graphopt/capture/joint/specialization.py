"""Whether a program whose sizes vary is, at some sizes, call by call the program that was captured for these sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from graphopt import _torch
from graphopt.ir.node import info, value_of
from graphopt.ir.ops.schema import op_name
from graphopt.ir.program import Program

__all__ = ["first_difference"]

_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


def first_difference(fixed: Program, varying: Program, values: Mapping[str, int]) -> str:
    """The first call in which two programs differ, for people; empty where they are the same.

    Args:
        fixed: a program with fixed sizes.
        varying: of the same stage, of the same model.
        values: of the symbols of ``varying``, at the sizes of ``fixed``.
    """
    with _torch.sizes_taken_as(values):
        one, other = _Calls(fixed), _Calls(varying)
        for mine, theirs in zip(one, other, strict=False):
            if mine[1:] != theirs[1:]:
                where = f" ({info(mine[0]).source})" if info(mine[0]).source else ""
                return f"{op_name(theirs[0])} in place of {op_name(mine[0])}{where}" + (
                    ", with other arguments" if mine[1] == theirs[1] else ""
                )
        if one.count != other.count:
            return f"{other.count} calls in place of {one.count}"
        return "" if one.results() == other.results() else "other results"


class _Calls:
    """The calls of a program that compute tensors, each with its op and its arguments as plain data.

    A tensor stands as the number of what made it; sizes that are computed stand as numbers.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._places: dict[fx.Node, int] = {node: place for place, node in enumerate(program.placeholders)}
        calls = [node for node in program.graph.nodes if node.op == "call_function" and not _is_size(node)]
        self._nodes = [node for node in calls if not _is_whole(node)]
        self._whole = set(calls).difference(self._nodes)
        self.count = len(self._nodes)

    def __iter__(self) -> Iterator[tuple[fx.Node, str, Any, Any]]:
        for node in self._nodes:
            args, kwargs = self._plain(list(node.args)), self._plain(dict(node.kwargs))
            if node.target is torch.ops.aten.slice.Tensor:
                args = [args[0], *_slice_bounds(node)]
            self._places[node] = len(self._places)
            yield node, str(node.target), args, kwargs

    def results(self) -> Any:
        """What the program returns; to be asked behind all calls."""
        return self._plain(list(self._program.output_values))

    def _plain(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            while value in self._whole:
                value = value.all_input_nodes[0]
            known = value_of(value)
            return _number(known) if _is_size(value) else ("made by", self._places.get(value))
        if isinstance(value, (list, tuple)):
            return [self._plain(item) for item in value]
        if isinstance(value, Mapping):
            return {key: self._plain(item) for key, item in value.items()}
        return _number(value)


def _is_size(node: fx.Node) -> bool:
    """Whether a node is a number that is computed from sizes, or a condition on one."""
    if isinstance(value_of(node), _NUMBERS):
        return True
    sources = node.all_input_nodes
    return value_of(node) is None and bool(sources) and all(isinstance(value_of(s), _NUMBERS) for s in sources)


def _number(value: Any) -> Any:
    if isinstance(value, torch.SymInt):
        return _torch.size_hint(value)
    if isinstance(value, (float, torch.SymFloat)):
        number = _torch.number_hint(value) if isinstance(value, torch.SymFloat) else value
        return float(f"{number:.12g}") if math.isfinite(number) else str(number)
    return value


def _slice_bounds(node: fx.Node) -> tuple[int, int, int, int]:
    """Dimension, start, end and step of a slice as numbers, however they were given."""
    given: list[Any] = [_known_number(argument) for argument in node.args[1:]]
    rest: list[Any] = [0, None, None, 1][len(given) :]
    dim, start, end, step = given + rest
    tensor: torch.Tensor = value_of(node.args[0])  # type: ignore[arg-type]
    size = _torch.size_hint(tensor.shape[dim])
    return dim, 0 if start is None else start, size if end is None else min(end, size), step


def _is_whole(node: fx.Node) -> bool:
    """Whether a call is a slice of everything, which torch leaves out where it knows that."""
    if node.target is not torch.ops.aten.slice.Tensor:
        return False
    dim, start, end, step = _slice_bounds(node)
    tensor: torch.Tensor = value_of(node.args[0])  # type: ignore[arg-type]
    return start == 0 and step == 1 and end == _torch.size_hint(tensor.shape[dim])


def _known_number(argument: Any) -> Any:
    return _number(value_of(argument) if isinstance(argument, fx.Node) else argument)
