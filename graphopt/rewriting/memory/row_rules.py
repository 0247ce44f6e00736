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
from graphopt.rewriting.memory.index_rules import INDEX_RULES
from graphopt.rewriting.memory.inner_rules import INNER_RULES
from graphopt.rewriting.memory.layer_rules import LAYER_RULES, READ_BY_NAME
from graphopt.rewriting.memory.loss_rules import LOSS_RULES
from graphopt.rewriting.memory.product_rules import PRODUCT_RULES
from graphopt.rewriting.memory.recurrent_rules import RECURRENT_RULES
from graphopt.rewriting.memory.token_rows import (
    Chunk,
    Rows,
    States,
    Step,
    rows_of,
    shape_of,
)
from graphopt.rewriting.memory.view_rules import VIEW_RULES

_aten = torch.ops.aten


__all__ = ["MADE_OF_ONE_NUMBER", "step_of"]


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
