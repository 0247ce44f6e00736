"""How calls along other dimensions than those of rows are made for some rows, and sums over rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from graphopt.ir.ops.softmax import safe_softmax
from graphopt.rewriting.memory.token_rows import (
    Chunk,
    Rows,
    States,
    Step,
    Sum,
    rows_of,
    shape_of,
)

__all__ = ["INNER_RULES"]

_aten = torch.ops.aten


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
