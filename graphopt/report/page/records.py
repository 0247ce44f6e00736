"""The calls and inputs of all snapshots as columns of numbers and shared texts; what is equal is stored once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

from torch import fx

from graphopt.analysis.costs.isolated_call import real_call
from graphopt.ir.files.text import Writer
from graphopt.ir.node import Phase, info, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.values import storage_bytes, tensors_of, type_text
from graphopt.ir.program import Program
from graphopt.report.page.sheet import Place

__all__ = ["PHASES", "REFERENCE", "Records", "Strings", "runs"]

PHASES = tuple(Phase)
"""What the column ``phase`` counts in."""

REFERENCE = "\x01"
"""Stands in the text of a call for each argument that is another call's result."""

_OUTSIDE = Place(-1, -1, -1)


class Strings:
    """Texts by number, each stored once; 0 is the empty one."""

    def __init__(self) -> None:
        self._number: dict[str, int] = {"": 0}

    def __call__(self, text: str) -> int:
        """The number of a text."""
        return self._number.setdefault(text, len(self._number))

    @property
    def table(self) -> list[str]:
        """All texts, by number."""
        return list(self._number)


class _Record(NamedTuple):
    """A call or an input as a row; texts by their numbers, and what it reads by the numbers of the nodes' names."""

    name: int
    op: int
    call: int
    reads: tuple[int, ...]
    type: int
    bytes: int
    phase: int
    module: int
    names: tuple[int, ...]
    source: int
    origin: int
    policy: int
    role: int
    row: int
    lane: int
    slot: int
    view: int


class Records:
    """Collects the nodes of snapshots; equal ones of several snapshots are one record."""

    def __init__(self, strings: Strings) -> None:
        self._strings = strings
        self._number: dict[_Record, int] = {}
        self._types: dict[int, tuple[Any, int, int]] = {}

    def add(self, program: Program, places: dict[fx.Node, Place]) -> dict[fx.Node, int]:
        """The record of each input and call of a snapshot, in order; ``places`` says where calls stand."""
        roles = _roles(program)
        return {
            node: self._number.setdefault(self._record(node, places, roles), len(self._number))
            for node in program.graph.nodes
            if node.op != "output"
        }

    def _record(self, node: fx.Node, places: dict[fx.Node, Place], roles: dict[fx.Node, str]) -> _Record:
        text, known = self._strings, info(node)
        call, reads = self._call(node)
        return _Record(
            text(node.name), text(_op(node)), call, reads, *self._type(node),
            PHASES.index(known.phase), text(known.module), tuple(text(name) for name in known.names),
            text(known.source), text(known.origin), text(known.policy.value if known.policy else ""),
            text(roles.get(node, "")), *places.get(node, _OUTSIDE), int(_is_minor(node)),
        )  # fmt: skip

    def _type(self, node: fx.Node) -> tuple[int, int]:
        """The type of a node's value, and the bytes that it makes; snapshots share values, which are looked at once."""
        value = value_of(node)
        if id(value) not in self._types:
            size = sum(storage_bytes(tensor) for tensor in tensors_of(value))
            self._types[id(value)] = (value, self._strings(type_text(value)), size)
        _, kind, size = self._types[id(value)]
        return kind, 0 if _is_view(node) else size

    def _call(self, node: fx.Node) -> tuple[int, tuple[int, ...]]:
        """What a node calls, with ``REFERENCE`` for each value it reads, and the names of those values' nodes."""
        if node.op != "call_function":
            return self._strings("" if node.op == "placeholder" else str(node.target)), ()
        reads: list[int] = []

        def reference(source: fx.Node) -> str:
            reads.append(self._strings(source.name))
            return REFERENCE

        opening, arguments, closing = Writer(reference).call(node)
        return self._strings(f"{opening}{', '.join(arguments)}{closing}"), tuple(reads)

    def to_json(self) -> dict[str, Any]:
        """Columns; of those that hold several numbers for each record, the counts stand in front."""
        rows = list(self._number)
        columns: dict[str, Any] = {}
        for index, column in enumerate(_Record._fields):
            values = [row[index] for row in rows]
            columns[column] = _flat(values) if column in ("reads", "names") else values
        return columns


def _flat(lists: list[Any]) -> dict[str, list[int]]:
    return {"counts": [len(values) for values in lists], "values": [value for values in lists for value in values]}


def _op(node: fx.Node) -> str:
    """What is written on a call: its op or, where that runs another one with a generator's state, that one."""
    if node.op != "call_function":
        return "input" if node.op == "placeholder" else "function"
    target = real_call(node)[0]
    return schema.op_name(node) if target is node.target else str(target).split(".")[1]


def _is_view(node: fx.Node) -> bool:
    """Whether a value makes no storage of its own, as ``Program.tensors`` counts it."""
    return node.op == "call_function" and bool(schema.aliased_inputs(schema.maker(node)))


def _is_minor(node: fx.Node) -> bool:
    """Whether a call computes nothing: a view, or one of the results of another call."""
    return node.op == "call_function" and (schema.is_view(node) or schema.op_name(node) == "getitem")


def _roles(program: Program) -> dict[fx.Node, str]:
    """What inputs are, and as what values are returned: ``parameter head.weight``, ``returned as loss``."""
    roles = {
        node: _role(spec.role, spec.target)
        for node, spec in zip(program.placeholders, program.inputs, strict=True)
    }  # fmt: skip
    for value, spec in zip(program.output_values, program.outputs, strict=True):
        if isinstance(value, fx.Node):
            told = f"returned as {_role(spec.role, spec.target)}"
            roles[value] = f"{roles[value]}, {told}" if value in roles else told
    return roles


def _role(role: str, target: str) -> str:
    return role if role == target else f"{role} {target}"


def runs(numbers: Iterable[int]) -> list[int]:
    """Numbers as runs of consecutive ones: first, length, first, length and so on."""
    return [part for run in _runs(list(numbers)) for part in run]


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    start = 0
    for position, (one, other) in enumerate(pairwise(numbers), 1):
        if other != one + 1:
            yield numbers[start], position - start
            start = position
    if numbers:
        yield numbers[start], len(numbers) - start
