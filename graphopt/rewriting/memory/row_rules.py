"""How calls are made for some rows of their values: on elements, views, and along other dimensions."""

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
from graphopt.ir.ops.dropout import masked_dropout
from graphopt.rewriting.memory.loss_rules import LOSS_RULES
from graphopt.rewriting.memory.product_rules import PRODUCT_RULES
from graphopt.rewriting.memory.token_rows import (
    Choice,
    Chunk,
    Rows,
    States,
    Step,
    Sum,
    plain,
    rows_of,
    shape_of,
)

_aten = torch.ops.aten


__all__ = ["MADE_OF_ONE_NUMBER", "step_of"]


def step_of(node: fx.Node, states: States, count: int) -> Step | None:
    """How a call that reads values with rows is made for some rows; None where it needs all of them at once.

    Args:
        node: a call.
        states: of the values that depend on rows.
        count: how many rows there are before any are left out.
    """
    if node.kwargs and any(isinstance(item, fx.Node) and item in states for item in node.kwargs.values()):
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
            return chunk.rows(value, state.lead, state.first - len(shape_of(node)) + len(shape_of(value)))
        if how == "one" and state.lead > 1:
            return _with_one_row(chunk, value, shape_of(node), state)
        if how == "some":
            return chunk.rows(_in_all_rows(chunk, value, shape_of(node), state), state.lead, state.first)
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


# --- views -----------------------------------------------------------------------------------------------------------


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
        found, lambda chunk: chunk.viewed(node, chunk.value(node.args[0]), [*new_before, chunk.count, *new_rest])
    )


def _rows_of_view(state: Rows, shape: tuple[int, ...], after: tuple[int, ...]) -> Rows | None:
    """Where a view in another shape has its rows.

    Dimensions of one element can be taken for rows or not: those that a slice has left rows in are.
    """
    sizes = [math.prod(part) for part in state.split(shape)]
    places = [(first, lead) for first in range(len(after)) for lead in range(1, len(after) - first + 1)]
    found = [replace(state, first=first, lead=lead) for first, lead in places]
    found = [rows for rows in found if [math.prod(part) for part in rows.split(after)] == sizes]
    kept = state.chosen.shape_after if state.chosen is not None and not state.padded else None
    return next((rows for rows in found if rows.split(after)[1] == kept), next(iter(found), None))


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
    if state is None or step != 1 or not isinstance(dim, int):
        return None
    shape = shape_of(source)
    dim, size = dim % len(shape), shape[dim % len(shape)]
    first, last, _ = slice(start, end).indices(size)
    place = state.inner(dim, len(shape))
    if place is not None:
        return Step(state, lambda chunk: chunk.call(node, node.target, [chunk.value(source), place[0], first, last]))
    if (first, last) == (0, size):
        return Step(state, lambda chunk: chunk.value(source))
    if state.chosen is not None or state.first:
        return None
    choice = Choice(shape[: state.lead], dim, first, last)
    return Step(replace(state, chosen=choice), lambda chunk: chunk.value(source))


def _slice_backward(node: fx.Node, states: States, count: int) -> Step | None:
    gradient, shape, dim, start, end, step = node.args
    state = rows_of(gradient, states)
    if state is None or step != 1 or not isinstance(dim, int):
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
                [chunk.value(gradient), [*before, chunk.count, *rest], place[0], first, last, 1],
            ),
        )
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


def _element(node: fx.Node, states: States, count: int) -> Step | None:
    """One of the results of a call."""
    made, place = node.args
    if not isinstance(made, fx.Node) or made.target not in (_aten.split.Tensor, _aten.split_with_sizes.default):
        return LOSS_RULES[operator.getitem](node, states, count)
    state = rows_of(made, states)
    return (
        None if state is None else Step(state, lambda chunk: chunk.call(node, node.target, [chunk.value(made), place]))
    )


def _cat(node: fx.Node, states: States, count: int) -> Step | None:
    """Parts of each row beside each other."""
    parts: Any = node.args[0]
    state = next((known for part in parts if (known := rows_of(part, states)) is not None), None)
    if state is None or state.padded or not all(_alongside(part, state, parts[0], states) for part in parts):
        return None
    dim: Any = node.args[1] if len(node.args) > 1 else 0
    place = state.inner(dim, len(shape_of(node)))
    if place is None or any(len(shape_of(part)) != len(shape_of(node)) for part in parts):
        return None
    return Step(
        state,
        lambda chunk: chunk.call(
            node, node.target, [[_rows_alongside(chunk, part, state, states) for part in parts], place[0]]
        ),
    )


# --- along the other dimensions --------------------------------------------------------------------------------------


