"""How layers are made for some rows: embeddings, norms, attention, convolutions, pooling, and their backward.

Rows are in the first dimension of these, which is that of samples, but for embeddings and norms, whose rows can be any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

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

__all__ = ["LAYER_RULES", "READ_BY_NAME"]

_aten = torch.ops.aten
Rule = Callable[[fx.Node, States, int], Step | None]


def _layer(places: Sequence[int], results: Sequence[type[Rows] | type[Sum]] = (), *, counted: int = -1) -> Rule:
    """A rule for a call whose arguments at ``places`` have samples in their first dimension.

    Args:
        places: of these arguments; all others are the same for all samples.
        results: what each of several results is; empty for one result with rows.
        counted: the place of an argument that says how many samples there are.
    """

    def rule(node: fx.Node, states: States, count: int) -> Step | None:
        given = [node.args[place] for place in places if place < len(node.args)]
        if not _are_samples([item for item in given if item is not None], count, states):
            return None
        others = [item for place, item in enumerate(node.args) if place not in places]
        if any(item in states for other in others for item in _nodes(other)):
            return None

        def emit(chunk: Chunk) -> fx.Node:
            arguments = list(node.args)
            for place in places:
                if place < len(arguments) and arguments[place] is not None:
                    arguments[place] = part(chunk, arguments[place], Rows(1), states)
            if counted >= 0:
                arguments[counted] = chunk.count
            return chunk.call(node, node.target, arguments, node.kwargs)

        return Step(_state_of(results), emit)

    return rule


def _state_of(results: Sequence[type[Rows] | type[Sum]]) -> Rows | Parts:
    return Parts(tuple(Sum() if kind is Sum else Rows(1) for kind in results)) if results else Rows(1)


def _are_samples(items: Sequence[Any], count: int, states: States) -> bool:
    """Whether values have samples in their first dimension, in chunks or outside, and one of them is in chunks."""
    inside = any(rows_of(item, states) is not None for item in items)
    return inside and all(alongside(item, Rows(1), count, states) for item in items)


def _nodes(value: Any) -> list[fx.Node]:
    if isinstance(value, (list, tuple)):
        return [item for inner in value for item in _nodes(inner)]
    return [value] if isinstance(value, fx.Node) else []


# --- embeddings and norms --------------------------------------------------------------------------------------------


def _embedding(node: fx.Node, states: States, count: int) -> Step | None:
    weight, index, *rest = node.args
    state = rows_of(index, states)
    if state is None or weight in states:
        return None
    return Step(
        state.place,
        lambda chunk: chunk.call(node, node.target, [weight, chunk.value(index), *rest]),
    )


def _embedding_backward(node: fx.Node, states: States, count: int) -> Step | None:
    gradient, index, *rest = node.args
    state = rows_of(gradient, states)
    if state is None or state.padded or not alongside(index, state, count, states) or (len(rest) > 2 and rest[2]):
        return None
    return Step(
        Sum(),
        lambda chunk: chunk.call(node, node.target, [chunk.value(gradient), part(chunk, index, state, states), *rest]),
    )


def _norm(node: fx.Node, states: States, count: int) -> Step | None:
    """A norm over trailing dimensions: its result, and statistics for each row."""
    x, sizes, *rest = node.args
    state = rows_of(x, states)
    if state is None or state.padded or any(item in states for item in _nodes(rest)):
        return None
    if state.end > len(shape_of(x)) - len(sizes):  # type: ignore[arg-type]
        return None
    known = state.place
    count_of_results = 3 if node.target is _aten.native_layer_norm.default else 2
    return Step(
        Parts((known,) * count_of_results),
        lambda chunk: chunk.call(node, node.target, [chunk.value(x), sizes, *rest]),
    )


def _norm_backward(node: fx.Node, states: States, count: int) -> Step | None:
    gradient, x, sizes, *rest = node.args
    statistics = 2 if node.target is _aten.native_layer_norm_backward.default else 1
    of_rows, others = rest[:statistics], rest[statistics:]
    state = rows_of(x, states) or rows_of(gradient, states)
    if state is None or state.padded or any(item in states for item in _nodes(others)):
        return None
    if not all(alongside(item, state, count, states) for item in (gradient, x, *of_rows)):
        return None
    known = state.place

    def emit(chunk: Chunk) -> fx.Node:
        given = [part(chunk, item, state, states) for item in (gradient, x)]
        kept = [part(chunk, item, state, states) for item in of_rows]
        return chunk.call(node, node.target, [*given, sizes, *kept, *others])

    return Step(Parts((known, *(Sum() for _ in range(statistics)))), emit)


# --- attention, convolutions, normalisation of images ----------------------------------------------------------------


def _attention(node: fx.Node, states: States, count: int) -> Step | None:
    """Attention without whole scores, and its backward; without dropout, which would draw for each chunk."""
    backward = node.target is _ATTENTION_BACKWARD
    tensors = node.args[: 6 if backward else 3]
    dropout = node.args[6:7] if backward else node.args[3:4]
    if (dropout and dropout[0] != 0) or not _are_samples(tensors, count, states):
        return None
    mask = node.kwargs.get("attn_mask")
    own = isinstance(mask, fx.Node) and (mask in states or shape_of(mask)[0] == count > 1)
    if own and not alongside(mask, Rows(1), count, states):
        return None

    def emit(chunk: Chunk) -> fx.Node:
        parts = [part(chunk, item, Rows(1), states) for item in tensors]
        options = dict(node.kwargs) | ({"attn_mask": part(chunk, mask, Rows(1), states)} if own else {})
        return chunk.call(node, node.target, [*parts, *node.args[len(tensors) :]], options)

    return Step(Parts((Rows(1),) * (3 if backward else 2)), emit)


def _batch_norm_backward(node: fx.Node, states: States, count: int) -> Step | None:
    """Of batch norm by statistics that are there already."""
    if node.args[7] is not False:
        return None
    return _layer((0, 1, 5, 6), (Rows, Sum, Sum))(node, states, count)


def _upsampled_backward(node: fx.Node, states: States, count: int) -> Step | None:
    """The gradient of an upsampled image, whose sizes are an argument."""
    gradient, output, sizes, *rest = node.args
    if not _are_samples([gradient], count, states):
        return None
    return Step(
        Rows(1),
        lambda chunk: chunk.call(
            node,
            node.target,
            [chunk.value(gradient), output, [chunk.count, *sizes[1:]], *rest],  # type: ignore[index, misc]
        ),
    )


_ATTENTION = _aten._scaled_dot_product_flash_attention_for_cpu.default
_ATTENTION_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default

LAYER_RULES: dict[Any, Rule] = {
    _aten.embedding.default: _embedding,
    _aten.embedding_dense_backward.default: _embedding_backward,
    _aten.native_layer_norm.default: _norm,
    _aten.native_layer_norm_backward.default: _norm_backward,
    _aten._fused_rms_norm.default: _norm,
    _aten._fused_rms_norm_backward.default: _norm_backward,
    _aten.native_group_norm.default: _layer((0,), (Rows, Rows, Rows), counted=3),
    _aten.native_group_norm_backward.default: _layer((0, 1, 2, 3), (Rows, Sum, Sum), counted=5),
    _aten._native_batch_norm_legit_no_training.default: _layer((0,), (Rows, Rows, Rows)),
    _aten.native_batch_norm_backward.default: _batch_norm_backward,
    _aten.convolution.default: _layer((0,)),
    _aten.convolution_backward.default: _layer((0, 1), (Rows, Sum, Sum)),
    _aten.max_pool2d_with_indices.default: _layer((0,), (Rows, Rows)),
    _aten.max_pool2d_with_indices_backward.default: _layer((0, 1, 7)),
    _aten.avg_pool2d.default: _layer((0,)),
    _aten.avg_pool2d_backward.default: _layer((0, 1)),
    _aten._adaptive_avg_pool2d.default: _layer((0,)),
    _aten._adaptive_avg_pool2d_backward.default: _layer((0, 1)),
    _aten.upsample_nearest2d.vec: _layer((0,)),
    _aten.upsample_bilinear2d.vec: _layer((0,)),
    _aten.upsample_nearest2d.default: _layer((0,)),
    _aten.upsample_bilinear2d.default: _layer((0,)),
    _aten.upsample_nearest2d_backward.default: _upsampled_backward,
    _aten.upsample_bilinear2d_backward.default: _upsampled_backward,
    _ATTENTION: _attention,
    _ATTENTION_BACKWARD: _attention,
}
"""By op; see ``row_rules``."""

READ_BY_NAME = frozenset({_ATTENTION, _ATTENTION_BACKWARD})
"""Ops whose keyword arguments may have rows."""
