"""What is done to a program before it is planned: what lowers its peak and runs nothing again.

Before that, what the model itself has run again is undone.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphopt.ir.program import Program
from graphopt.rewriting.memory.backward_order import freeing_first
from graphopt.rewriting.memory.checkpoint_segments import Segments, undo_recomputation
from graphopt.rewriting.memory.copied_stacks import stacks_as_copied
from graphopt.rewriting.memory.early_updates import EarlyUpdates, early_updates
from graphopt.rewriting.memory.loss_in_place import loss_gradients_in_place

__all__ = ["Prepared", "prepared"]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A program that is ready to be planned.

    Attributes:
        program: a copy; the given program itself, where nothing helps.
        changes: what was done to forward and backward, for people.
        early: the updates that were moved.
        reordered: whether calls of backward have another order.
        segments: the model's own, which are no longer there; None without any, or where they are as they were.
    """

    program: Program
    changes: tuple[str, ...] = ()
    early: EarlyUpdates | None = None
    reordered: bool = False
    segments: Segments | None = None

    @property
    def lines(self) -> tuple[str, ...]:
        """All that was done beside the segments, for people; empty where nothing was."""
        return (*self.changes, *(self.early.lines if self.early is not None else ()))


def prepared(program: Program, origin: str, *, reorder: bool = True, undo: bool = True) -> Prepared:
    """A program whose losses, stacks of gradients, order of backward and updates take fewer bytes at once.

    Where the model has segments of ``torch.utils.checkpoint``, they are undone first: forward keeps what they drop.

    Args:
        program: is only read.
        origin: who does it, for people.
        reorder: whether calls of backward may have another order: what runs again may need more in that.
        undo: whether the model's own segments are taken out.
    """
    changes: list[str] = []
    undone = undo_recomputation(program) if undo else None
    if undone is not None:
        program = undone[0]
    for rewrite in (loss_gradients_in_place, stacks_as_copied):
        rewritten = rewrite(program, origin)
        if rewritten is not None:
            program = rewritten[0]
            changes.append(rewritten[1])
    ordered = freeing_first(program) if reorder else None
    if ordered is not None:
        program = ordered[0]
        changes.append(ordered[1])
    moved = None if program.context.compiled else early_updates(program, program.memory(), origin)
    early = moved if isinstance(moved, EarlyUpdates) else None
    if early is not None:
        program = early.program
    return Prepared(program, tuple(changes), early, ordered is not None, None if undone is None else undone[1])