def _softmax(node: fx.Node, states: States, count: int) -> Step | None:
    """A softmax or a gate along a dimension of each row."""
    state = rows_of(node.args[0], states)
    if state is None or state.padded:
        return None
    dim, *rest = node.args[1:] or (-1,)
    dims = state.inner(dim, len(shape_of(node)))  # type: ignore[arg-type]
    if dims is None:
        return None
    return Step(state, lambda chunk: chunk.call(node, node.target, [chunk.value(node.args[0]), dims[0], *rest]))


def _softmax_backward(node: fx.Node, states: States, count: int) -> Step | None:
    gradient, output, dim, *rest = node.args
    inside, state = rows_of(gradient, states), rows_of(output, states)
    if state is None or (inside is None and gradient in states):
        return None
    dims = state.inner(dim, len(shape_of(node)))  # type: ignore[arg-type]
    if dims is None or (inside is not None and not inside.goes_with(state)):
        return None

    def emit(chunk: Chunk) -> fx.Node:
        given = chunk.value(gradient) if inside is not None else chunk.rows(gradient, state.lead, state.first)  # type: ignore[arg-type]
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


def _gather(node: fx.Node, states: States, count: int) -> Step | None:
    """Elements of each row by numbers, or the rows with elements written or added at such places."""
    source, dim, index, *more = node.args
    state = rows_of(source, states)
    if state is None or state.padded:
        return None
    dims = state.inner(dim, len(shape_of(source)))  # type: ignore[arg-type]
    others = [item for item in (index, *more) if isinstance(item, fx.Node)]
    if dims is None or not all(_alongside(item, state, source, states) for item in others):
        return None

    def emit(chunk: Chunk) -> fx.Node:
        given = [_rows_alongside(chunk, item, state, states) for item in (index, *more)]
        return chunk.call(node, node.target, [chunk.value(source), dims[0], *given])

    return Step(state, emit)


def _alongside(item: fx.Node, state: Rows, source: Any, states: States) -> bool:
    """Whether a value has the rows that another one has."""
    inside = rows_of(item, states)
    if inside is not None:
        return inside.goes_with(state)
    return item not in states and state.split(shape_of(item))[1] == state.split(shape_of(source))[1]


def _rows_alongside(chunk: Chunk, item: Any, state: Rows, states: States) -> Any:
    outside = isinstance(item, fx.Node) and item not in states
    return chunk.rows(item, state.lead, state.first) if outside else chunk.value(item)


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


def _made(node: fx.Node, states: States, count: int) -> Step | None:
    """A tensor of one number, of the shape of a value with rows or of sizes that are given."""
    shape = shape_of(node)
    lead = next((lead for lead in range(1, len(shape)) if math.prod(shape[:lead]) == count), 0)
    like = rows_of(node.args[0], states) if node.args else None
    if like is not None and not like.first and not like.padded and like.chosen is None:
        lead = like.lead if shape[: like.lead] == shape_of(node.args[0])[: like.lead] else lead
    if not lead:
        return None
    fill = 1.0 if "ones" in str(node.target) else 0.0 if "zeros" in str(node.target) else node.args[-1]
    value = value_of(node)
    options = {"dtype": value.dtype, "device": value.device}
    rest = list(shape[lead:])
    return Step(Rows(lead), lambda chunk: chunk.call(node, _aten.full.default, [[chunk.count, *rest], fill], options))


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

Rule = Callable[[fx.Node, States, int], Step | None]

_RULES: dict[Any, Rule] = {
    _aten.view.default: _view,
    _aten._unsafe_view.default: _view,
    _aten.t.default: _transpose,
    _aten.transpose.int: _transpose,
    _aten.permute.default: _transpose,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split,
    operator.getitem: _element,
    _aten.cat.default: _cat,
    _aten.slice.Tensor: _slice,
    _aten.slice_backward.default: _slice_backward,
    _aten._log_softmax.default: _softmax,
    _aten._softmax.default: _softmax,
    _aten.glu.default: _softmax,
    _aten.glu_backward.default: _softmax_backward,
    _aten._log_softmax_backward_data.default: _softmax_backward,
    _aten._softmax_backward_data.default: _softmax_backward,
    _aten.sum.default: _reduction,
    _aten.sum.dim_IntList: _reduction,
    _aten.mean.default: _reduction,
    _aten.mean.dim: _reduction,
    _aten.amax.default: _reduction,
    _aten.logsumexp.default: _reduction,
    _aten.gather.default: _gather,
    _aten.scatter.value: _gather,
    _aten.scatter.src: _gather,
    _aten.scatter_add.default: _gather,
    _aten.unsqueeze.default: _unsqueeze,
    _aten.squeeze.dim: _unsqueeze,
    _aten.expand.default: _expand,
    **dict.fromkeys(MADE_OF_ONE_NUMBER, _made),
    **PRODUCT_RULES,
    **{op: rule for op, rule in LOSS_RULES.items() if op is not operator.getitem},
}
