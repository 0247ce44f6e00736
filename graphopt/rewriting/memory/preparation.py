"""What is done to a program before it is planned: what lowers its peak and runs nothing again."""

from __future__ import annotations

from dataclasses import dataclass

from graphopt.ir.program import Program
from graphopt.rewriting.memory.backward_order import freeing_first
from graphopt.rewriting.memory.loss_in_place import loss_gradients_in_place

__all__ = ["Prepared", "prepared"]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A program that is ready to be planned.

    Attributes:
        program: a copy; the given program itself, where nothing helps.
        lines: what was done, for people.
        reordered: whether calls of backward have another order.
    """

    program: Program
    lines: tuple[str, ...] = ()
    reordered: bool = False


def prepared(program: Program, origin: str, *, reorder: bool = True) -> Prepared:
    """A program with gradients of losses in place, and calls of backward in an order in which they free more sooner.

    Args:
        program: is only read.
        origin: who does it, for people.
        reorder: whether calls of backward may have another order: what runs again may need more in that.
    """
    lines: list[str] = []
    in_place = loss_gradients_in_place(program, origin)
    if in_place is not None:
        program = in_place[0]
        lines.append(in_place[1])
    ordered = freeing_first(program) if reorder else None
    if ordered is not None:
        program = ordered[0]
        lines.append(ordered[1])
    return Prepared(program, tuple(lines), ordered is not None)
