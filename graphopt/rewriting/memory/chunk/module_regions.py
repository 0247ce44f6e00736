"""Which calls inside of a module can be computed a few rows at a time, in forward and again in backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphopt.ir.node import Phase, info, value_of
from graphopt.ir.ops import schema
from graphopt.ir.program import Program
from graphopt.rewriting.memory.chunk.product_rules import PRODUCTS, product_of_rows
from graphopt.rewriting.memory.chunk.row_regions import RowRegion, is_large, large_steps, obstacle, sizes_that_vary
from graphopt.rewriting.memory.chunk.row_rules import MADE_OF_ONE_NUMBER, step_of
from graphopt.rewriting.memory.chunk.token_rows import Rows, Step
from graphopt.rewriting.memory.chunk.view_rules import JOINS

__all__ = ["is_inside", "module_regions", "modules_of"]


def modules_of(program: Program) -> dict[str, None]:
    """The paths of the modules whose calls a program has, outer ones too, in program order."""
    return {path: None for node in program.phase_nodes(Phase.FORWARD) for path in _outwards(info(node).module)}


def _outwards(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path.rpartition(".")[0]


def is_inside(node: fx.Node, module: str) -> bool:
    """Whether a call belongs to a module or to one inside of it."""
    path = info(node).module
    return path == module or path.startswith(module + ".")


def module_regions(program: Program, module: str, axis: int) -> list[RowRegion] | str:
    """The calls around the largest product of a module, by rows: those of forward, and those of backward.

    What backward reads of forward's rows is among the calls of backward too, so that forward keeps nothing of it. The
    region of backward comes first, since it needs the calls of forward to be there when it is written.

    Args:
        program: of stage joint.
        module: a path of ``modules_of``.
        axis: the dimension of the product that numbers rows.

    Returns:
        One region or two, or why there is none.
    """
    varying = sizes_that_vary(program)
    if varying:
        return varying
    matrix = _largest_product(program, module)
    if matrix is None:
        rounded = any(
            schema.op_name(n) in _IN_8_BITS and is_inside(n, module) for n in program.phase_nodes(Phase.FORWARD)
        )
        return "its products are in 8 bits: let float8 skip it" if rounded else "there is no matrix product in it"
    value = value_of(matrix)
    if not 0 <= axis < value.dim():
        return f"its largest product is of shape {list(value.shape)}, which has no axis {axis}"
    return _Search(program, module, matrix, axis).regions()


_IN_8_BITS = ("float8_mm", "mx_mm")


def _largest_product(program: Program, module: str) -> fx.Node | None:
    products = [n for n in program.phase_nodes(Phase.FORWARD) if n.target in PRODUCTS and is_inside(n, module)]
    return max(products, key=lambda node: value_of(node).numel(), default=None)


@dataclass
class _Search:
    """The calls that have the rows of one product.

    Attributes:
        matrix: the product.
        axis: its dimension that numbers rows.
    """

    program: Program
    module: str
    matrix: fx.Node
    axis: int

    def __post_init__(self) -> None:
        value = value_of(self.matrix)
        self.shape = tuple(value.shape)
        self.rows = int(value.shape[self.axis])
        self.large = -(-value.numel() // 2)
        self.bytes = value.numel() * value.element_size()

    def regions(self) -> list[RowRegion] | str:
        """See ``module_regions``."""
        steps = large_steps(self._steps(), self.large)
        forward = {node: step for node, step in steps.items() if info(node).phase is Phase.FORWARD}
        backward = {node: step for node, step in steps.items() if node not in forward}
        again = _needed_again(forward, backward)
        found = [self._region(forward, frozenset(), Phase.FORWARD)]
        if backward:
            made = {node: step for node, step in steps.items() if node in again or node in backward}
            found.insert(0, self._region(made, again, Phase.BACKWARD))
        for region in reversed(found):
            problem = obstacle(self.program, region, self.bytes // 2 - 1, backward)
            if problem:
                return f"{problem}; rows along another axis, or a module around it, may do"
        return found

    def _region(self, steps: Mapping[fx.Node, Step], again: frozenset[fx.Node], phase: Phase) -> RowRegion:
        return RowRegion(self.matrix, dict(steps), rows=self.rows, matrix_bytes=self.bytes, again=again, phase=phase)

    def _steps(self) -> dict[fx.Node, Step]:
        states: dict[fx.Node, Any] = {}
        steps: dict[fx.Node, Step] = {}
        for node in self.program.phase_nodes(Phase.FORWARD, Phase.BACKWARD):
            step = self._step(node, states)
            if step is not None and not (isinstance(step.state, Rows) and step.state.chosen is not None):
                states[node], steps[node] = step.state, step
        return steps

    def _step(self, node: fx.Node, states: Mapping[fx.Node, Any]) -> Step | None:
        inside = is_inside(node, self.module)
        sources = [source for source in node.all_input_nodes if isinstance(states.get(source), Rows)]
        if node.target in JOINS and not any(is_large(source, self.large) for source in sources):
            return None
        if sources:
            return step_of(node, states, self.rows) if inside or self._adds_gradients(node) else None
        if not inside or not is_large(node, self.large):
            return None
        if node.target in PRODUCTS and self._is_alike(node):
            return product_of_rows(node, self.axis)
        starts = node.target in MADE_OF_ONE_NUMBER and info(node).phase is Phase.BACKWARD  # of a gradient
        return step_of(node, states, self.rows) if starts else None

    def _adds_gradients(self, node: fx.Node) -> bool:
        """Whether a call adds up gradients of one large value, which belongs to no module."""
        return not info(node).module and all(is_large(source, self.large) for source in node.all_input_nodes)

    def _is_alike(self, node: fx.Node) -> bool:
        """Whether a product numbers the same rows in the same dimension."""
        value = value_of(node)
        return (
            isinstance(value, torch.Tensor)
            and value.dim() == len(self.shape)
            and tuple(value.shape[: self.axis + 1]) == self.shape[: self.axis + 1]
        )


def _needed_again(forward: Mapping[fx.Node, Step], backward: Mapping[fx.Node, Step]) -> frozenset[fx.Node]:
    """The calls of forward whose rows backward reads, and those that these need."""
    waiting = [source for node in backward for source in node.all_input_nodes]
    found: set[fx.Node] = set()
    while waiting:
        node = waiting.pop()
        if node in forward and node not in found and isinstance(forward[node].state, Rows):
            found.add(node)
            waiting.extend(node.all_input_nodes)
    return frozenset(found)
