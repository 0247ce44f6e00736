"""How calls are made for some rows of their values: on elements, views, and along other dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from graphopt import _torch
from graphopt.ir.node import value_of
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
    if first.last:
        return plain(node, first) if len(node.all_input_nodes) == 1 else None
    lead = shape_of(node)[: first.lead]
    outside: dict[fx.Node, str] = {}
    for argument in node.all_input_nodes:
        if argument not in states:
            how = _broadcast(shape_of(argument), lead, result.dim())
            if not how:
                return None
            outside[argument] = how
    return Step(
        first, lambda chunk: chunk.call(node, node.target, _mapped(chunk, node, outside, first.lead), node.kwargs)
    )


def _broadcast(shape: tuple[int, ...], lead: tuple[int, ...], dims: int) -> str:
    """How a value from outside goes with the rows of a result of so many dimensions.

    ``all``: it has none of its own; ``one``: one for all, in dimensions of their own; ``rows``: one for each; empty
    where it has some of them.
    """
    if len(shape) <= dims - len(lead):
        return "all"
    full = (1,) * (dims - len(shape)) + shape
    if math.prod(full[: len(lead)]) == 1:
        return "one" if math.prod(lead) > 1 else "rows"
    return "rows" if full[: len(lead)] == lead and len(shape) == dims else ""


def _mapped(chunk: Chunk, node: fx.Node, outside: Mapping[fx.Node, str], lead: int) -> list[Any]:
    def argument(value: Any) -> Any:
        how = outside.get(value, "all") if isinstance(value, fx.Node) else "all"
        if how == "rows":
            return chunk.rows(value, lead)
        if how == "one" and lead > 1:
            return _with_one_row(chunk, value, shape_of(node)[lead:])
        return chunk.value(value)

    return [argument(value) for value in node.args]


def _with_one_row(chunk: Chunk, value: fx.Node, rest: tuple[int, ...]) -> fx.Node:
    """A value that is the same for all rows, with one dimension in front in place of several."""
    own = shape_of(value)
    sizes = [1, *own[len(own) - len(rest) :]]
    return chunk.once(("one", value), lambda once: once.call(value, _aten.view.default, [value, sizes]))


# --- views -----------------------------------------------------------------------------------------------------------


def _view(node: fx.Node, states: States, count: int) -> Step | None:
    state = rows_of(node.args[0], states)
    if state is None or state.last:
        return None
    before, after = shape_of(node.args[0]), shape_of(node)
    rest = before[state.lead :]
    rows = math.prod(before[: state.lead])
    for lead in range(1, len(after) + 1):
        if math.prod(after[:lead]) == rows and math.prod(after[lead:]) == math.prod(rest):
            if after[lead:] == rest:
                return Step(replace(state, lead=lead), lambda chunk: chunk.value(node.args[0]))
            return _viewed(node, replace(state, lead=lead), after[lead:])
    return None


def _viewed(node: fx.Node, state: Rows, rest: tuple[int, ...]) -> Step:
    """A view of each row in another shape."""
    sizes = [-1, *rest]
    return Step(state, lambda chunk: chunk.call(node, _aten.view.default, [chunk.value(node.args[0]), sizes]))


def _transpose(node: fx.Node, states: States, count: int) -> Step | None:
    state = rows_of(node.args[0], states)
    if state is None or state.lead != 1 or len(shape_of(node)) != 2:
        return None
    return plain(node, replace(state, last=not state.last))


def _slice(node: fx.Node, states: States, count: int) -> Step | None:
    state = rows_of(node.args[0], states)
    given: Any = (*node.args, *(0, None, None, 1)[len(node.args) - 1 :])
    source, dim, start, end, step = given
    if state is None or state.last or step != 1 or not isinstance(dim, int):
        return None
    shape = shape_of(source)
    dim, size = dim % len(shape), shape[dim % len(shape)]
    first, last, _ = slice(start, end).indices(size)
    if dim >= state.lead:
        place = dim - state.lead + 1
        return Step(state, lambda chunk: chunk.call(node, node.target, [chunk.value(source), place, first, last]))
    if (first, last) == (0, size):
        return Step(state, lambda chunk: chunk.value(source))
    if state.chosen is not None:
        return None
    choice = Choice(shape[: state.lead], dim, first, last)
    return Step(replace(state, chosen=choice), lambda chunk: chunk.value(source))


def _slice_backward(node: fx.Node, states: States, count: int) -> Step | None:
    gradient, shape, dim, start, end, step = node.args
    state = rows_of(gradient, states)
    if state is None or state.last or step != 1 or not isinstance(dim, int):
        return None
    sizes: tuple[int, ...] = tuple(shape)  # type: ignore[arg-type]
    first, last, _ = slice(start, end).indices(sizes[dim])
    if dim >= state.lead:
        rest, place = sizes[state.lead :], dim - state.lead + 1
        return Step(
            state,
            lambda chunk: chunk.call(
                node, node.target, [chunk.value(gradient), [chunk.count, *rest], place, first, last, 1]
            ),
        )
    if (first, last) == (0, sizes[dim]):
        return Step(state, lambda chunk: chunk.value(gradient))
    if state.padded or state.chosen != Choice(sizes[: state.lead], dim, first, last):
        return None
    return Step(replace(state, padded=True), lambda chunk: chunk.value(gradient))


# --- along the other dimensions --------------------------------------------------------------------------------------


def _inner(dims: Any, state: Rows, total: int) -> list[int] | None:
    """Dimensions of a call inside of a chunk; None where one of them numbers rows."""
    given = [dims] if isinstance(dims, int) else list(dims or range(total))
    places = [dim % total for dim in given]
    return None if any(place < state.lead for place in places) else [place - state.lead + 1 for place in places]


def _softmax(node: fx.Node, states: States, count: int) -> Step | None:
    state = rows_of(node.args[0], states)
    if state is None or state.last or state.padded:
        return None
    dims = _inner(node.args[1], state, len(shape_of(node)))
    if dims is None:
        return None
    rest = node.args[2:]
    return Step(state, lambda chunk: chunk.call(node, node.target, [chunk.value(node.args[0]), dims[0], *rest]))


def _softmax_backward(node: fx.Node, states: States, count: int) -> Step | None:
    gradient, output, dim, *rest = node.args
    inside, state = rows_of(gradient, states), rows_of(output, states)
    if state is None or state.last or (inside is None and gradient in states):
        return None
    dims = _inner(dim, state, len(shape_of(node)))
    if dims is None or (inside is not None and not inside.goes_with(state)):
        return None

    def emit(chunk: Chunk) -> fx.Node:
        given = chunk.value(gradient) if inside is not None else chunk.rows(gradient, state.lead)  # type: ignore[arg-type]
        return chunk.call(node, node.target, [given, chunk.value(output), dims[0], *rest])

    return Step(inside or state, emit)


def _reduction(node: fx.Node, states: States, count: int) -> Step | None:
    """A sum, mean, maximum or log-sum-exp: of each row, or of all of them where it is a sum or a mean."""
    source, dims, *rest = (*node.args, None)[: max(2, len(node.args))]
    state = rows_of(source, states)
    if state is None or state.last or any(argument in states for argument in rest if isinstance(argument, fx.Node)):
        return None
    shape = shape_of(source)
    inner = _inner(dims, state, len(shape)) if dims is not None else None
    if inner is not None:
        if state.padded:
            return None
        given = [inner, *rest]
        return Step(state, lambda chunk: chunk.call(node, node.target, [chunk.value(source), *given], node.kwargs))
    return _over_rows(node, state, shape, dims, rest)


def _over_rows(node: fx.Node, state: Rows, shape: tuple[int, ...], dims: Any, rest: list[Any]) -> Step | None:
    mean = node.target in (_aten.mean.default, _aten.mean.dim)
    if not mean and node.target not in (_aten.sum.default, _aten.sum.dim_IntList):
        return None
    if state.chosen is not None and not state.padded and state.chosen.shape == shape[: state.lead]:
        return None
    places = sorted(dim % len(shape) for dim in ([dims] if isinstance(dims, int) else dims or range(len(shape))))
    if places[: state.lead] != list(range(state.lead)):
        return None
    keep = bool(rest and rest[0])
    if keep and state.lead != 1:
        return None
    inner = [0, *(place - state.lead + 1 for place in places[state.lead :])]
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
    if state is None or state.last or state.padded:
        return None
    dims = _inner(dim, state, len(shape_of(source)))
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
    return item not in states and shape_of(item)[: state.lead] == shape_of(source)[: state.lead]


def _rows_alongside(chunk: Chunk, item: Any, state: Rows, states: States) -> Any:
    outside = isinstance(item, fx.Node) and item not in states
    return chunk.rows(item, state.lead) if outside else chunk.value(item)


def _unsqueeze(node: fx.Node, states: States, count: int) -> Step | None:
    source, dim = node.args
    state = rows_of(source, states)
    if state is None or state.last or not isinstance(dim, int):
        return None
    place = dim % len(shape_of(node)) if node.target is _aten.unsqueeze.default else dim % len(shape_of(source))
    if place < state.lead:
        return None
    inner = place - state.lead + 1
    return Step(state, lambda chunk: chunk.call(node, node.target, [chunk.value(source), inner]))


def _expand(node: fx.Node, states: States, count: int) -> Step | None:
    state = rows_of(node.args[0], states)
    before, after = shape_of(node.args[0]), shape_of(node)
    if state is None or state.last or len(before) != len(after) or before[: state.lead] != after[: state.lead]:
        return None
    sizes = [-1, *after[state.lead :]]
    return Step(state, lambda chunk: chunk.call(node, node.target, [chunk.value(node.args[0]), sizes]))


def _made(node: fx.Node, states: States, count: int) -> Step | None:
    """A tensor of one number, of the shape of a value with rows or of sizes that are given."""
    shape = shape_of(node)
    lead = next((lead for lead in range(1, len(shape)) if math.prod(shape[:lead]) == count), 0)
    like = rows_of(node.args[0], states) if node.args else None
    if like is not None and not like.last and not like.padded and like.chosen is None:
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
    _aten.slice.Tensor: _slice,
    _aten.slice_backward.default: _slice_backward,
    _aten._log_softmax.default: _softmax,
    _aten._softmax.default: _softmax,
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
    **LOSS_RULES,
}
