"""How products of matrices are made for some rows: of a product with rows, or added up over them.

A product numbers its own rows by the first dimension of a matrix, its columns by the last, and adds up over the one
between: rows in chunks can be any of the three, and of a batch of matrices its first dimension.

How calls along other dimensions than those of rows are made for some rows, and sums over rows.

How recurrent layers are made for some samples.

These are in the second dimension of a sequence, whatever ``batch_first`` says: torch transposes in front of the call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from graphopt.ir.node import value_of
from graphopt.ir.ops.layers.recurrent import lstm_layer, lstm_layer_backward, workspace_of
from graphopt.ir.ops.layers.softmax import safe_softmax
from graphopt.rewriting.memory.chunk.token_rows import (
    Chunk,
    Parts,
    Rows,
    States,
    Step,
    Sum,
    alongside,
    part,
    rows_of,
    shape_of,
)

__all__ = ["INNER_RULES", "PRODUCTS", "PRODUCT_RULES", "RECURRENT_RULES", "product_of_rows"]

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


def _softmax(node: fx.Node, states: States, count: int) -> Step | None:
    """A softmax or a gate along a dimension of each row."""
    state = rows_of(node.args[0], states)
    if state is None or state.padded:
        return None
    dim, *rest = node.args[1:] or (-1,)
    dims = state.inner(dim, len(shape_of(node)))  # type: ignore[arg-type]
    if dims is None:
        return None
    return Step(
        state, lambda chunk: chunk.call(node, node.target, [chunk.value(node.args[0]), dims[0], *rest], node.kwargs)
    )


def _softmax_backward(node: fx.Node, states: States, count: int) -> Step | None:
    gradient, output, dim, *rest = node.args
    inside, state = rows_of(gradient, states), rows_of(output, states)
    if state is None or (inside is None and gradient in states):
        return None
    dims = state.inner(dim, len(shape_of(node)))  # type: ignore[arg-type]
    if dims is None or (inside is not None and not inside.goes_with(state)):
        return None

    def emit(chunk: Chunk) -> fx.Node:
        given = chunk.value(gradient) if inside is not None else chunk.rows(gradient, state)  # type: ignore[arg-type]
        return chunk.call(node, node.target, [given, chunk.value(output), dims[0], *rest])

    return Step(inside or state, emit)


def _reduction(node: fx.Node, states: States, count: int) -> Step | None:
    """A sum, mean, maximum or log-sum-exp: of each row, or of all of them where it is a sum or a mean."""
    source, dims, *rest = (*node.args, None)[: max(2, len(node.args))]
    state = rows_of(source, states)
    if state is None or any(argument in states for argument in rest if isinstance(argument, fx.Node)):
        return None
    shape = shape_of(source)
    inner = state.inner(dims, len(shape)) if dims else None  # type: ignore[arg-type]
    if inner is not None:
        if state.padded:
            return None
        given = [inner, *rest]
        keep = bool(rest and rest[0])
        gone = 0 if keep else sum(place < state.first for place in inner)
        found = replace(state, first=state.first - gone)
        return Step(found, lambda chunk: chunk.call(node, node.target, [chunk.value(source), *given], node.kwargs))
    return _over_rows(node, state, shape, dims, rest)


def _position(node: fx.Node, states: States, count: int) -> Step | None:
    """Where the largest or smallest value of each row is."""
    source = node.args[0]
    dim, keep = node.args[1] if len(node.args) > 1 else None, len(node.args) > 2 and bool(node.args[2])
    state = rows_of(source, states)
    if state is None or state.padded or dim is None:
        return None
    inner = state.inner(dim, len(shape_of(source)))  # type: ignore[arg-type]
    if inner is None:
        return None
    gone = 0 if keep else sum(place < state.first for place in inner)
    found = replace(state, first=state.first - gone)
    return Step(found, lambda chunk: chunk.call(node, node.target, [chunk.value(source), inner[0], keep]))


def _over_rows(node: fx.Node, state: Rows, shape: tuple[int, ...], dims: Any, rest: list[Any]) -> Step | None:
    mean = node.target in (_aten.mean.default, _aten.mean.dim)
    if not mean and node.target not in (_aten.sum.default, _aten.sum.dim_IntList):
        return None
    if state.chosen is not None and not state.padded and state.chosen.shape == shape[: state.lead]:
        return None
    places = sorted(dim % len(shape) for dim in ([dims] if isinstance(dims, int) else dims or range(len(shape))))
    of_rows = [place for place in places if state.first <= place < state.end]
    if len(of_rows) != state.lead:
        return None
    keep = bool(rest and rest[0])
    if keep and state.lead != 1:
        return None
    others = state.inner([place for place in places if place not in of_rows], len(shape)) or []
    inner = sorted([state.first, *others])
    divisor = math.prod(shape[place] for place in places) if mean else 1
    source = node.args[0]
    return Step(
        Sum(divisor),
        lambda chunk: chunk.call(node, _aten.sum.dim_IntList, [chunk.value(source), inner, keep], node.kwargs),
    )


INNER_RULES: dict[Any, Callable[[fx.Node, States, int], Step | None]] = {
    _aten._log_softmax.default: _softmax,
    _aten._softmax.default: _softmax,
    safe_softmax: _softmax,
    _aten.cumsum.default: _softmax,
    _aten.glu.default: _softmax,
    _aten.glu_backward.default: _softmax_backward,
    _aten._log_softmax_backward_data.default: _softmax_backward,
    _aten._softmax_backward_data.default: _softmax_backward,
    _aten.sum.default: _reduction,
    _aten.sum.dim_IntList: _reduction,
    _aten.mean.default: _reduction,
    _aten.mean.dim: _reduction,
    _aten.amax.default: _reduction,
    _aten.argmax.default: _position,
    _aten.argmin.default: _position,
    _aten.amin.default: _reduction,
    _aten.logsumexp.default: _reduction,
}
"""By op; see ``row_rules``."""


_SEQUENCE, _STATE = Rows(1, 1), Rows(1)
_FORWARD = {0: _SEQUENCE, 5: _STATE, 6: _STATE}
_BACKWARD = {0: _SEQUENCE, 5: _STATE, 6: _STATE, 7: _SEQUENCE, 8: _STATE, 9: _STATE}
_BACKWARD |= {10: _SEQUENCE, 11: _STATE, 12: _STATE}
_WORKSPACE = 22


def _lstm(node: fx.Node, states: States, count: int) -> Step | None:
    if not _is_by_samples(node, _FORWARD, states, count):
        return None

    def emit(chunk: Chunk) -> fx.Node:
        given = _arguments(chunk, node, _FORWARD, states)
        shapes = [value_of(item) if isinstance(item, fx.Node) else item for item in given[:-1]]
        return chunk.call(node, node.target, [*given[:-1], workspace_of(shapes)])

    return Step(Parts((_SEQUENCE, _STATE, _STATE, _STATE)), emit)


def _lstm_backward(node: fx.Node, states: States, count: int) -> Step | None:
    workspace = node.args[_WORKSPACE]
    if not _is_by_samples(node, _BACKWARD, states, count) or rows_of(workspace, states) is None:
        return None

    def emit(chunk: Chunk) -> fx.Node:
        given = _arguments(chunk, node, _BACKWARD, states)
        given[_WORKSPACE] = chunk.value(workspace)
        return chunk.call(node, node.target, given)

    weights = (Sum(), Sum(), Sum(), Sum())
    return Step(Parts((_SEQUENCE, *weights, _STATE, _STATE)), emit)


def _is_by_samples(node: fx.Node, places: Mapping[int, Rows], states: States, count: int) -> bool:
    """Whether samples are where they are looked for, and one of the arguments is in chunks."""
    given = [(node.args[place], state) for place, state in places.items() if node.args[place] is not None]
    others = [item for place, item in enumerate(node.args) if place not in places and place != _WORKSPACE]
    return (
        any(rows_of(item, states) is not None for item, _ in given)
        and all(alongside(item, state, count, states) for item, state in given)
        and not any(isinstance(item, fx.Node) and item in states for item in others)
    )


def _arguments(chunk: Chunk, node: fx.Node, places: Mapping[int, Rows], states: States) -> list[Any]:
    given: list[Any] = list(node.args)
    for place, state in places.items():
        if given[place] is not None:
            given[place] = _contiguous(chunk, part(chunk, given[place], state, states))
    return given


def _contiguous(chunk: Chunk, node: fx.Node) -> fx.Node:
    """A tensor as oneDNN reads it, whatever its strides say."""
    if value_of(node).is_contiguous():
        return node
    return chunk.call(node, torch.ops.aten.clone.default, [node], {"memory_format": torch.contiguous_format})


RECURRENT_RULES: dict[Any, Callable[[fx.Node, States, int], Step | None]] = {
    lstm_layer: _lstm,
    lstm_layer_backward: _lstm_backward,
}
"""By op; see ``row_rules``."""
