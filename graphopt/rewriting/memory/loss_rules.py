"""How losses of classes are computed for some rows: ``nll_loss`` and its backward, and what they divide by."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from graphopt.ir.node import value_of
from graphopt.rewriting.memory.token_rows import (
    Chunk,
    Emit,
    States,
    Step,
    Sum,
    Whole,
    rows_of,
    shape_of,
)

_aten = torch.ops.aten


__all__ = ["LOSS_RULES"]

# --- losses ----------------------------------------------------------------------------------------------------------

_NONE, _MEAN, _SUM = 0, 1, 2
"""How ``nll_loss`` reduces."""


def _nll(node: fx.Node, states: States, count: int) -> Step | None:
    scores, target, weight, reduction, ignore = node.args
    state = rows_of(scores, states)
    if state is None or state.last or state.padded or state.lead != 1 or target in states or weight in states:
        return None
    kind = _NONE if reduction == _NONE else _SUM

    def emit(chunk: Chunk) -> fx.Node:
        given = [chunk.value(scores), chunk.rows(target, 1), weight, kind, ignore]  # type: ignore[arg-type]
        return chunk.call(node, node.target, given)

    return Step(state, emit)


def _element(node: fx.Node, states: States, count: int) -> Step | None:
    """The loss of ``nll_loss_forward``, or the total weight of its targets."""
    made, place = node.args
    if not isinstance(made, fx.Node) or made.target is not _aten.nll_loss_forward.default:
        return None
    scores, _target, _weight, reduction, _ignore = made.args
    state = rows_of(scores, states)
    assert state is not None
    if place == 1:
        return Step(Whole(lambda once: total_weight(once, made)), lambda chunk: None)
    emit: Emit = lambda chunk: chunk.call(node, operator.getitem, [chunk.value(made), 0])  # noqa: E731
    if reduction == _NONE:
        return Step(state, emit)
    if reduction == _SUM:
        return Step(Sum(), emit)

    def finish(once: Any, total: fx.Node) -> fx.Node:
        count = once.once(("total weight", made), lambda inner: total_weight(inner, made))
        return once.call(node, _aten.div.Tensor, [total, count])  # type: ignore[no-any-return]

    return Step(Sum(finish=finish), emit)


def total_weight(chunk: Any, loss: fx.Node) -> fx.Node:
    """The weights of all targets of a loss, added up, as a scalar: how many are not ignored, without weights."""
    scores, target, weight, _, ignore = loss.args
    dtype = value_of(scores).dtype  # type: ignore[arg-type]
    kept = chunk.call(loss, _aten.ne.Scalar, [target, ignore])
    counted = chunk.call(loss, _aten._to_copy.default, [kept], {"dtype": dtype})
    if weight is not None:
        inside = chunk.call(loss, _aten.clamp.default, [target, 0, shape_of(weight)[0] - 1])
        counted = chunk.call(
            loss, _aten.mul.Tensor, [counted, chunk.call(loss, _aten.index_select.default, [weight, 0, inside])]
        )
    return chunk.call(loss, _aten.sum.default, [counted])  # type: ignore[no-any-return]


def _nll_backward(node: fx.Node, states: States, count: int) -> Step | None:
    gradient, scores, target, weight, reduction, ignore, _total = node.args
    state = rows_of(scores, states)
    if state is None or state.last or state.lead != 1 or target in states or weight in states:
        return None
    inside = rows_of(gradient, states)
    if gradient in states and inside is None:
        return None
    assert isinstance(gradient, fx.Node)

    def emit(chunk: Chunk) -> fx.Node:
        rows = chunk.rows(target, 1)  # type: ignore[arg-type]
        count = chunk.once(("total weight", node), lambda once: _weight_for(once, node))
        if reduction == _NONE:
            given, kind = chunk.value(gradient) if inside is not None else chunk.rows(gradient, 1), _NONE
        elif reduction == _SUM:
            given, kind = gradient, _SUM
        else:
            given = chunk.once(("gradient", node), lambda once: once.call(node, _aten.div.Tensor, [gradient, count]))
            kind = _SUM
        return chunk.call(node, node.target, [given, chunk.value(scores), rows, weight, kind, ignore, count])

    return Step(state, emit)


def _weight_for(chunk: Any, node: fx.Node) -> fx.Node:
    total = node.args[6]
    assert isinstance(total, fx.Node)
    made = total.args[0]
    assert isinstance(made, fx.Node)
    return chunk.once(("total weight", made), lambda once: total_weight(once, made))  # type: ignore[no-any-return]


LOSS_RULES: dict[Any, Callable[[fx.Node, States, int], Step | None]] = {
    _aten.nll_loss_forward.default: _nll,
    operator.getitem: _element,
    _aten.nll_loss_backward.default: _nll_backward,
}
"""By op; see ``row_rules``."""
