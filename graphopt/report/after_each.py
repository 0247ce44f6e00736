"""The program after capture and after each pass for a terminal: whole, with what each pass changed in colours."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from graphopt.report.snapshots import heading, labelled
from graphopt.report.terminal import Span, line_style

if TYPE_CHECKING:
    from graphopt.runtime.rewrite import Rewritten

__all__ = ["after_each_lines"]


def after_each_lines(rewritten: Rewritten) -> Iterator[list[Span]]:
    """Every snapshot under its header, as ``snapshots_text`` has them, in lines made of pieces with rich styles.

    What was captured or lowered is printed as it is. What a pass made is printed whole against the program before it:
    new lines in green behind a ``+``, lines that are gone in red behind a ``-``, each where it stands or stood.

    Args:
        rewritten: what came of a capture and its passes.
    """
    before: list[str] = []
    for number, (_, record, program) in enumerate(labelled(rewritten), 1):
        for line in heading(number, len(rewritten.snapshots), program, record):
            yield [(f"# {line}", "bold" if line.startswith("====") else "dim")]
        text = program.to_text().removesuffix("\n").split("\n")
        if record is None:
            yield from ([(line, line_style(line))] for line in text)
        else:
            yield from _compared(before, text)
        yield [("", "")]
        before = text


def _compared(before: Sequence[str], after: Sequence[str]) -> Iterator[list[Span]]:
    """All lines of both texts, marked by the one that they are in."""
    matcher = difflib.SequenceMatcher(None, before, after)
    for _, start, end, new_start, new_end in matcher.get_opcodes():
        if before[start:end] == after[new_start:new_end]:
            yield from ([(f"  {line}", line_style(line))] for line in before[start:end])
            continue
        yield from ([(f"- {line}", "red")] for line in before[start:end])
        yield from ([(f"+ {line}", "green")] for line in after[new_start:new_end])
