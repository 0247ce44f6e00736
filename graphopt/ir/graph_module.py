"""From a program to the GraphModule that runs it."""

from __future__ import annotations

from torch import fx

from graphopt import _torch
from graphopt.errors import GraphoptError
from graphopt.ir.program import Program
from graphopt.ir.reuse import apply_reuse

__all__ = ["to_graph_module"]


def to_graph_module(program: Program) -> fx.GraphModule:
    """A GraphModule with the boxed calling convention: ``module.forward(list_of_inputs)`` empties the list.

    Calls are taken in place where an operand dies in them, as the memory model assumes (``graphopt.ir.reuse``).

    Raises:
        GraphoptError: for a program that was captured without data.
    """
    device = program.context.device
    if device is not None:
        raise GraphoptError(
            f"{program.title or 'this program'} was captured without data for {device.name}: it is planned, printed, "
            "drawn and saved, and cannot run\n  what to do: on that device, capture it again without device="
        )
    copy = program.copy()
    apply_reuse(copy)
    copy.graph.set_codegen(_torch.BoxedCodeGen())
    return fx.GraphModule(dict(program.attributes), copy.graph, class_name=f"Graphopt{program.stage.title()}")
