"""What passes did, and the program after capture, after each lowering and after each pass, as text and as data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from graphopt.ir.program import Program
from graphopt.rewriting.dump import record_json
from graphopt.rewriting.pass_ import PassRecord, record_lines
from graphopt.runtime.programs.rewrite import Rewritten

__all__ = ["heading", "labelled", "records_json", "snapshots_json", "snapshots_text"]


def records_json(records: Iterable[PassRecord]) -> list[dict[str, Any]]:
    """What each pass did, as plain data."""
    return [record_json(record) for record in records]


def snapshots_text(rewritten: Rewritten, render: Callable[[Program], str], comment: str) -> str:
    """Every snapshot under a header with its stage, the pass and what it changed, in the order in which they were made.

    Args:
        rewritten: what came of a capture and its passes.
        render: a program as text.
        comment: how header lines start, such as ``#``.
    """
    pieces = []
    for number, (_, record, program) in enumerate(labelled(rewritten), 1):
        lines = heading(number, len(rewritten.snapshots), program, record)
        pieces.append("\n".join([*(f"{comment} {line}" for line in lines), render(program)]))
    return "\n".join(pieces)


def heading(number: int, count: int, program: Program, record: PassRecord | None) -> list[str]:
    """The lines above a snapshot: which one it is, the stage, and what the pass did.

    Args:
        number: of the snapshot, from 1.
        count: of all snapshots.
        program: as it was kept.
        record: of the pass; None after a capture.
    """
    first, *more = record_lines(record) if record else ["captured"]
    return [f"==== {number}/{count} {program.stage} stage: {first}", *more]


def snapshots_json(rewritten: Rewritten) -> dict[str, Any]:
    """The same as plain data: a ``label``, what the pass did (``None`` after capture) and the program, for each."""
    return {
        "snapshots": [
            {"label": label, "pass": record_json(record) if record else None, "program": program.to_json()}
            for label, record, program in labelled(rewritten)
        ]
    }


def labelled(rewritten: Rewritten) -> Iterator[tuple[str, PassRecord | None, Program]]:
    """Each snapshot's label and program, and the record of the pass behind it; None after a capture."""
    records = iter(rewritten.records)
    for label, program in rewritten.snapshots:
        yield label, None if label.startswith("captured ") else next(records), program
