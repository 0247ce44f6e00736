"""What is done to a program before it is planned: what lowers its peak and runs nothing again.

Before that, what the model itself has recomputed is undone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from graphopt.ir.program import Program
from graphopt.rewriting.memory.order.backward_order import freeing_first
from graphopt.rewriting.memory.order.copied_stacks import stacks_as_copied
from graphopt.rewriting.memory.order.early_updates import EarlyUpdates, early_updates, move_updates
from graphopt.rewriting.memory.order.loss_in_place import loss_gradients_in_place
from graphopt.rewriting.memory.recompute.checkpoint_segments import Segments, undo_recomputation

__all__ = ["Preparation", "Prepared", "prepared"]


@dataclass(frozen=True, slots=True)
class Preparation:
    """What is done to a program before it is planned, as data: other programs of the capture get the same.

    Attributes:
        undone: the model's own segments are taken out.
        in_place: gradients of losses replace log-probabilities.
        restacked: gradients are stacked in the order in which they are copied.
        reordered: calls of backward that free more than they make run first.
        late: where updates run as soon as their gradients are final, those that do not, by the names of their calls.
    """

    undone: bool = False
    in_place: bool = False
    restacked: bool = False
    reordered: bool = False
    late: frozenset[str] | None = None

    def done_to(self, program: Program, origin: str) -> Program | None:
        """A copy of a program that is prepared so; None where it cannot be.

        Args:
            program: is only read.
            origin: who does it, for people.
        """
        steps: list[tuple[bool, Callable[[Program], tuple[Program, object] | None]]] = [
            (self.undone, undo_recomputation),
            (self.in_place, lambda given: loss_gradients_in_place(given, origin, weigh=False)),
            (self.restacked, lambda given: stacks_as_copied(given, origin)),
            (self.reordered, lambda given: freeing_first(given, weigh=False)),
        ]
        given = program
        for wanted, rewrite in steps:
            rewritten = rewrite(given) if wanted else (given, None)
            if rewritten is None:
                return None
            given = rewritten[0]
        if given is program:
            given = program.copy()
        return given if self.late is None or move_updates(given, self.late, origin) else None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A program that is ready to be planned.

    Attributes:
        program: a copy; the given program itself, where nothing helps.
        changes: what was done to forward and backward, for people.
        early: the updates that were moved.
        segments: the model's own, which are no longer there; None without any, or where they are as they were.
        done: all of that as data.
    """

    program: Program
    changes: tuple[str, ...] = ()
    early: EarlyUpdates | None = None
    segments: Segments | None = None
    done: Preparation = Preparation()

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
        reorder: whether calls of backward may have another order: what is recomputed may need more in that.
        undo: whether the model's own segments are taken out.
    """
    undone = undo_recomputation(program) if undo else None
    if undone is not None:
        program = undone[0]
    in_place = loss_gradients_in_place(program, origin)
    if in_place is not None:
        program = in_place[0]
    restacked = stacks_as_copied(program, origin)
    if restacked is not None:
        program = restacked[0]
    ordered = freeing_first(program) if reorder else None
    if ordered is not None:
        program = ordered[0]
    moved = None if program.context.compiled else early_updates(program, program.memory(), origin)
    early = moved if isinstance(moved, EarlyUpdates) else None
    if early is not None:
        program = early.program
    done = Preparation(
        undone=undone is not None,
        in_place=in_place is not None,
        restacked=restacked is not None,
        reordered=ordered is not None,
        late=None if early is None else early.late,
    )
    changes = tuple(found[1] for found in (in_place, restacked, ordered) if found is not None)
    return Prepared(program, changes, early, None if undone is None else undone[1], done)
