"""What a page tells: a program after capture, after each lowering and after each pass, and which two it compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphopt.errors import GraphoptError
from graphopt.ir.program import Program
from graphopt.rewriting.pass_ import PassRecord
from graphopt.runtime.stored.capture_content import READ

__all__ = [
    "ALL_PASSES",
    "STAGE_NAMES",
    "WITHOUT_PASSES",
    "MeasuredPeaks",
    "Snapshot",
    "Story",
    "story_of_program",
    "story_of_snapshots",
]

STAGE_NAMES = {"forward": "forward graph", "joint": "forward + backward graph", "step": "training-step graph"}
"""What a page calls a program of each stage."""

WITHOUT_PASSES = "without passes"
"""The label of a snapshot that is made for the page: the last stage's program without any pass."""

ALL_PASSES = "all passes"
"""The label of the comparison of the program without passes and the last one, where several steps lie between them."""


@dataclass(frozen=True, slots=True)
class MeasuredPeaks:
    """What running the two programs took above persistent memory, in bytes (``measure_peak``); None if not measured."""

    before: int | None = None
    after: int | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One state of the program, and what the pass did that it came of (None after a capture or a lowering)."""

    label: str
    program: Program
    record: PassRecord | None = None


@dataclass(frozen=True, slots=True)
class Story:
    """Everything that a page is made of.

    Attributes:
        snapshots: in the order in which they were made; those of one stage stand together.
        before: the index of the program without passes, of the last stage.
        after: the index of the last program.
        pipeline: the passes as text, ready to be given again.
        command: the command line that makes the page again, where there is one.
        measured: what running the two programs took.
    """

    snapshots: tuple[Snapshot, ...]
    before: int
    after: int
    pipeline: str
    command: str = ""
    measured: MeasuredPeaks = MeasuredPeaks()

    @property
    def records(self) -> list[PassRecord]:
        """What each pass did."""
        return [snapshot.record for snapshot in self.snapshots if snapshot.record is not None]

    @property
    def compares_all(self) -> bool:
        """Whether the first and the last program of the last stage are more than one step apart."""
        return self.after - self.before > 1

    def previous(self, index: int) -> int | None:
        """The snapshot that one is compared with: the one before it, if that is of the same stage."""
        same = index and self.snapshots[index - 1].program.stage == self.snapshots[index].program.stage
        return index - 1 if same else None


def story_of_program(program: Program) -> Story:
    """The story of one program, of which nothing is known but what it is."""
    label = "after passes" if program.history else "captured"
    return Story((Snapshot(label, program),), 0, 0, ",".join(program.history))


def story_of_snapshots(
    snapshots: Sequence[tuple[str, Program]],
    records: Sequence[PassRecord],
    *,
    pipeline: str | None = None,
    command: str = "",
    measured: MeasuredPeaks | None = None,
) -> Story:
    """The story of a capture and its passes.

    Where all passes rewrote earlier stages than the last, the program as captured is lowered to the last stage once
    more, to have what the last one can be compared with.

    Args:
        snapshots: ``(label, program)`` after capture, after each lowering and after each pass.
        records: what each pass did, in order.
        pipeline: the passes as text; those that ran, by default.
        command: the command line that makes the page again.
        measured: what running the programs took.

    Raises:
        GraphoptError: where there is no snapshot, or where there are more or fewer records than passes among them.
    """
    told = _labelled(snapshots, records)
    last = told[-1].program.stage
    start = next(index for index, snapshot in enumerate(told) if snapshot.program.stage == last)
    if any(snapshot.record for snapshot in told[:start]) and (plain := _without_passes(told)) is not None:
        told.insert(start, Snapshot(WITHOUT_PASSES, plain))
    spec = ",".join(told[-1].program.history) if pipeline is None else pipeline
    return Story(tuple(told), start, len(told) - 1, spec, command, measured or MeasuredPeaks())


def _labelled(snapshots: Sequence[tuple[str, Program]], records: Sequence[PassRecord]) -> list[Snapshot]:
    if snapshots and all(label.endswith(READ) for label, _ in snapshots):
        return _of_read(snapshots, records)
    passes = sum(not _is_captured(label) for label, _ in snapshots)
    if not snapshots or passes != len(records):
        raise GraphoptError(
            f"{len(snapshots)} snapshots, {passes} of them made by passes, and {len(records)} records of passes: give "
            "all the snapshots and records of one capture"
        )
    left = iter(records)
    told: list[Snapshot] = []
    for label, program in snapshots:
        if _is_captured(label):
            told.append(Snapshot("lowered" if told else "captured", program))
        else:
            told.append(Snapshot(label, program, next(left)))
    return told


def _of_read(snapshots: Sequence[tuple[str, Program]], records: Sequence[PassRecord]) -> list[Snapshot]:
    """The programs of a capture that was read, one for each stage: what its passes did stands beside that program."""
    told: list[Snapshot] = []
    kept = {program.stage for _, program in snapshots}
    for index, (label, program) in enumerate(snapshots):
        passes = [
            record
            for record in records
            if record.stage == program.stage or (index == 0 and record.stage not in kept)  # a stage that is not kept
        ]
        told += [Snapshot(f"{record.spec}, {label}", program, record) for record in passes]
        told += [] if passes else [Snapshot(label, program)]
    return told


def _is_captured(label: str) -> bool:
    return label.startswith("captured ")


def _without_passes(told: Sequence[Snapshot]) -> Program | None:
    """The program of the last stage as it is without any pass; None where it cannot be lowered any more."""
    last = told[-1].program.stage
    first = next(snapshot.program.stage for snapshot in told if snapshot.record is not None)
    program = next(snapshot.program for snapshot in told if snapshot.program.stage == first)
    while program.stage != last:
        if program.lower is None:
            return None
        program = program.lower(program)
    return program
