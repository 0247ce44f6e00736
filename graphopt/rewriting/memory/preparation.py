"""What is done to a program before it is planned: what lowers its peak and runs nothing again."""

from __future__ import annotations

from graphopt.ir.program import Program
from graphopt.rewriting.memory.backward_order import freeing_first
from graphopt.rewriting.memory.loss_in_place import loss_gradients_in_place

__all__ = ["prepared"]


def prepared(program: Program, origin: str) -> tuple[Program, tuple[str, ...]]:
    """A program with gradients of losses in place, and calls of backward in an order in which they free more sooner.

    Args:
        program: is only read.
        origin: who does it, for people.

    Returns:
        a copy in that form, with what a user should read; the program itself and nothing, where nothing helps.
    """
    lines: list[str] = []
    for act in (lambda given: loss_gradients_in_place(given, origin), freeing_first):
        found = act(program)
        if found is not None:
            program = found[0]
            lines.append(found[1])
    return program, tuple(lines)
