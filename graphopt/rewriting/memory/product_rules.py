"""How products of matrices are made for some rows: of a product with rows, or added up over them.

A product numbers its own rows by the first dimension of a matrix, its columns by the last, and adds up over the one
between: rows in chunks can be any of the three, and of a batch of matrices its first dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from graphopt.ir.node import value_of
from graphopt.rewriting.memory.token_rows import Chunk, Rows, States, Step, Sum, rows_of, shape_of

__all__ = ["PRODUCTS", "PRODUCT_RULES", "product_of_rows"]

_aten = torch.ops.aten
_BIASED = (_aten.addmm.default, _aten.baddbmm.default)
PRODUCTS = (_aten.mm.default, _aten.bmm.default, *_BIASED)
"""Products that can be made in chunks."""


def product_of_rows(node: fx.Node, axis: int) -> Step:
    """How a product of two values from outside is made for some of the rows that its dimension ``axis`` numbers."""
    left, right = _factors(node)
    batched = len(shape_of(node)) == 3
    bias = _biased(node, Rows(1, axis), {}) or _no_bias
    one: Rows | None = None if axis == 1 + batched else Rows(1, axis)
    other: Rows | None = Rows(1, axis) if axis == 1 + batched or (batched and axis == 0) else None

    def emit(chunk: Chunk) -> fx.Node:
        factors = [_rows(chunk, left, one), _rows(chunk, right, other)]
        return chunk.call(node, node.target, [*bias(chunk), *factors], node.kwargs)

    return Step(Rows(1, axis), emit)


def _product(node: fx.Node, states: States, count: int) -> Step | None:
    left, right = _factors(node)
    one, other = rows_of(left, states), rows_of(right, states)
    if (left in states and one is None) or (right in states and other is None):
        return None
    batched = len(shape_of(node)) == 3
    place = _place(one, other, batched)
    if place == "inner":
        return _summed(node, left, one, right, other)
    if not isinstance(place, int):
        return None
    state = one or other
    assert state is not None
    bias = _biased(node, replace(state, first=place), states)
    if bias is None:
        return None
    if state.padded and bias is not _no_bias:
        return None
    if batched and place == 0:
        one, other = one or state, other or state
    outside = {node for node, known in ((left, one), (right, other)) if known is not None and node not in states}

    def emit(chunk: Chunk) -> fx.Node:
        factors = [chunk.rows(f, replace(state, first=0)) if f in outside else chunk.value(f) for f in (left, right)]
        return chunk.call(node, node.target, [*bias(chunk), *factors], node.kwargs)

    return Step(replace(state, first=place), emit)


def _place(one: Rows | None, other: Rows | None, batched: bool) -> int | str | None:
    """Which dimension of a product numbers the rows that its factors have; ``inner`` where it adds up over them."""
    if any(state is not None and state.lead != 1 for state in (one, other)):
        return None
    if one is not None and other is not None and (one.each, one.outer) != (other.each, other.outer):
        return None
    left, right = one and one.first, other and other.first
    if batched and 0 in (left, right):
        return 0 if {left, right} <= {0, None} else None
    if left == int(batched) and right is None:
        return int(batched)
    if right == batched + 1 and left is None:
        return batched + 1
    return "inner" if left in (None, batched + 1) and right in (None, int(batched)) else None


def _summed(node: fx.Node, left: fx.Node, one: Rows | None, right: fx.Node, other: Rows | None) -> Step | None:
    """A product that adds up over rows, which is added up over chunks, and a bias behind them."""
    if any(state is not None and state.chosen is not None and not state.padded for state in (one, other)):
        return None
    if node.kwargs:
        return None
    batched = len(shape_of(node)) == 3
    state = one or other or Rows(1)
    plain = _aten.bmm.default if batched else _aten.mm.default
    added = _aten.baddbmm.default if batched else _aten.addmm.default

    def factors(chunk: Chunk) -> list[fx.Node]:
        first = chunk.value(left) if one is not None else _outside(chunk, left, replace(state, first=batched + 1))
        return [
            first,
            chunk.value(right) if other is not None else _outside(chunk, right, replace(state, first=int(batched))),
        ]

    def finish(once: Any, total: fx.Node) -> fx.Node:
        return once.call(node, _aten.add.Tensor, [total, node.args[0]])  # type: ignore[no-any-return]

    return Step(
        Sum(finish=finish if node.target in _BIASED else None),
        lambda chunk: chunk.call(node, plain, factors(chunk)),
        lambda chunk, total: chunk.call(node, added, [total, *factors(chunk)]),
    )


def _outside(chunk: Chunk, node: fx.Node, state: Rows) -> fx.Node:
    """The rows of a matrix from outside: of a transposed one those of its source, so that no copy is needed."""
    if node.target is _aten.t.default and isinstance(node.args[0], fx.Node):
        return chunk.call(node, _aten.t.default, [chunk.rows(node.args[0], replace(state, first=1 - state.first))])
    return chunk.rows(node, state)


def _rows(chunk: Chunk, node: fx.Node, state: Rows | None) -> fx.Node:
    return node if state is None else _outside(chunk, node, state)


def _factors(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    left, right = node.args[-2:]
    assert isinstance(left, fx.Node)
    assert isinstance(right, fx.Node)
    return left, right


def _no_bias(chunk: Chunk) -> list[fx.Node]:
    return []


def _biased(node: fx.Node, state: Rows, states: States) -> Callable[[Chunk], list[fx.Node]] | None:
    """The bias that goes with the rows that a dimension of a product numbers; None where it has other rows."""
    if node.target not in _BIASED:
        return _no_bias
    bias: Any = node.args[0]
    shape = shape_of(bias)
    place = state.first - (value_of(node).dim() - len(shape))
    if bias in states:
        known = rows_of(bias, states)
        alike = place >= 0 and known is not None and known.goes_with(replace(state, first=place))
        return (lambda chunk: [chunk.value(bias)]) if alike else None
    if place < 0 or shape[place] == 1:
        return lambda chunk: [bias]
    return lambda chunk: [chunk.rows(bias, replace(state, first=place))]


PRODUCT_RULES: dict[Any, Callable[[fx.Node, States, int], Step | None]] = dict.fromkeys(PRODUCTS, _product)
"""By op; see ``row_rules``."""
