"""Arguments that are one tensor, given in several places: read in the first of them alone.

Autograd then meets one leaf, and adds up its gradient in eager mode's order; sums by place, added behind the program,
would be another order, and so other bits. The signature of a call says which of its arguments are one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphopt.ir.gradients import base_of
from graphopt.ir.node import value_of
from graphopt.ir.program import Program
from graphopt.ir.region_effects import mutated_inputs

__all__ = ["read_in_one_place"]


def read_in_one_place(program: Program, given: Sequence[torch.Tensor]) -> None:
    """Let a forward program read a tensor with a gradient in the first place in which it was given.

    What the program writes to keeps its places.

    Args:
        program: is changed.
        given: the tensors of the call, in the order of the program's inputs.
    """
    nodes = [node for node, _ in program.inputs_of("input")]
    written = {base_of(node) for call in program.graph.nodes for node in mutated_inputs(call, program.attributes)}
    first: dict[int, int] = {}
    for place, tensor in enumerate(given):
        earlier = first.setdefault(id(tensor), place)
        node, other = nodes[place], nodes[earlier]
        if earlier != place and tensor.requires_grad and written.isdisjoint((node, other)) and _alike(node, other):
            node.replace_all_uses_with(other)


def _alike(node: torch.fx.Node, other: torch.fx.Node) -> bool:
    """Whether two values have the same sizes, those that vary included."""
    return [*map(str, value_of(node).shape)] == [*map(str, value_of(other).shape)]
