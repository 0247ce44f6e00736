"""How products of matrices are made for some rows: of a product with rows, or added up over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from graphopt.rewriting.memory.token_rows import Chunk, States, Step, Sum, plain, rows_of, shape_of

__all__ = ["PRODUCT_RULES"]

_aten = torch.ops.aten


def _product(node: fx.Node, states: States, count: int) -> Step | None:
    left, right = node.args
    one, other = rows_of(left, states), rows_of(right, states)
    assert isinstance(left, fx.Node)
    assert isinstance(right, fx.Node)
    if one is not None and one.last:  # over rows: of a gradient's matrix, transposed, with the input's rows
        if other is not None and (other.last or other.lead != 1):
            return None
        if other is None and (right in states or shape_of(right)[0] != shape_of(left)[1]):
            return None
        if one.chosen is not None and not one.padded:
            return None
        return _summed(node, lambda chunk: (chunk.value(left), chunk.value(right) if other else chunk.rows(right, 1)))
    if one is not None and other is None and right not in states and one.lead == 1:
        return plain(node, one)
    return None


def _product_over_rows_of_outside(node: fx.Node, states: States, count: int) -> Step | None:
    """``mm(outside^T, rows)``: the gradient of a weight that is kept the other way round."""
    left, right = node.args
    other = rows_of(right, states)
    if rows_of(left, states) is not None or other is None:
        return _product(node, states, count)
    assert isinstance(left, fx.Node)
    turned = left.target is _aten.t.default and isinstance(left.args[0], fx.Node)
    if not turned or other.last or other.lead != 1 or left in states:
        return None
    if other.chosen is not None and not other.padded:
        return None
    source: Any = left.args[0]

    return _summed(node, lambda chunk: (chunk.call(left, _aten.t.default, [chunk.rows(source, 1)]), chunk.value(right)))


def _summed(node: fx.Node, factors: Callable[[Chunk], tuple[Any, Any]]) -> Step:
    """A product over rows, which is added up over chunks."""
    return Step(
        Sum(),
        lambda chunk: chunk.call(node, _aten.mm.default, factors(chunk)),
        lambda chunk, total: chunk.call(node, _aten.addmm.default, [total, *factors(chunk)]),
    )


def _affine(node: fx.Node, states: States, count: int) -> Step | None:
    bias, left, right = node.args
    one = rows_of(left, states)
    if one is None or one.last or one.lead != 1 or bias in states or right in states:
        return None
    return plain(node, one) if len(shape_of(bias)) == 1 and not one.padded else None


PRODUCT_RULES: dict[Any, Callable[[fx.Node, States, int], Step | None]] = {
    _aten.mm.default: _product_over_rows_of_outside,
    _aten.addmm.default: _affine,
}
"""By op; see ``row_rules``."""
