"""How views are made for some rows, and calls that put parts of each row together or take them apart."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from graphopt.ir.node import value_of
from graphopt.rewriting.memory.chunk.loss_rules import LOSS_RULES
from graphopt.rewriting.memory.chunk.token_rows import (
    Choice,
    Chunk,
    Parts,
    Rows,
    States,
    Step,
    alongside,
    part,
    plain,
    rows_of,
    shape_of,
)

__all__ = ["JOINS", "VIEW_RULES"]

_aten = torch.ops.aten


def _view(node: fx.Node, states: States, count: int) -> Step | None:
    state = rows_of(node.args[0], states)
    if state is None:
        return None
    before, _, rest = state.split(shape_of(node.args[0]))
    after = shape_of(node)
    found = _rows_of_view(state, shape_of(node.args[0]), after)
    if found is None:
        return None
    new_before, _, new_rest = found.split(after)
    if (new_before, new_rest) == (before, rest):
        return Step(found, lambda chunk: chunk.value(node.args[0]))
    return Step(
        found,
        lambda chunk: chunk.viewed(node, chunk.value(node.args[0]), [*new_before, found.size(chunk.count), *new_rest]),
    )


def _rows_of_view(state: Rows, shape: tuple[int, ...], after: tuple[int, ...]) -> Rows | None:
    """Where a view in another shape has its rows.

    Dimensions of one element can be taken for rows or not: those that a slice has left rows in are.
    """
    ahead, total, behind = (math.prod(part) for part in state.split(shape))
    count = total // (state.outer * state.each)
    ahead, behind = ahead * state.outer, state.each * behind
    found = []
    for first in range(len(after)):
        for lead in range(1, len(after) - first + 1):
            before, rows, rest = (math.prod(part) for part in replace(state, first=first, lead=lead).split(after))
            if before * rest == 0 or ahead % before or behind % rest:
                continue
            outer, each = ahead // before, behind // rest
            if outer * count * each == rows and (lead == 1 or outer == 1):
                found.append(replace(state, first=first, lead=lead, outer=outer, each=each))
    kept = state.chosen.shape_after if state.chosen is not None and not state.padded else None
    same = [rows for rows in found if (rows.outer, rows.each) == (state.outer, state.each)]
    alike = next((rows for rows in same if rows.split(after)[1] == kept), None)
    return alike or next(iter(sorted(found, key=lambda rows: rows.outer * rows.each)), None)


def _transpose(node: fx.Node, states: States, count: int) -> Step | None:
    """Dimensions in another order, as long as those of rows stay side by side and in theirs."""
    state = rows_of(node.args[0], states)
    if state is None:
        return None
    order = _order(node)
    first = order.index(state.first)
    if order[first : first + state.lead] != list(range(state.first, state.end)):
        return None
    found = replace(state, first=first)
    if state.lead == 1:
        return plain(node, found)
    source = [place for place in order if not state.first < place < state.end]
    inner = [place if place <= state.first else place - state.lead + 1 for place in source]
    return Step(found, lambda chunk: chunk.call(node, _aten.permute.default, [chunk.value(node.args[0]), inner]))


def _order(node: fx.Node) -> list[int]:
    """Which dimension of its operand each dimension of a transposed value is."""
    total = len(shape_of(node))
    dims: Any = node.args[1] if node.target is _aten.permute.default else (node.args[1:] or (0, 1))
    if node.target is _aten.permute.default:
        return [dim % total for dim in dims]
    order = list(range(total))
    one, other = (dim % total for dim in dims)
    order[one], order[other] = order[other], order[one]
    return order


def _slice(node: fx.Node, states: States, count: int) -> Step | None:
    state = rows_of(node.args[0], states)
    given: Any = (*node.args, *(0, None, None, 1)[len(node.args) - 1 :])
    source, dim, start, end, step = given
    if state is None or not isinstance(dim, int):
        return None
    shape = shape_of(source)
    dim, size = dim % len(shape), shape[dim % len(shape)]
    first, last, _ = slice(start, end).indices(size)
    place = state.inner(dim, len(shape))
    if place is not None:
        given = [place[0], first, last, step]
        return Step(state, lambda chunk: chunk.call(node, node.target, [chunk.value(source), *given]))
    if step != 1:
        return None
    if (first, last) == (0, size):
        return Step(state, lambda chunk: chunk.value(source))
    if state.chosen is not None or state.first or not state.is_plain:
        return None
    choice = Choice(shape[: state.lead], dim, first, last)
    return Step(replace(state, chosen=choice), lambda chunk: chunk.value(source))


def _slice_backward(node: fx.Node, states: States, count: int) -> Step | None:
    gradient, shape, dim, start, end, step = node.args
    state = rows_of(gradient, states)
    if state is None or not isinstance(dim, int):
        return None
    sizes: tuple[int, ...] = tuple(shape)  # type: ignore[arg-type]
    first, last, _ = slice(start, end).indices(sizes[dim])
    place = state.inner(dim, len(sizes))
    if place is not None:
        before, _, rest = state.split(sizes)
        return Step(
            state,
            lambda chunk: chunk.call(
                node,
                node.target,
                [chunk.value(gradient), [*before, state.size(chunk.count), *rest], place[0], first, last, step],
            ),
        )
    if step != 1:
        return None
    if (first, last) == (0, sizes[dim]):
        return Step(state, lambda chunk: chunk.value(gradient))
    if state.padded or state.chosen != Choice(sizes[: state.lead], dim, first, last):
        return None
    return Step(replace(state, padded=True), lambda chunk: chunk.value(gradient))


def _split(node: fx.Node, states: States, count: int) -> Step | None:
    """Parts of each row, as of gate and projection that are made by one product."""
    source, sizes, *dim = node.args
    state = rows_of(source, states)
    if state is None or state.padded or not isinstance(source, fx.Node):
        return None
    place = state.inner(dim[0] if dim else 0, len(shape_of(source)))  # type: ignore[arg-type]
    if place is None:
        return None
    return Step(state, lambda chunk: chunk.call(node, node.target, [chunk.value(source), sizes, place[0]]))


def _unbind(node: fx.Node, states: States, count: int) -> Step | None:
    """The places of an inner dimension, one by one, as of the steps of a sequence."""
    source, *dim = node.args
    state = rows_of(source, states)
    if state is None or state.padded or not isinstance(source, fx.Node):
        return None
    place = state.inner(dim[0] if dim else 0, len(shape_of(source)))  # type: ignore[arg-type]
    if place is None:
        return None
    found = replace(state, first=state.first - (place[0] < state.first))
    return Step(found, lambda chunk: chunk.call(node, node.target, [chunk.value(source), place[0]]))


def _cat(node: fx.Node, states: States, count: int) -> Step | None:
    """Parts of each row beside each other."""
    given: Any = node.args[0]
    parts = [item for item in given if shape_of(item) != (0,)]  # nothing, whatever the others are
    state = next((known for item in parts if (known := rows_of(item, states)) is not None), None)
    if state is None or state.padded or not all(alongside(item, state, count, states) for item in parts):
        return None
    dim: Any = node.args[1] if len(node.args) > 1 else 0
    place = state.inner(dim, len(shape_of(node)))
    if place is None or any(len(shape_of(item)) != len(shape_of(node)) for item in parts):
        return None
    return Step(
        state,
        lambda chunk: chunk.call(node, node.target, [[part(chunk, item, state, states) for item in parts], place[0]]),
    )


def _stack(node: fx.Node, states: States, count: int) -> Step | None:
    """Parts of each row beside each other in a dimension of their own."""
    parts: Any = node.args[0]
    state = next((known for item in parts if (known := rows_of(item, states)) is not None), None)
    if state is None or state.padded or not all(alongside(item, state, count, states) for item in parts):
        return None
    dim: Any = node.args[1] if len(node.args) > 1 else 0
    place = dim % len(shape_of(node))
    if state.first < place < state.end:
        return None
    inner = place if place <= state.first else place - state.lead + 1
    return Step(
        replace(state, first=state.first + (place <= state.first)),
        lambda chunk: chunk.call(node, node.target, [[part(chunk, item, state, states) for item in parts], inner]),
    )


def _scattered(node: fx.Node, states: States, count: int) -> Step | None:
    """Each row with a part of it written at places of an inner dimension."""
    source, written, dim, *rest = node.args
    state = rows_of(source, states) or rows_of(written, states)
    if state is None or state.padded or not isinstance(source, fx.Node) or not isinstance(written, fx.Node):
        return None
    place = state.inner(dim, len(shape_of(node)))  # type: ignore[arg-type]
    if place is None or not alongside(source, state, count, states):
        return None
    gone = node.target is _aten.select_scatter.default and place[0] < state.first
    narrow = replace(state, first=state.first - gone)
    known = rows_of(written, states)
    if not (known.goes_with(narrow) if known is not None else written not in states and not shape_of(written)):
        return None

    def emit(chunk: Chunk) -> fx.Node:
        given = [part(chunk, source, state, states), chunk.value(written)]
        return chunk.call(node, node.target, [*given, place[0], *rest])

    return Step(state.place, emit)


def _restrided(node: fx.Node, states: States, count: int) -> Step | None:
    """Other strides of the same elements, where dimensions of one element have others than before."""
    source, _, _, *offset = node.args
    state = rows_of(source, states)
    if state is None or any(offset) or shape_of(source) != shape_of(node):
        return None
    before, after = value_of(source).stride(), value_of(node).stride()  # type: ignore[arg-type]
    if any(before[place] != after[place] for place, size in enumerate(shape_of(node)) if size != 1):
        return None
    return Step(state, lambda chunk: chunk.value(source))


def _roll(node: fx.Node, states: States, count: int) -> Step | None:
    """Places of inner dimensions moved around."""
    source, shifts, *dims = node.args
    state = rows_of(source, states)
    if state is None or state.padded or not dims:
        return None
    places = state.inner(dims[0], len(shape_of(source)))  # type: ignore[arg-type]
    if places is None:
        return None
    return Step(state, lambda chunk: chunk.call(node, node.target, [chunk.value(source), shifts, places]))


def _unsqueeze(node: fx.Node, states: States, count: int) -> Step | None:
    source, dim = node.args
    state = rows_of(source, states)
    if state is None or not isinstance(dim, int):
        return None
    adds = node.target is _aten.unsqueeze.default
    place = dim % len(shape_of(node)) if adds else dim % len(shape_of(source))
    if state.first < place < state.end or (place == state.first and not adds):
        return None
    if not adds and shape_of(source)[place] != 1:
        return Step(state, lambda chunk: chunk.value(source))
    inner = place if place <= state.first else place - state.lead + 1
    first = state.first + (place <= state.first) * (1 if adds else -1)
    return Step(replace(state, first=first), lambda chunk: chunk.call(node, node.target, [chunk.value(source), inner]))


def _expand(node: fx.Node, states: States, count: int) -> Step | None:
    state = rows_of(node.args[0], states)
    before, after = shape_of(node.args[0]), shape_of(node)
    if state is None or len(before) != len(after) or state.split(before)[1] != state.split(after)[1]:
        return None
    sizes = [*after[: state.first], -1, *after[state.end :]]
    return Step(state, lambda chunk: chunk.call(node, node.target, [chunk.value(node.args[0]), sizes]))


def _selected(node: fx.Node, states: States, count: int) -> Step | None:
    """One place of an inner dimension, such as the first token."""
    x, dim, index = node.args
    state = rows_of(x, states)
    if state is None or state.padded:
        return None
    place = state.inner(dim, len(shape_of(x)))  # type: ignore[arg-type]
    if place is None:
        return None
    known = replace(state.place, first=state.first - (place[0] < state.first))
    return Step(known, lambda chunk: chunk.call(node, node.target, [chunk.value(x), place[0], index]))


def _selected_backward(node: fx.Node, states: States, count: int) -> Step | None:
    gradient, sizes, dim, index = node.args
    state = rows_of(gradient, states)
    if state is None or state.padded or state.lead != 1 or not isinstance(dim, int):
        return None
    shape: list[Any] = list(sizes)  # type: ignore[arg-type]
    place = dim % len(shape)
    first = state.first + (place <= state.first)
    return Step(
        replace(state.place, first=first),
        lambda chunk: chunk.call(
            node,
            node.target,
            [chunk.value(gradient), [*shape[:first], state.size(chunk.count), *shape[first + 1 :]], place, index],
        ),
    )


def _padded(node: fx.Node, states: States, count: int) -> Step | None:
    """Padding of inner dimensions."""
    x, padding, *_ = node.args
    state = rows_of(x, states)
    if state is None or state.padded:
        return None
    total = len(shape_of(x))
    touched = [total - 1 - place for place in range(len(padding) // 2)]  # type: ignore[arg-type]
    return plain(node, state) if state.lead == 1 and state.inner(touched, total) is not None else None


def _element(node: fx.Node, states: States, count: int) -> Step | None:
    """One of the results of a call."""
    made, place = node.args
    known = states.get(made) if isinstance(made, fx.Node) else None
    if isinstance(known, Parts) and isinstance(place, int):
        return Step(known.states[place], lambda chunk: chunk.call(node, node.target, [chunk.value(made), place]))
    if isinstance(made, fx.Node) and VIEW_RULES.get(made.target) in (_split, _unbind) and isinstance(known, Rows):
        return Step(known, lambda chunk: chunk.call(node, node.target, [chunk.value(made), place]))
    return LOSS_RULES[operator.getitem](node, states, count)


VIEW_RULES: dict[Any, Callable[[fx.Node, States, int], Step | None]] = {
    _aten.view.default: _view,
    _aten._unsafe_view.default: _view,
    _aten.t.default: _transpose,
    _aten.transpose.int: _transpose,
    _aten.permute.default: _transpose,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split,
    _aten.unsafe_split.Tensor: _split,
    _aten.unsafe_split_with_sizes.default: _split,
    operator.getitem: _element,
    _aten.unbind.int: _unbind,
    _aten.cat.default: _cat,
    _aten.stack.default: _stack,
    _aten.roll.default: _roll,
    _aten.slice_scatter.default: _scattered,
    _aten.select_scatter.default: _scattered,
    _aten.as_strided.default: _restrided,
    _aten.slice.Tensor: _slice,
    _aten.slice_backward.default: _slice_backward,
    _aten.unsqueeze.default: _unsqueeze,
    _aten.squeeze.dim: _unsqueeze,
    _aten.expand.default: _expand,
    _aten.constant_pad_nd.default: _padded,
    _aten.select.int: _selected,
    _aten.select_backward.default: _selected_backward,
}
"""By op; see ``row_rules``."""

JOINS = frozenset({_aten.cat.default, _aten.stack.default})
"""Ops that put values together."""
