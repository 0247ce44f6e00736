"""Ranks that agree on what they exchange before they exchange anything."""

from __future__ import annotations

from graphopt.ir.node import info
from graphopt.ir.ops import schema
from graphopt.ir.ops.groups import find_group
from graphopt.ir.ops.values import type_text
from graphopt.ir.program import Program

__all__ = ["Agreement", "collective_plan"]


def collective_plan(program: Program) -> dict[str, list[str]]:
    """The exchanges of a program in order, for each process group by name: op, shape and dtype, and whose they are."""
    found: dict[str, list[str]] = {}
    for node in program.graph.nodes:
        if schema.is_collective(node) and node.args and not schema.hands_on(node):
            groups = [value for value in (*node.args, *node.kwargs.values()) if isinstance(value, str)]
            step = f"{schema.op_name(node).rstrip('_')} to {type_text(node.meta['val'])} ({info(node).origin})"
            found.setdefault(groups[-1] if groups else "", []).append(step)
    return found


class Agreement:
    """Compares the exchanges of programs across ranks, before the first run of each.

    A program that exchanges the same as one before (another size of batch, say) is not compared again, so that one rank
    may capture it alone.
    """

    def __init__(self) -> None:
        self._seen: list[dict[str, list[str]]] = []

    def check(self, program: Program) -> None:
        """Compare; a collective call for programs with exchanges that are new.

        Raises:
            GraphoptError: naming the first rank, and the first exchange, that differ.
        """
        plan = collective_plan(program)
        if plan in self._seen or not plan:
            return
        for name, steps in plan.items():
            find_group(name).agree(steps, f"the exchanges of {program.title or 'the program'}")
        self._seen.append(plan)
