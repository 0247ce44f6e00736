"""Which calls around a large matrix can be computed a few rows at a time, so that it is never whole."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from graphopt.ir.node import Phase, info, value_of
from graphopt.ir.ops.values import tensors_of
from graphopt.ir.program import Program
from graphopt.rewriting.memory.chunk.product_rules import PRODUCTS, product_of_rows
from graphopt.rewriting.memory.chunk.row_rules import MADE_OF_ONE_NUMBER, step_of
from graphopt.rewriting.memory.chunk.token_rows import Choice, Parts, Rows, Step, Sum

__all__ = ["RowRegion", "is_large", "large_steps", "obstacle", "row_region", "sizes_that_vary"]


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
        again: those of the steps that another region makes too, so that their calls stay.
        sources: values from outside that rules take for values with rows.
        phase: in which chunks are computed.
        of_batch: whether chunks are slices of the batch, each with a forward and a backward of its own.
        whole: calls that stay as they are, since nobody knows where rows are in what they read.
    """

    projection: fx.Node
    steps: dict[fx.Node, Step] = field(default_factory=dict)
    outputs: list[fx.Node] = field(default_factory=list)
    rows: int = 0
    choice: Choice | None = None
    matrix_bytes: int = 0
    width: int = 0
    again: frozenset[fx.Node] = frozenset()
    sources: Mapping[fx.Node, Rows] = field(default_factory=dict)
    phase: Phase = Phase.BACKWARD
    of_batch: bool = False
    whole: Sequence[fx.Node] = ()

    @property
    def replaced(self) -> list[fx.Node]:
        """The calls in whose place chunks are."""
        return [node for node in self.steps if node not in self.again]


def sizes_that_vary(program: Program) -> str:
    """Why a program has no rows that could be counted: which of its sizes vary; empty where none does.

    Whoever asks whether a size that varies is equal to another fixes it, for all programs of the same capture.
    """
    if not program.symbols:
        return ""
    return (
        f"its sizes vary ({', '.join(program.symbols)}), and rows are divided once and for all: leave dynamic_shapes "
        "out, or give dynamic_shapes=None"
    )


def row_region(program: Program, projection: fx.Node) -> RowRegion | str:
    """The calls of forward and backward that can be computed together by rows of a matrix, or why they cannot.

    Args:
        program: of stage joint, with a loss.
        projection: ``mm`` or ``addmm`` of forward, whose result has a row for each row of its input.
    """
    if projection.target not in PRODUCTS or value_of(projection).dim() != 2:
        return f"{projection.name} is no matrix product"
    matrix = value_of(projection)
    region = RowRegion(projection, rows=matrix.shape[0], matrix_bytes=matrix.numel() * matrix.element_size())
    region.width = value_of(projection.args[-1]).shape[0]  # type: ignore[arg-type]
    region.steps[projection] = product_of_rows(projection, 0)
    states: dict[fx.Node, Any] = {projection: Rows(1)}
    for node in _behind(program, projection):
        reads = any(isinstance(states.get(source), (Rows, Parts)) for source in node.all_input_nodes)
        if not reads and not _is_large_number(node, matrix.numel()):
            continue
        step = step_of(node, states, region.rows)
        if step is not None:
            states[node], region.steps[node] = step.state, step
    region.steps = large_steps(region.steps, matrix.numel() // 4)
    return _loss_obstacle(program, region) or region


def _behind(program: Program, first: fx.Node) -> list[fx.Node]:
    order = program.nodes
    return [node for node in order[order.index(first) + 1 :] if node.op == "call_function"]


def _is_large_number(node: fx.Node, size: int) -> bool:
    """Whether a call makes a tensor of one number that is as large as the matrix."""
    return node.target in MADE_OF_ONE_NUMBER and value_of(node).numel() * 4 >= size


def is_large(node: fx.Node, large: int) -> bool:
    """Whether a call makes a tensor of so many elements at least."""
    return any(tensor.numel() >= large for tensor in tensors_of(value_of(node)))


def large_steps(steps: Mapping[fx.Node, Step], large: int) -> dict[fx.Node, Step]:
    """The steps that make or read tensors of so many elements, and those that they need."""
    needed: set[fx.Node] = set()
    for node in reversed(list(steps)):
        reads = any(source in steps and is_large(source, large) for source in node.all_input_nodes)
        reads = reads or node.target is operator.getitem
        makes = is_large(node, large) and isinstance(steps[node].state, Rows)
        if reads or makes or any(user in needed for user in node.users):
            needed.add(node)
    return {node: step for node, step in steps.items() if node in needed}


def _loss_obstacle(program: Program, region: RowRegion) -> str:
    """Why a region around a loss cannot be computed in chunks; empty where it can. Completes the region."""
    choices = {step.state.chosen for step in region.steps.values() if isinstance(step.state, Rows)} - {None}
    if len(choices) > 1:
        return "rows are left out in two ways"
    region.choice = next(iter(choices), None)
    if region.choice is not None:
        if math.prod(region.choice.shape) != region.rows:
            return "rows are left out behind others"
        region.rows = math.prod(region.choice.shape_after)
    found = obstacle(program, region, region.matrix_bytes // 4)
    if not found and not any(info(node).phase is not Phase.FORWARD for node in region.steps):
        return "backward is not part of this program"
    return found


def obstacle(program: Program, region: RowRegion, large: int, besides: Iterable[fx.Node] = ()) -> str:
    """Why calls cannot be computed in chunks; empty where they can. Completes the region's outputs.

    Args:
        program: which they are of.
        region: with its steps and rows.
        large: bytes above which no value may be read as a whole.
        besides: readers that read values of rows by rows too.
    """
    steps, others = region.steps, set(besides)
    for node in region.replaced:
        step = steps[node]
        readers = [u for u in node.users if u not in steps and not (u in others and isinstance(step.state, Rows))]
        if not readers:
            continue
        if (
            isinstance(step.state, Rows)
            and sum(t.numel() * t.element_size() for t in tensors_of(value_of(node))) > large
        ):
            reader, name = readers[0], next(iter(info(node).names), node.name)
            where = "as a result" if reader.op == "output" else info(reader).source or f"in {info(reader).phase.value}"
            return f"{name} is read as a whole by {reader.name} ({reader.target}), {where}"
        if region.choice is not None and _needs_all(node, step, steps):
            return f"{node.name} is read with the rows that are left out"
        region.outputs.append(node)
    return _circle(program, region)


def _needs_all(node: fx.Node, step: Step, inside: Mapping[fx.Node, Step]) -> bool:
    """Whether a result in front of the slice that leaves out rows is needed with all of them."""
    if isinstance(step.state, Rows):
        return step.state.chosen is None
    sources = [inside[source].state for source in node.all_input_nodes if source in inside]
    return isinstance(step.state, Sum) and any(isinstance(s, Rows) and s.chosen is None for s in sources)


def _circle(program: Program, region: RowRegion) -> str:
    """What the region reads from outside that depends on it."""
    inside: Sequence[fx.Node] = region.replaced
    made = set(inside)
    dependent: set[fx.Node] = set()
    for node in _behind(program, inside[0]):
        if node not in made and any(source in dependent or source in made for source in node.all_input_nodes):
            dependent.add(node)
    for node in region.steps:
        for source in node.all_input_nodes:
            if source in dependent:
                name = next(iter(info(source).names), source.name)
                where = info(source).source or source.name
                if info(source).phase is Phase.BACKWARD and info(inside[0]).phase is Phase.FORWARD:
                    return f"backward begins with {name}, which depends on the loss itself ({where})"
                return f"{node.name} reads {name}, which depends on other rows ({where})"
    return ""
