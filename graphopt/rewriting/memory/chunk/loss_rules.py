"""How losses of classes are computed for some rows: ``nll_loss`` and its backward, and what they divide by."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from graphopt.ir.node import value_of
from graphopt.rewriting.memory.chunk.token_rows import (
    Chunk,
    Rows,
    States,
    Step,
    Sum,
    Whole,
    rows_of,
    shape_of,
)

_aten = torch.ops.aten


__all__ = ["LOSS_RULES"]

_NONE, _MEAN, _SUM = 0, 1, 2
"""How ``nll_loss`` reduces."""


def _nll(node: fx.Node, states: States, count: int) -> Step | None:
    scores, target, weight, reduction, ignore = node.args
    state = rows_of(scores, states)
    if state is None or not state.is_matrix or state.padded or not _is_there(target, states) or weight in states:
        return None
    kind = _NONE if reduction == _NONE or _is_half(scores) else _SUM

    def emit(chunk: Chunk) -> fx.Node:
        given = [chunk.value(scores), chunk.rows(target, state), weight, kind, ignore]  # type: ignore[arg-type]
        return chunk.call(node, node.target, given)

    return Step(state, emit)


def _is_there(target: Any, states: States) -> bool:
    """Whether the targets of a loss are there as a whole in front of the chunks."""
    known = rows_of(target, states)
    return target not in states or (known is not None and known.whole)


def _element(node: fx.Node, states: States, count: int) -> Step | None:
    """The loss of ``nll_loss_forward``, or the total weight of its targets."""
    made, place = node.args
    if not isinstance(made, fx.Node) or made.target is not _aten.nll_loss_forward.default:
        return None
    scores, _target, _weight, reduction, _ignore = made.args
    state = rows_of(scores, states)
    assert state is not None
    if place == 1:
        return Step(Whole(lambda once: _narrowed(once, node, _total_weight_of(once, made), scores)), lambda chunk: None)
    if reduction == _NONE:
        return Step(state, lambda chunk: _losses(chunk, node))
    wide = _is_half(scores)

    def finish(once: Any, total: fx.Node) -> fx.Node:
        if reduction == _MEAN:
            total = once.call(node, _aten.div.Tensor, [total, _total_weight_of(once, made)])
        return _narrowed(once, node, total, scores) if wide else total

    return Step(Sum(finish=finish), lambda chunk: _summed_losses(chunk, node, wide))


def _losses(chunk: Chunk, node: fx.Node) -> fx.Node:
    return chunk.call(node, operator.getitem, [chunk.value(node.args[0]), 0])


def _summed_losses(chunk: Chunk, node: fx.Node, wide: bool) -> fx.Node:
    """The sum of the losses of a chunk: of 16-bit scores in float32, since the losses of all tokens can be too many."""
    losses = _losses(chunk, node)
    return chunk.call(node, _aten.sum.dim_IntList, [losses, [0]], {"dtype": torch.float32}) if wide else losses


def _is_half(scores: Any) -> bool:
    return value_of(scores).dtype in (torch.float16, torch.bfloat16)


def _narrowed(chunk: Any, like: fx.Node, number: fx.Node, scores: Any) -> fx.Node:
    """A number in the dtype of the scores."""
    dtype = value_of(scores).dtype
    if value_of(number).dtype is dtype:
        return number
    return chunk.call(like, _aten._to_copy.default, [number], {"dtype": dtype})  # type: ignore[no-any-return]


def _total_weight_of(chunk: Any, loss: fx.Node) -> fx.Node:
    return chunk.once(("total weight", loss), lambda once: _total_weight(once, loss))  # type: ignore[no-any-return]


def _total_weight(chunk: Any, loss: fx.Node) -> fx.Node:
    """The weights of all targets of a loss, added up, as a scalar: how many are not ignored, without weights.

    In the dtype of the scores, or in float32 for those of 16 bits.
    """
    scores, target, weight, _, ignore = loss.args
    dtype = torch.float32 if _is_half(scores) else value_of(scores).dtype  # type: ignore[arg-type]
    kept = chunk.call(loss, _aten.ne.Scalar, [target, ignore])
    counted = chunk.call(loss, _aten._to_copy.default, [kept], {"dtype": dtype})
    if weight is not None:
        inside = chunk.call(loss, _aten.clamp.default, [target, 0, shape_of(weight)[0] - 1])
        counted = chunk.call(
            loss, _aten.mul.Tensor, [counted, chunk.call(loss, _aten.index_select.default, [weight, 0, inside])]
        )
    return chunk.call(loss, _aten.sum.default, [counted])  # type: ignore[no-any-return]


def _nll_backward(node: fx.Node, states: States, count: int) -> Step | None:
    gradient, scores, target, weight, reduction, ignore, total = node.args
    state = rows_of(scores, states)
    if state is None or not state.is_matrix or not _is_there(target, states) or weight in states:
        return None
    inside = rows_of(gradient, states)
    if gradient in states and inside is None:
        return None
    assert isinstance(gradient, fx.Node)

    made = total.args[0] if isinstance(total, fx.Node) else None
    if not isinstance(made, fx.Node) or made.target is not _aten.nll_loss_forward.default:
        return None

    def emit(chunk: Chunk) -> fx.Node:
        rows = chunk.rows(target, state)  # type: ignore[arg-type]
        weights = _narrowed_once(chunk, node, made)
        if reduction == _NONE:
            given = chunk.value(gradient) if inside is not None else chunk.rows(gradient, state)
        else:
            given = (
                gradient if reduction == _SUM else chunk.once(("gradient", node), lambda once: _share(once, node, made))
            )
        kind = _NONE if reduction == _NONE else _SUM
        return chunk.call(node, node.target, [given, chunk.value(scores), rows, weight, kind, ignore, weights])

    return Step(state, emit)


def _narrowed_once(chunk: Chunk, node: fx.Node, made: fx.Node) -> fx.Node:
    return chunk.once(
        ("narrow total weight", made), lambda once: _narrowed(once, node, _total_weight_of(once, made), made.args[0])
    )


def _share(chunk: Any, node: fx.Node, made: fx.Node) -> fx.Node:
    """The gradient of a mean, for each unit of weight."""
    share = chunk.call(node, _aten.div.Tensor, [node.args[0], _total_weight_of(chunk, made)])
    return _narrowed(chunk, node, share, made.args[0])


# --- losses of elements ----------------------------------------------------------------------------------------------

_REDUCTION: dict[Any, int] = {
    _aten.mse_loss.default: 2,
    _aten.smooth_l1_loss.default: 2,
    _aten.huber_loss.default: 2,
    _aten.binary_cross_entropy.default: 3,
    _aten.binary_cross_entropy_with_logits.default: 4,
    _aten.mse_loss_backward.default: 3,
    _aten.smooth_l1_loss_backward.default: 3,
    _aten.huber_loss_backward.default: 3,
    _aten.binary_cross_entropy_backward.default: 4,
}
"""Which argument of a loss of elements says how it is reduced; tensors are in front of it."""


def _elements(node: fx.Node, states: States, count: int) -> Step | None:
    """A loss of elements: for each, their sum, or their mean."""
    tensors = [*node.args, None, None][: _REDUCTION[node.target]]
    return _of_elements(node, tensors, states, None)


def _elements_backward(node: fx.Node, states: States, count: int) -> Step | None:
    gradient, *tensors = [*node.args, None][: _REDUCTION[node.target]]
    return _of_elements(node, tensors, states, gradient)


def _of_elements(node: fx.Node, tensors: Sequence[Any], states: States, gradient: Any) -> Step | None:
    state = next((known for item in tensors if (known := rows_of(item, states)) is not None), None)
    shape = shape_of(tensors[0])
    if state is None or state.padded or not all(_goes_with(item, state, shape, states) for item in tensors):
        return None
    place = _REDUCTION[node.target]
    reduction = node.args[place] if len(node.args) > place else _MEAN
    if gradient is not None and (gradient in states) != (reduction == _NONE):
        return None
    if reduction == _NONE and gradient is not None and not _goes_with(gradient, state, shape, states):
        return None
    kind = _NONE if reduction == _NONE else _SUM
    rest = node.args[place + 1 :]
    size = math.prod(shape) if reduction == _MEAN else 1

    def emit(chunk: Chunk) -> fx.Node:
        first = [] if gradient is None else [_gradient_of(chunk, node, gradient, size)]
        given = [chunk.rows(i, state) if _has_rows(i, shape, states) else chunk.value(i) for i in tensors]
        return chunk.call(node, node.target, [*first, *given, kind, *rest])

    return Step(Sum(size) if gradient is None and reduction != _NONE else state, emit)


def _goes_with(item: Any, state: Rows, shape: tuple[int, ...], states: States) -> bool:
    if not isinstance(item, fx.Node):
        return item is None
    known = rows_of(item, states)
    if known is not None:
        return known.goes_with(state)
    same_for_all = len(shape_of(item)) <= len(shape) - state.end
    return item not in states and (same_for_all or shape_of(item) == shape)


def _has_rows(item: Any, shape: tuple[int, ...], states: States) -> bool:
    """Whether a value from outside has an element for each of a loss."""
    return isinstance(item, fx.Node) and item not in states and shape_of(item) == shape


def _gradient_of(chunk: Chunk, node: fx.Node, gradient: fx.Node, size: int) -> Any:
    """What backward of a sum begins with, where it was that of a mean of so many."""
    if size == 1:
        return chunk.value(gradient)
    return chunk.once(("share", node), lambda once: once.call(gradient, _aten.div.Scalar, [gradient, size]))


LOSS_RULES: dict[Any, Callable[[fx.Node, States, int], Step | None]] = {
    _aten.nll_loss_forward.default: _nll,
    operator.getitem: _element,
    _aten.nll_loss_backward.default: _nll_backward,
    **dict.fromkeys([op for op in _REDUCTION if "backward" not in str(op)], _elements),
    **dict.fromkeys([op for op in _REDUCTION if "backward" in str(op)], _elements_backward),
}
"""By op; see ``row_rules``."""
