"""How elements are read and written by number for some rows: in each row, or in the row of each sample's number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from graphopt.ir.node import value_of
from graphopt.rewriting.memory.token_rows import Chunk, Rows, States, Step, alongside, part, rows_of, shape_of

__all__ = ["INDEX_RULES"]

_aten = torch.ops.aten
_SAME_ORDER = (_aten.view.default, _aten.unsqueeze.default, _aten._to_copy.default, _aten.expand.default)


def _gather(node: fx.Node, states: States, count: int) -> Step | None:
    """Elements of each row by numbers, or the rows with elements written or added at such places."""
    source, dim, index, *more = node.args
    state = rows_of(source, states)
    if state is None or state.padded:
        return None
    dims = state.inner(dim, len(shape_of(source)))  # type: ignore[arg-type]
    others = [item for item in (index, *more) if isinstance(item, fx.Node)]
    if dims is None or not all(alongside(item, state, count, states) for item in others):
        return None

    def emit(chunk: Chunk) -> fx.Node:
        given = [part(chunk, item, state, states) for item in (index, *more)]
        return chunk.call(node, node.target, [chunk.value(source), dims[0], *given])

    return Step(state, emit)


def _index(node: fx.Node, states: States, count: int) -> Step | None:
    """``x[arange(samples), …]``: of each sample its own elements."""
    source, indices = node.args
    if rows_of(source, states) is None or not _is_by_samples(source, indices, count, states):
        return None
    return Step(
        Rows(1),
        lambda chunk: chunk.call(node, node.target, [chunk.value(source), _of_chunk(chunk, indices, count, states)]),
    )


def _index_put(node: fx.Node, states: States, count: int) -> Step | None:
    """Elements written or added at ``[arange(samples), …]``, as in the gradient of reading them."""
    source, indices, values, *rest = node.args
    if rows_of(values, states) is None and rows_of(source, states) is None:
        return None
    if not _is_by_samples(source, indices, count, states) or not alongside(values, Rows(1), count, states):
        return None

    def emit(chunk: Chunk) -> fx.Node:
        target, given = part(chunk, source, Rows(1), states), part(chunk, values, Rows(1), states)
        return chunk.call(node, node.target, [target, _of_chunk(chunk, indices, count, states), given, *rest])

    return Step(Rows(1), emit)


def _is_by_samples(source: Any, indices: Any, count: int, states: States) -> bool:
    """Whether the first of the numbers is each sample's own, and the others have an entry for each, or one for all."""
    first, *others = indices
    if not alongside(source, Rows(1), count, states) or not _counts_up(first, count) or first in states:
        return False
    dims = len(shape_of(first))
    return all(
        isinstance(item, fx.Node)
        and len(shape_of(item)) == dims
        and (alongside(item, Rows(1), count, states) or (item not in states and shape_of(item)[0] == 1))
        and _is_number(item)
        for item in others
    )


def _is_number(item: fx.Node) -> bool:
    """Whether an index says places, and not which of them are taken."""
    return value_of(item).dtype is not torch.bool


def _counts_up(node: Any, count: int) -> bool:
    """Whether a value is 0, 1, 2, … along its first dimension, which is its only one."""
    if not isinstance(node, fx.Node) or shape_of(node)[:1] != (count,) or any(n != 1 for n in shape_of(node)[1:]):
        return False
    while node.target in _SAME_ORDER:
        node = node.args[0]
    if node.target is _aten.arange.default:
        return bool(node.args == (count,))
    return node.target in (_aten.arange.start, _aten.arange.start_step) and node.args[:3] in ((0, count), (0, count, 1))


def _of_chunk(chunk: Chunk, indices: Any, count: int, states: States) -> list[Any]:
    first, *others = indices
    counted = chunk.call(first, _aten.slice.Tensor, [first, 0, 0, chunk.count])
    own = [item in states or shape_of(item)[0] == count for item in others]
    return [counted, *(part(chunk, i, Rows(1), states) if mine else i for i, mine in zip(others, own, strict=True))]


INDEX_RULES: dict[Any, Callable[[fx.Node, States, int], Step | None]] = {
    _aten.gather.default: _gather,
    _aten.scatter.value: _gather,
    _aten.scatter.src: _gather,
    _aten.scatter_add.default: _gather,
    _aten.index.Tensor: _index,
    _aten.index_put.default: _index_put,
}
"""By op; see ``row_rules``."""
