"""Which calls of a program work on each row of a large matrix by itself, so that rows can be computed a few at a time.

A row is what dimensions that stand side by side number: tokens of a batch, before and behind views that split or join
these dimensions, or the queries of each head. Inside of a chunk, every value has its rows in one dimension, where these
were. A call either gives rows again, or adds up over rows, as gradients of weights and sums of losses do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import fx

from graphopt.ir.node import value_of

__all__ = [
    "Choice",
    "Chunk",
    "Emit",
    "Parts",
    "Rows",
    "State",
    "States",
    "Step",
    "Sum",
    "Whole",
    "alongside",
    "part",
    "plain",
    "rows_of",
    "shape_of",
]


@dataclass(frozen=True, slots=True)
class Choice:
    """A slice of a leading dimension, behind which some rows are left out.

    Attributes:
        shape: of the leading dimensions before.
        dim: which of them is cut.
        start: its first place that stays.
        end: behind its last place that stays.
    """

    shape: tuple[int, ...]
    dim: int
    start: int
    end: int

    @property
    def shape_after(self) -> tuple[int, ...]:
        """Of the leading dimensions behind the slice."""
        return (*self.shape[: self.dim], self.end - self.start, *self.shape[self.dim + 1 :])


@dataclass(frozen=True, slots=True)
class Rows:
    """A value with one entry for each row.

    Attributes:
        lead: how many dimensions number the rows.
        first: which is the first of them.
        chosen: the slice that has left out rows, or has put zeros in their places; None for all rows.
        padded: whether rows that are left out are there, as zeros; only those that are chosen are computed.
        each: how many elements of these dimensions belong to a row, side by side: tokens, where a row is a sample.
        outer: how often these dimensions hold all rows: for each token, where tokens come in front of samples.
        whole: whether the value is there as a whole in front of the chunks.
    """

    lead: int
    first: int = 0
    chosen: Choice | None = None
    padded: bool = False
    each: int = 1
    outer: int = 1
    whole: bool = False

    def goes_with(self, other: Rows) -> bool:
        """Whether the rows of two values stand for the same ones, in the same places."""
        behind = [state.chosen is not None and not state.padded for state in (self, other)]
        return self.place == other.place and behind[0] == behind[1]

    @property
    def place(self) -> Rows:
        """Where rows are, without what else is known of them."""
        return replace(self, chosen=None, padded=False, whole=False)

    @property
    def is_plain(self) -> bool:
        """Whether dimensions of rows have an entry for each row, and no more."""
        return self.each == self.outer == 1

    def size(self, count: int) -> int:
        """How long the dimension of rows is in a chunk of so many."""
        return self.outer * count * self.each

    @property
    def end(self) -> int:
        """Behind the last dimension that numbers rows."""
        return self.first + self.lead

    @property
    def is_matrix(self) -> bool:
        """Whether rows are all there is in front: one dimension, the first."""
        return (self.lead, self.first) == (1, 0)

    def split(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """A shape's dimensions in front of the rows, those of the rows, and those behind."""
        return shape[: self.first], shape[self.first : self.end], shape[self.end :]

    def inner(self, dims: int | Iterable[int] | None, total: int) -> list[int] | None:
        """Dimensions of a value, of ``total``, where they are in a chunk; None where one of them numbers rows."""
        given = [dims] if isinstance(dims, int) else list(range(total) if dims is None else dims)
        places = [dim % total for dim in given]
        if any(self.first <= place < self.end for place in places):
            return None
        return [place if place < self.first else place - self.lead + 1 for place in places]


@dataclass(frozen=True, slots=True)
class Sum:
    """A value that is the sum of what chunks give, divided by ``divisor`` or by what ``finish`` says."""

    divisor: int = 1
    finish: Callable[[Any, fx.Node], fx.Node] | None = None


@dataclass(frozen=True, slots=True)
class Parts:
    """Several results of a call, each with a state of its own."""

    states: tuple[Rows | Sum, ...]


@dataclass(frozen=True, slots=True)
class Whole:
    """A value that does not depend on what rows hold, made once by ``make``."""

    make: Callable[[Any], fx.Node]


State = Rows | Sum | Parts | Whole
States = Mapping[fx.Node, State]


class Chunk(Protocol):
    """Some rows while they are computed."""

    @property
    def count(self) -> int:
        """How many rows there are."""
        ...

    def value(self, node: Any) -> Any:
        """What stands for an argument: of a value with rows the rows of this chunk, of any other all of it."""
        ...

    def rows(self, node: fx.Node, state: Rows) -> fx.Node:
        """The rows of this chunk of a value from outside, where ``state`` says."""
        ...

    def viewed(self, like: fx.Node, node: fx.Node, shape: Sequence[int]) -> fx.Node:
        """A value in another shape: a view, or a copy where there is none."""
        ...

    def call(self, like: fx.Node, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> fx.Node:
        """Insert a call in the place of another one."""
        ...

    def once(self, key: Any, make: Callable[[Any], fx.Node]) -> fx.Node:
        """What ``make`` makes, once for all chunks."""
        ...


Emit = Callable[[Chunk], Any]


@dataclass(frozen=True, slots=True)
class Step:
    """How a call is made for the rows of a chunk.

    Attributes:
        state: what its result is.
        emit: makes it.
        add: makes it and adds it to what earlier chunks have made, as one call; None where two are needed.
    """

    state: State
    emit: Emit
    add: Callable[[Chunk, fx.Node], fx.Node] | None = None


def shape_of(value: Any) -> tuple[int, ...]:
    """The shape of a node's value."""
    return tuple(value_of(value).shape)


def rows_of(node: Any, states: States) -> Rows | None:
    """What is known of an argument that has rows; None for all other arguments."""
    state = states.get(node) if isinstance(node, fx.Node) else None
    return state if isinstance(state, Rows) else None


def plain(node: fx.Node, state: State) -> Step:
    """A call whose arguments are those of the chunk, as they are."""
    return Step(
        state, lambda chunk: chunk.call(node, node.target, [chunk.value(arg) for arg in node.args], node.kwargs)
    )


def alongside(item: Any, state: Rows, count: int, states: States) -> bool:
    """Whether a value has the rows of a state: in chunks, or as a whole outside."""
    known = rows_of(item, states)
    if known is not None:
        return known.goes_with(state)
    if not isinstance(item, fx.Node) or item in states:
        return False
    return math.prod(state.split(shape_of(item))[1]) == state.size(count)


def part(chunk: Chunk, item: Any, state: Rows, states: States) -> Any:
    """The rows of an argument: those of the chunk, or of a value outside."""
    if isinstance(item, fx.Node) and item not in states:
        return chunk.rows(item, state)
    return chunk.value(item)
