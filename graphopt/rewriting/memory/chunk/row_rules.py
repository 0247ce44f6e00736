"""How calls are made for some rows of their values: on elements, views, and along other dimensions.

How elements are read and written by number for some rows: in each row, or in the row of each sample's number.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from graphopt import _torch
from graphopt.ir.node import value_of
from graphopt.ir.ops.layers.dropout import masked_dropout
from graphopt.rewriting.memory.chunk.layer_rules import LAYER_RULES, READ_BY_NAME
from graphopt.rewriting.memory.chunk.loss_rules import LOSS_RULES
from graphopt.rewriting.memory.chunk.product_rules import INNER_RULES, PRODUCT_RULES, RECURRENT_RULES
from graphopt.rewriting.memory.chunk.token_rows import (
    Chunk,
    Rows,
    States,
    Step,
    alongside,
    part,
    rows_of,
    shape_of,
)
from graphopt.rewriting.memory.chunk.view_rules import VIEW_RULES

__all__ = ["INDEX_RULES", "MADE_OF_ONE_NUMBER", "step_of"]

_aten = torch.ops.aten


def step_of(node: fx.Node, states: States, count: int) -> Step | None:
    """How a call that reads values with rows is made for some rows; None where it needs all of them at once.

    Args:
        node: a call.
        states: of the values that depend on rows.
        count: how many rows there are before any are left out.
    """
    if node.target not in READ_BY_NAME and any(item in states for item in node.kwargs.values()):
        return None
    rule = _RULES.get(node.target)
    if rule is not None:
        return rule(node, states, count)
    if isinstance(node.target, _torch.OpOverload) and _is_elementwise(node.target):
        return _elementwise(node, states, count)
    return None


# --- calls on elements -----------------------------------------------------------------------------------------------

_ALSO_ELEMENTWISE = {
    _aten._to_copy.default,
    _aten.clone.default,
    _aten.copy.default,
    _aten.fill.Scalar,
    _aten.fill.Tensor,
    _aten.alias.default,
    _aten.detach.default,
    _aten.where.self,
    _aten.where.ScalarOther,
    _aten.where.ScalarSelf,
    _aten.masked_fill.Tensor,
    _aten.elu_backward.default,
    _aten.hardsigmoid_backward.default,
    _aten.hardswish_backward.default,
    _aten.hardtanh_backward.default,
    _aten.leaky_relu_backward.default,
    _aten.log_sigmoid_backward.default,
    _aten.mish_backward.default,
    _aten.softplus_backward.default,
    masked_dropout,
}
_KEEP_ZEROS = {
    _aten._to_copy.default,
    _aten.clone.default,
    _aten.alias.default,
    _aten.neg.default,
    _aten.mul.Tensor,
    _aten.mul.Scalar,
    _aten.div.Tensor,
    _aten.div.Scalar,
    _aten.tanh_backward.default,
    masked_dropout,
}
"""Calls on elements that give zero for the zeros of a gradient, whatever the rows hold otherwise."""


def _is_elementwise(op: _torch.OpOverload) -> bool:
    random = torch.Tag.nondeterministic_seeded in op.tags
    return (torch.Tag.pointwise in op.tags or op in _ALSO_ELEMENTWISE) and not random and not op._schema.is_mutable


def _elementwise(node: fx.Node, states: States, count: int) -> Step | None:
    result = value_of(node)
    if not isinstance(result, torch.Tensor):
        return None
    known = [state for argument in node.all_input_nodes if (state := rows_of(argument, states)) is not None]
    if not known or not all(state.goes_with(known[0]) for state in known):
        return None
    first = next((state for state in known if state.padded), known[0])
    if not all(isinstance(states.get(argument, first), Rows) for argument in node.all_input_nodes):
        return None
    if first.padded and node.target not in _KEEP_ZEROS:
        return None
    outside = {
        argument: _broadcast(shape_of(argument), shape_of(node), first)
        for argument in node.all_input_nodes
        if argument not in states
    }
    if not all(outside.values()):
        return None
    return Step(first, lambda chunk: chunk.call(node, node.target, _mapped(chunk, node, outside, first), node.kwargs))


def _broadcast(shape: tuple[int, ...], result: tuple[int, ...], state: Rows) -> str:
    """How a value from outside goes with the rows of a result.

    ``all``: it has none of its own; ``one``: one for all, in dimensions of their own; ``rows``: one for each; ``some``:
    one for each in some of the dimensions, and it is small; empty where it is large.
    """
    if len(shape) <= len(result) - state.end:
        return "all"
    full = (1,) * (len(result) - len(shape)) + shape
    own, rows = state.split(full)[1], state.split(result)[1]
    if math.prod(own) == 1:
        return "one" if math.prod(rows) > 1 else "rows"
    if own == rows and len(shape) >= len(result) - state.first:
        return "rows"
    return "some" if math.prod(shape) // math.prod(own) * math.prod(rows) * 4 <= math.prod(result) else ""


def _mapped(chunk: Chunk, node: fx.Node, outside: Mapping[fx.Node, str], state: Rows) -> list[Any]:
    def argument(value: Any) -> Any:
        how = outside.get(value, "all") if isinstance(value, fx.Node) else "all"
        if how == "rows":
            return chunk.rows(value, replace(state, first=state.first - len(shape_of(node)) + len(shape_of(value))))
        if how == "one" and state.lead > 1:
            return _with_one_row(chunk, value, shape_of(node), state)
        if how == "some":
            return chunk.rows(_in_all_rows(chunk, value, shape_of(node), state), state)
        return chunk.value(value)

    return [argument(value) for value in node.args]


def _with_one_row(chunk: Chunk, value: fx.Node, result: tuple[int, ...], state: Rows) -> fx.Node:
    """A value that is the same for all rows, with one dimension for them in place of several."""
    before, _, rest = state.split((1,) * (len(result) - len(shape_of(value))) + shape_of(value))
    sizes = [*before, 1, *rest]
    return chunk.once(("one", value), lambda once: once.call(value, _aten.view.default, [value, sizes]))


def _in_all_rows(chunk: Chunk, value: fx.Node, result: tuple[int, ...], state: Rows) -> fx.Node:
    """A value that is the same along some of the dimensions of rows, as large as all of them."""
    before, _, rest = state.split((1,) * (len(result) - len(shape_of(value))) + shape_of(value))
    sizes = [*before, *state.split(result)[1], *rest]
    return chunk.once(("some", value), lambda once: once.call(value, _aten.expand.default, [value, sizes]))


def _made(node: fx.Node, states: States, count: int) -> Step | None:
    """A tensor of one number, of the shape of a value with rows or of sizes that are given."""
    shape = shape_of(node)
    state = next((Rows(lead) for lead in range(1, len(shape)) if math.prod(shape[:lead]) == count), None)
    like = rows_of(node.args[0], states) if node.args else None
    if like is not None and not like.padded and like.chosen is None:
        if shape[: like.end] == shape_of(node.args[0])[: like.end]:
            state = like.place
        elif like.first:
            return None
    if state is None:
        return None
    fill = 1.0 if "ones" in str(node.target) else 0.0 if "zeros" in str(node.target) else node.args[-1]
    value = value_of(node)
    options = {"dtype": value.dtype, "device": value.device}
    before, _, rest = state.split(shape)
    return Step(
        state,
        lambda chunk: chunk.call(node, _aten.full.default, [[*before, state.size(chunk.count), *rest], fill], options),
    )


MADE_OF_ONE_NUMBER = (
    _aten.full.default,
    _aten.zeros.default,
    _aten.ones.default,
    _aten.new_zeros.default,
    _aten.new_ones.default,
    _aten.new_full.default,
    _aten.zeros_like.default,
    _aten.ones_like.default,
    _aten.full_like.default,
)
"""Ops that make a tensor of one number, whatever the values of their arguments."""


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

_RULES: dict[Any, Callable[[fx.Node, States, int], Step | None]] = {
    **dict.fromkeys(MADE_OF_ONE_NUMBER, _made),
    **{op: rule for op, rule in LOSS_RULES.items() if op is not operator.getitem},
    **VIEW_RULES,
    **INNER_RULES,
    **INDEX_RULES,
    **PRODUCT_RULES,
    **LAYER_RULES,
    **RECURRENT_RULES,
}
