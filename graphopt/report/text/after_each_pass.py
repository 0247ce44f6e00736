"""The program after capture and after each pass for a terminal: whole, with what each pass changed in colours."""

from __future__ import annotations

import difflib
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence

from graphopt.report.console.terminal import Span, line_style
from graphopt.report.text.snapshots import heading, labelled
from graphopt.runtime.programs.rewrite import Rewritten

__all__ = ["after_each_lines", "marked_lines"]

_STYLES = {"+": "green", "-": "red", " ": ""}


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
    for mark, line in marked_lines(before, after):
        yield [(f"{mark} {line}", _STYLES[mark] or line_style(line))]


def marked_lines(before: Sequence[str], after: Sequence[str]) -> Iterator[tuple[str, str]]:
    """All lines of both texts in order, each with ``-`` (only before), ``+`` (only after) or a blank (in both).

    Lines that both texts have exactly once hold them together, as in Bram Cohen's patience diff; what is between two of
    them is compared on its own. Programs are long, and nearly all of their lines are unique.
    """
    start, new_start = 0, 0
    for place, new_place in [*_anchors(before, after), (len(before), len(after))]:
        yield from _between(before[start:place], after[new_start:new_place])
        if place < len(before):
            yield " ", before[place]
        start, new_start = place + 1, new_place + 1


def _between(before: Sequence[str], after: Sequence[str]) -> Iterator[tuple[str, str]]:
    if not before or not after:
        yield from (("-", line) for line in before)
        yield from (("+", line) for line in after)
        return
    for kind, start, end, new_start, new_end in difflib.SequenceMatcher(None, before, after).get_opcodes():
        if kind == "equal":
            yield from ((" ", line) for line in before[start:end])
            continue
        yield from (("-", line) for line in before[start:end])
        yield from (("+", line) for line in after[new_start:new_end])


def _anchors(before: Sequence[str], after: Sequence[str]) -> list[tuple[int, int]]:
    """Places in both texts of lines that each has once: as many as are in the same order in both."""
    count, new_count = Counter(before), Counter(after)
    place = {line: index for index, line in enumerate(before) if count[line] == new_count[line] == 1}
    pairs = [(place[line], index) for index, line in enumerate(after) if line in place]
    lowest: list[int] = []  # for each length, the lowest place at which so long an increasing run can end
    ends: list[int] = []  # and the pair that it ends with
    previous: list[int] = []
    for index, (found, _) in enumerate(pairs):
        length = bisect_left(lowest, found)
        previous.append(ends[length - 1] if length else -1)
        lowest[length : length + 1] = [found]
        ends[length : length + 1] = [index]
    chain: list[tuple[int, int]] = []
    index = ends[-1] if ends else -1
    while index >= 0:
        chain.append(pairs[index])
        index = previous[index]
    return chain[::-1]
