"""Recomputation at a given number of checkpoints, spread evenly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from graphopt.errors import GraphoptError
from graphopt.ir.node import Candidate, Phase, info
from graphopt.ir.program import Program
from graphopt.rewriting.memory.recompute.checkpoint_segments import leaves_segments
from graphopt.rewriting.pass_ import Changed, Numerics, Pass, PassStage
from graphopt.rewriting.registry import find_pass

__all__ = ["RecomputeEvenly"]


@final
@dataclass(frozen=True)
class RecomputeEvenly(Pass):
    """``Recompute`` at ``number`` checkpoints, chosen so that the segments between them hold about the same bytes.

    The checkpoints are among the tensors that cut the network in two (``program.checkpoint_candidates()``). Where there
    are fewer of them, all are taken, and the record says so.

    Args:
        number: of checkpoints, at least 1.

    Raises:
        GraphoptError: for a number below 1.

    Example:
        >>> step = graphopt.optimize_step(model, optimizer, [RecomputeEvenly(2)], loss=loss).prepare(x)
        >>> step.records[0].changed.counts["recomputed"] > 0
        True
    """

    name: ClassVar[str] = "recompute-evenly"
    stage: ClassVar[PassStage] = "joint"
    numerics: ClassVar[Numerics] = "bitwise"
    after: ClassVar[tuple[str, ...]] = ("mixed-precision", "float8", "chunk-loss", "chunk")
    conflicts: ClassVar[tuple[str, ...]] = ("recompute",)

    number: int

    def __post_init__(self) -> None:
        if isinstance(self.number, bool) or self.number < 1:
            raise GraphoptError(f"number is a number of checkpoints of at least 1, got {self.number!r}")

    @leaves_segments
    def apply(self, program: Program) -> Changed:
        """See the class; rewrites a joint program."""
        if any(info(node).made_by == "recompute" for node in program.phase_nodes(Phase.RECOMPUTE)):
            return Changed(reason="the program has its checkpoints already")
        names = _evenly(program.checkpoint_candidates()[:-1], self.number)
        if not names:
            return Changed(reason="no tensor separates the network in two, so everything is kept")
        changed = find_pass("recompute")(names).apply(program)  # type: ignore[call-arg]
        if not changed or len(names) == self.number:
            return changed
        found = f"{len(names)} tensors separate" if len(names) > 1 else "1 tensor separates"
        line = f"{self.number} checkpoints were asked for, and {found} the network in two"
        return Changed(changed.counts, changed.bytes_saved, changed.tensors, (*changed.lines, line))


def _evenly(candidates: list[Candidate], number: int) -> tuple[str, ...]:
    """The names of as many candidates, with about the same bytes between each two of them."""
    number = min(number, len(candidates))
    share = sum(item.saves + item.bytes for item in candidates) / number if number else 0.0
    chosen: list[str] = []
    passed = 0.0
    for index, item in enumerate(candidates):
        passed += item.saves + item.bytes
        still = len(candidates) - index
        if len(chosen) < number and (passed >= share * (len(chosen) + 1) or still == number - len(chosen)):
            chosen.append(item.name)
    return tuple(chosen)
