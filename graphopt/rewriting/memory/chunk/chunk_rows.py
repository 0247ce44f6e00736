"""Writing calls a few rows at a time in the place of all at once.

Where the gradients of a loss that backward begins with are there before the loss, calls of forward and of backward run
together for each chunk of rows. The idea is that of fused losses for large vocabularies (Hsu et al., "Liger Kernel:
Efficient Triton Kernels for LLM Training", 2024, arXiv 2410.10989); here it is a rewrite of a program's own calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from graphopt import _torch
from graphopt.ir.node import BatchSlice, Phase, info, set_info, value_of
from graphopt.ir.ops import schema
from graphopt.ir.program import Program
from graphopt.rewriting.memory.chunk.row_regions import RowRegion
from graphopt.rewriting.memory.chunk.token_rows import Parts, Rows, Step, Sum, Whole

__all__ = ["chunked"]

_aten = torch.ops.aten


def chunked(program: Program, region: RowRegion, chunks: int, origin: str) -> None:
    """Compute a region in so many chunks of rows, in place of all at once.

    Args:
        program: which the region is of; changed in place.
        region: of ``row_region`` or ``module_regions``.
        chunks: 2 at least, and at most as many as there are rows.
        origin: who does it, for people.
    """
    place = _place(program, region)
    once = _Once(program, region, place, origin)
    size = -(-region.rows // chunks)
    results: dict[fx.Node, list[fx.Node]] = {node: [] for node in region.outputs}
    sums: dict[fx.Node, fx.Node] = {}
    for number, start in enumerate(range(0, region.rows, size)):
        chunk = _Chunk(once, number, start, min(start + size, region.rows))
        for node, step in region.steps.items():
            if isinstance(step.state, Sum):
                sums[node] = _added(chunk, node, step, sums.get(node))
                continue
            chunk.values[node] = made = step.emit(chunk)
            if node in results and isinstance(step.state, Rows):
                results[node].append(made)
    for node in region.outputs:
        _replace(node, _joined(once, node, region, results[node], sums))
    for node in reversed(region.replaced):
        program.graph.erase_node(node)
    program.erase_dead()


def _added(chunk: _Chunk, node: fx.Node, step: Step, total: fx.Node | None) -> fx.Node:
    """What chunks up to this one give, added up."""
    if total is None:
        made: fx.Node = step.emit(chunk)
        return made
    added = step.add(chunk, total) if step.add is not None else None
    return added or chunk.call(node, _aten.add.Tensor, [total, step.emit(chunk)])


def _joined(
    once: _Once, node: fx.Node, region: RowRegion, parts: list[fx.Node], sums: Mapping[fx.Node, fx.Node]
) -> fx.Node:
    """The result of a call out of those of its chunks."""
    state = region.steps[node].state
    assert not isinstance(state, Parts)
    if isinstance(state, Whole):
        return once.once(("whole", node), state.make)
    if isinstance(state, Sum):
        total = sums[node]
        if state.finish is not None:
            total = state.finish(once, total)
        return total if state.divisor == 1 else once.call(node, _aten.div.Scalar, [total, state.divisor])
    if state.outer > 1:
        parts = [_unfolded(once, node, state, part) for part in parts]
    place = state.first + (state.outer > 1)
    whole = once.call(node, _aten.cat.default, [parts, place]) if len(parts) > 1 else parts[0]
    return _spread(once, node, state, whole)


def _unfolded(once: _Once, node: fx.Node, state: Rows, part: fx.Node) -> fx.Node:
    """A chunk whose rows come several times, with a dimension for how many times."""
    shape = list(value_of(part).shape)
    sizes = [*shape[: state.first], state.outer, shape[state.first] // state.outer, *shape[state.first + 1 :]]
    return once.viewed(node, part, sizes)


def _spread(once: _Once, node: fx.Node, state: Rows, rows: fx.Node) -> fx.Node:
    """Rows in their places, with zeros for those that were left out where the value had them."""
    shape = list(value_of(node).shape)
    before, _, rest = state.split(tuple(shape))
    choice = state.chosen
    if choice is not None and state.padded:
        apart = once.call(node, _aten.view.default, [rows, [*before, *choice.shape_after, *rest]])
        sizes, dim = [*before, *choice.shape, *rest], len(before) + choice.dim
        rows = once.call(node, _aten.slice_backward.default, [apart, sizes, dim, choice.start, choice.end, 1])
    return once.viewed(node, rows, shape)


def _replace(old: fx.Node, new: fx.Node) -> None:
    known = info(old)
    set_info(new, replace(info(new), names=(*info(new).names, *known.names), module=known.module))
    set_info(old, replace(known, names=()))
    old.replace_all_uses_with(new)


def _place(program: Program, region: RowRegion) -> fx.Node:
    """The call in front of which chunks are written: all that they read is there, and nothing has read their results.

    What stands between and reads their results moves behind.
    """
    order = program.nodes
    at = {node: place for place, node in enumerate(order)}
    replaced = region.replaced
    first = at[replaced[0]]
    outside = [s for node in region.steps for s in node.all_input_nodes if s not in region.steps]
    place = max(first, *(at[source] for source in outside)) + 1
    dependent: set[fx.Node] = set(replaced)
    while order[place] in dependent:
        place += 1
    marker = order[place]
    for node in order[first + 1 : place]:
        if node not in dependent and any(source in dependent for source in node.all_input_nodes):
            dependent.add(node)
            marker.prepend(node)
            set_info(node, replace(info(node), phase=region.phase))
    moved = [node for node in dependent if node not in region.steps]
    return min(moved, key=lambda node: at[node]) if moved else marker


class _Once:
    """Inserts what is there once for all chunks."""

    def __init__(self, program: Program, region: RowRegion, place: fx.Node, origin: str) -> None:
        self.program = program
        self.region = region
        self._place = place
        self._origin = origin
        self._known: dict[Any, fx.Node] = {}

    def call(
        self,
        like: fx.Node,
        target: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        number: int | None = None,
    ) -> fx.Node:
        """Insert a call, for one chunk where that has a number; see ``Chunk``."""
        name = schema.op_name(like) if isinstance(like.target, _torch.OpOverload) else like.name
        made = self.program.insert(
            target,
            args,
            dict(kwargs or {}),
            before=self._place,
            phase=self.region.phase,
            origin=f"{self._origin}: {info(like).module or name}",
            like=like,
            hint=f"{like.name}_chunk",
        )
        if self.region.of_batch and number is not None:
            known = info(like)
            part = BatchSlice(number, next(iter(known.names), like.name), known.phase)
            origin = known.origin if known.phase is Phase.RECOMPUTE else info(made).origin  # who asks for a second run
            set_info(made, replace(info(made), origin=origin, batch_slice=part))
        return made

    def once(self, key: Any, make: Callable[[Any], fx.Node]) -> fx.Node:
        """See ``Chunk``."""
        if key not in self._known:
            self._known[key] = make(self)
        return self._known[key]

    def all_rows(self, node: fx.Node, state: Rows) -> fx.Node:
        """A value from outside with its rows in one dimension, without those that are left out."""
        return self.once(("rows", node, state), lambda _: self._all_rows(node, state))

    def _all_rows(self, node: fx.Node, state: Rows) -> fx.Node:
        before, rows, rest = state.split(tuple(value_of(node).shape))
        choice = self.region.choice
        if choice is not None and state.is_plain and math.prod(rows) == math.prod(choice.shape):
            node = self.viewed(node, node, [*before, *choice.shape, *rest])
            place = len(before) + choice.dim
            node = self.call(node, _aten.slice.Tensor, [node, place, choice.start, choice.end])
        outer = [state.outer] if state.outer > 1 else []
        return self.viewed(node, node, [*before, *outer, self.region.rows * state.each, *rest])

    def viewed(self, like: fx.Node, node: fx.Node, shape: Sequence[int], number: int | None = None) -> fx.Node:
        """See ``Chunk``."""
        value = value_of(node)
        if list(value.shape) == list(shape):
            return node
        try:
            with self.program.fake_mode:
                value.view(shape)
        except (RuntimeError, ValueError):
            node = self.call(like, _aten.clone.default, [node], {"memory_format": torch.contiguous_format}, number)
        return self.call(like, _aten.view.default, [node, list(shape)], number=number)


class _Chunk:
    """The rows from ``start`` on up to ``end``; see ``token_rows.Chunk``."""

    def __init__(self, once: _Once, number: int, start: int, end: int) -> None:
        self._once = once
        self._number = number
        self._start, self._end = start, end
        self.values: dict[fx.Node, Any] = {}
        self._sources = once.region.sources
        self._rows: dict[tuple[fx.Node, Rows], fx.Node] = {}

    @property
    def count(self) -> int:
        """See ``Chunk``."""
        return self._end - self._start

    def value(self, node: Any) -> Any:
        """See ``Chunk``."""
        if isinstance(node, (list, tuple)):
            return type(node)(self.value(item) for item in node)
        if node in self._sources:
            return self.rows(node, self._sources[node])
        return self.values.get(node, node) if isinstance(node, fx.Node) else node

    def rows(self, node: fx.Node, state: Rows) -> fx.Node:
        """See ``Chunk``."""
        key = node, state.place
        if key not in self._rows:
            self._rows[key] = self._rows_of(self._once.all_rows(node, state.place), state)
        return self._rows[key]

    def _rows_of(self, whole: fx.Node, state: Rows) -> fx.Node:
        dim = state.first + (state.outer > 1)
        part = self.call(whole, _aten.slice.Tensor, [whole, dim, self._start * state.each, self._end * state.each])
        if state.outer == 1:
            return part
        shape = list(value_of(part).shape)
        return self.viewed(whole, part, [*shape[: state.first], state.size(self.count), *shape[dim + 1 :]])

    def viewed(self, like: fx.Node, node: fx.Node, shape: Sequence[int]) -> fx.Node:
        """See ``Chunk``."""
        return self._once.viewed(like, node, shape, self._number)

    def call(self, like: fx.Node, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> fx.Node:
        """See ``Chunk``."""
        return self._once.call(like, target, args, kwargs, self._number)

    def once(self, key: Any, make: Callable[[Any], fx.Node]) -> fx.Node:
        """See ``Chunk``."""
        return self._once.once(key, make)
