"""How recurrent layers are made for some samples.

These are in the second dimension of a sequence, whatever ``batch_first`` says: torch transposes in front of the call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from graphopt.ir.node import value_of
from graphopt.ir.ops.lstm import lstm_layer, lstm_layer_backward, workspace_of
from graphopt.rewriting.memory.token_rows import Chunk, Parts, Rows, States, Step, Sum, alongside, part, rows_of

__all__ = ["RECURRENT_RULES"]

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
