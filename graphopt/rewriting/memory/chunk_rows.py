"""Computing the calls around a large matrix a few rows at a time, forward and backward, so that it is never whole.

Calls of forward and of backward run together for each chunk of rows: the gradients of the loss that backward begins
with have to be there first, and are, where the loss is reduced to a number behind the chunks. The idea is that of fused
losses for large vocabularies (Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training", 2024, arXiv
2410.10989); here it is a rewrite of the calls that a program has.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from graphopt.ir.node import Phase, info, set_info, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.values import tensors_of
from graphopt.ir.program import Program
from graphopt.rewriting.memory.row_rules import MADE_OF_ONE_NUMBER, step_of
from graphopt.rewriting.memory.token_rows import Choice, Rows, Step, Sum, Whole

__all__ = ["RowRegion", "chunked", "row_region"]

_aten = torch.ops.aten
_PROJECTIONS = (_aten.mm.default, _aten.addmm.default)


@dataclass
class RowRegion:
    """The calls around a matrix that work on its rows, and what of them is read elsewhere.

    Attributes:
        projection: the product that makes the matrix.
        steps: the calls in order, the product first, and how each is made for some rows.
        outputs: those that are read elsewhere.
        rows: how many rows are computed.
        choice: the slice that leaves out the others; None for none.
        matrix_bytes: of the matrix.
        width: features of a row that the product reads.
    """

    projection: fx.Node
    steps: dict[fx.Node, Step] = field(default_factory=dict)
    outputs: list[fx.Node] = field(default_factory=list)
    rows: int = 0
    choice: Choice | None = None
    matrix_bytes: int = 0
    width: int = 0


def row_region(program: Program, projection: fx.Node) -> RowRegion | str:
    """The calls that can be computed by rows of the matrix that a product makes, or why they cannot.

    Args:
        program: of stage joint, with a loss.
        projection: ``mm`` or ``addmm`` of forward, whose result has a row for each row of its input.
    """
    if projection.target not in _PROJECTIONS:
        return f"{projection.name} is no matrix product"
    matrix = value_of(projection)
    region = RowRegion(projection, rows=matrix.shape[0], matrix_bytes=matrix.numel() * matrix.element_size())
    region.width = value_of(projection.args[-1]).shape[0]  # type: ignore[arg-type]
    region.steps[projection] = Step(Rows(1), _projected(projection))
    states: dict[fx.Node, Any] = {projection: Rows(1)}
    for node in _behind(program, projection):
        reads = any(isinstance(states.get(source), Rows) for source in node.all_input_nodes)
        if not reads and not _is_large_number(node, matrix.numel()):
            continue
        step = step_of(node, states, region.rows)
        if step is not None:
            states[node], region.steps[node] = step.state, step
    _keep_what_is_large(region, matrix.numel() // 4)
    return _obstacle(program, region) or region


def _projected(projection: fx.Node) -> Callable[[Any], fx.Node]:
    place = 1 if projection.target is _aten.addmm.default else 0

    def emit(chunk: Any) -> fx.Node:
        given = list(projection.args)
        given[place] = chunk.rows(given[place], 1)
        return chunk.call(projection, projection.target, given)  # type: ignore[no-any-return]

    return emit


def _behind(program: Program, first: fx.Node) -> list[fx.Node]:
    order = program.nodes
    return [node for node in order[order.index(first) + 1 :] if node.op == "call_function"]


def _is_large_number(node: fx.Node, size: int) -> bool:
    """Whether a call makes a tensor of one number that is as large as the matrix."""
    return node.target in MADE_OF_ONE_NUMBER and value_of(node).numel() * 4 >= size


def _keep_what_is_large(region: RowRegion, large: int) -> None:
    """Leave out calls behind the last ones that make or read large values."""

    def is_large(node: fx.Node) -> bool:
        return any(tensor.numel() >= large for tensor in tensors_of(value_of(node)))

    known = region.steps
    needed: set[fx.Node] = set()
    for node in reversed(list(known)):
        reads = any(source in known and is_large(source) for source in node.all_input_nodes)
        reads = reads or node.target is operator.getitem
        if reads or (is_large(node) and isinstance(known[node].state, Rows)) or any(u in needed for u in node.users):
            needed.add(node)
    region.steps = {node: step for node, step in known.items() if node in needed}


def _obstacle(program: Program, region: RowRegion) -> str:
    """Why a region cannot be computed in chunks; empty where it can. Completes the region."""
    inside = region.steps
    choices = {step.state.chosen for step in inside.values() if isinstance(step.state, Rows)} - {None}
    if len(choices) > 1:
        return "rows are left out in two ways"
    region.choice = next(iter(choices), None)
    if region.choice is not None:
        if math.prod(region.choice.shape) != region.rows:
            return "rows are left out behind others"
        region.rows = math.prod(region.choice.shape_after)
    for node, step in inside.items():
        if not any(user not in inside for user in node.users):
            continue
        if (
            isinstance(step.state, Rows)
            and value_of(node).numel() * 4 > region.matrix_bytes // value_of(node).element_size()
        ):
            reader = next(user for user in node.users if user not in inside)
            name = next(iter(info(node).names), node.name)
            return (
                f"{name} is read as a whole by {reader.name} ({reader.target}), {info(reader).source or 'in backward'}"
            )
        if region.choice is not None and _needs_all(node, step, inside):
            return f"{node.name} is read with the rows that are left out"
        region.outputs.append(node)
    return _circle(region, program)


def _needs_all(node: fx.Node, step: Step, inside: Mapping[fx.Node, Step]) -> bool:
    """Whether a result in front of the slice that leaves out rows is needed with all of them."""
    if isinstance(step.state, Rows):
        return step.state.chosen is None
    sources = [inside[source].state for source in node.all_input_nodes if source in inside]
    return isinstance(step.state, Sum) and any(isinstance(s, Rows) and s.chosen is None for s in sources)


def _circle(region: RowRegion, program: Program) -> str:
    """What the region reads from outside that depends on it."""
    inside = region.steps
    dependent: set[fx.Node] = set()
    for node in _behind(program, region.projection):
        if any(source in dependent or source in inside for source in node.all_input_nodes) and node not in inside:
            dependent.add(node)
    for node in inside:
        for source in node.all_input_nodes:
            if source in dependent:
                name = next(iter(info(source).names), source.name)
                where = info(source).source or source.name
                return f"backward begins with {name}, which depends on the loss itself ({where})"
    if not any(info(node).phase is not Phase.FORWARD for node in inside):
        return "backward is not part of this program"
    return ""


# --- writing the chunks ----------------------------------------------------------------------------------------------


def chunked(program: Program, region: RowRegion, chunks: int, origin: str) -> None:
    """Compute a region in so many chunks of rows, in place of all at once.

    Args:
        program: which the region is of; changed in place.
        region: of ``row_region``.
        chunks: 2 at least, and at most as many as there are rows.
        origin: who does it, for people.
    """
    place = _place(program, region)
    once = _Once(program, region, place, origin)
    size = -(-region.rows // chunks)
    results: dict[fx.Node, list[fx.Node]] = {node: [] for node in region.outputs}
    sums: dict[fx.Node, fx.Node] = {}
    for start in range(0, region.rows, size):
        chunk = _Chunk(once, start, min(start + size, region.rows))
        for node, step in region.steps.items():
            if isinstance(step.state, Sum):
                sums[node] = _added(chunk, node, step, sums.get(node))
                continue
            chunk.values[node] = made = step.emit(chunk)
            if node in results and isinstance(step.state, Rows):
                results[node].append(made)
    for node in region.outputs:
        _replace(node, _joined(once, node, region, results[node], sums))
    for node in reversed(list(region.steps)):
        program.graph.erase_node(node)
    program.erase_dead()


def _added(chunk: _Chunk, node: fx.Node, step: Step, total: fx.Node | None) -> fx.Node:
    """What chunks up to this one give, added up."""
    if total is None:
        made: fx.Node = step.emit(chunk)
        return made
    if step.add is not None:
        return step.add(chunk, total)
    return chunk.call(node, _aten.add.Tensor, [total, step.emit(chunk)])


def _joined(
    once: _Once, node: fx.Node, region: RowRegion, parts: list[fx.Node], sums: Mapping[fx.Node, fx.Node]
) -> fx.Node:
    """The result of a call out of those of its chunks."""
    state = region.steps[node].state
    if isinstance(state, Whole):
        return once.once(("whole", node), state.make)
    if isinstance(state, Sum):
        total = sums[node]
        if state.finish is not None:
            total = state.finish(once, total)
        return total if state.divisor == 1 else once.call(node, _aten.div.Scalar, [total, state.divisor])
    whole = once.call(node, _aten.cat.default, [parts, -1 if state.last else 0])
    return whole if state.last else _spread(once, node, state, whole)


def _spread(once: _Once, node: fx.Node, state: Rows, rows: fx.Node) -> fx.Node:
    """Rows in their places, with zeros for those that were left out where the value had them."""
    shape = list(value_of(node).shape)
    rest = shape[state.lead :]
    choice = state.chosen
    if choice is not None and state.padded:
        apart = once.call(node, _aten.view.default, [rows, [*choice.shape_after, *rest]])
        sizes = [*choice.shape, *rest]
        rows = once.call(node, _aten.slice_backward.default, [apart, sizes, choice.dim, choice.start, choice.end, 1])
    return rows if list(value_of(rows).shape) == shape else once.call(node, _aten.view.default, [rows, shape])


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
    outside = [s for node in region.steps for s in node.all_input_nodes if s not in region.steps]
    last = max(at[source] for source in outside)
    place = max(last, at[region.projection]) + 1
    while order[place] in region.steps:
        place += 1
    marker = order[place]
    dependent: set[fx.Node] = set(region.steps)
    for node in order[at[region.projection] + 1 : place]:
        if node not in region.steps and any(source in dependent for source in node.all_input_nodes):
            dependent.add(node)
            marker.prepend(node)
            set_info(node, replace(info(node), phase=Phase.BACKWARD))
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

    def call(self, like: fx.Node, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> fx.Node:
        """Insert a call; see ``Chunk``."""
        name = schema.op_name(like) if isinstance(like.target, torch._ops.OpOverload) else like.name
        return self.program.insert(
            target,
            args,
            dict(kwargs or {}),
            before=self._place,
            phase=Phase.BACKWARD,
            origin=f"{self._origin}: {info(like).module or name}",
            like=like,
            hint=f"{like.name}_chunk",
        )

    def once(self, key: Any, make: Callable[[Any], fx.Node]) -> fx.Node:
        """See ``Chunk``."""
        if key not in self._known:
            self._known[key] = make(self)
        return self._known[key]

    def all_rows(self, node: fx.Node, lead: int) -> fx.Node:
        """A value from outside with its rows in the first dimension, without those that are left out."""
        return self.once(("rows", node, lead), lambda _: self._all_rows(node, lead))

    def _all_rows(self, node: fx.Node, lead: int) -> fx.Node:
        shape = list(value_of(node).shape)
        rest = shape[lead:]
        choice = self.region.choice
        if choice is not None and math.prod(shape[:lead]) == math.prod(choice.shape):
            node = self._as(node, [*choice.shape, *rest])
            node = self.call(node, _aten.slice.Tensor, [node, choice.dim, choice.start, choice.end])
        return self._as(node, [self.region.rows, *rest])

    def _as(self, node: fx.Node, shape: list[int]) -> fx.Node:
        """A value in another shape: a view, or a copy where there is none."""
        value = value_of(node)
        if list(value.shape) == shape:
            return node
        try:
            with self.program.fake_mode:
                value.view(shape)
        except (RuntimeError, ValueError):
            node = self.call(node, _aten.clone.default, [node], {"memory_format": torch.contiguous_format})
        return self.call(node, _aten.view.default, [node, shape])


class _Chunk:
    """The rows from ``start`` on up to ``end``; see ``token_rows.Chunk``."""

    def __init__(self, once: _Once, start: int, end: int) -> None:
        self._once = once
        self._start, self._end = start, end
        self.values: dict[fx.Node, Any] = {}
        self._rows: dict[tuple[fx.Node, int], fx.Node] = {}

    @property
    def count(self) -> int:
        """See ``Chunk``."""
        return self._end - self._start

    def value(self, node: Any) -> Any:
        """See ``Chunk``."""
        if isinstance(node, (list, tuple)):
            return type(node)(self.value(item) for item in node)
        return self.values.get(node, node) if isinstance(node, fx.Node) else node

    def rows(self, node: fx.Node, lead: int) -> fx.Node:
        """See ``Chunk``."""
        key = (node, lead)
        if key not in self._rows:
            whole = self._once.all_rows(node, lead)
            self._rows[key] = self.call(whole, _aten.slice.Tensor, [whole, 0, self._start, self._end])
        return self._rows[key]

    def call(self, like: fx.Node, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> fx.Node:
        """See ``Chunk``."""
        return self._once.call(like, target, args, kwargs)

    def once(self, key: Any, make: Callable[[Any], fx.Node]) -> fx.Node:
        """See ``Chunk``."""
        return self._once.once(key, make)
