"""The text diff of each pass, cut where it is long, and where to get the rest."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

from graphopt.report.page.story import WITHOUT_PASSES, Story
from graphopt.report.text.diff import diff

__all__ = ["MAX_LINES", "MAX_WIDTH", "TextDiff", "text_diffs"]

MAX_LINES = 600
"""Lines of a pass's diff that a page holds."""

MAX_WIDTH = 1000
"""Characters of a line that a page holds."""


@dataclass(frozen=True, slots=True)
class TextDiff:
    """What a pass changed in the program's text.

    Attributes:
        snapshot: the index of the snapshot that the pass made.
        lines: the first of them is the summary.
        cut: how many lines are left out.
        rest: how to get all of them; empty where nothing is left out.
    """

    snapshot: int
    lines: list[str]
    cut: int
    rest: str

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {"snapshot": self.snapshot, "lines": self.lines, "cut": self.cut, "rest": self.rest}


def text_diffs(story: Story) -> list[TextDiff]:
    """The diff of each pass."""
    found = []
    for index, snapshot in enumerate(story.snapshots):
        if snapshot.record is None:
            continue
        record = snapshot.record
        was, now = record.peak_before, record.peak_after
        peaks = None if was is None or now is None else (was, now)
        lines = diff(story.snapshots[index - 1].program, snapshot.program, peaks=peaks).splitlines()
        kept = [_short(line) for line in lines[:MAX_LINES]]
        cut = len(lines) - len(kept)
        shortened = any(len(line) > MAX_WIDTH for line in lines[:MAX_LINES])
        found.append(TextDiff(index, kept, cut, _rest(story, index) if cut or shortened else ""))
    return found


def _short(line: str) -> str:
    return line if len(line) <= MAX_WIDTH else f"{line[:MAX_WIDTH]}… ({len(line) - MAX_WIDTH} characters more)"


def _rest(story: Story, index: int) -> str:
    """How to get a whole diff: all passes together on the command line, one pass in Python."""
    if story.command:
        words = shlex.split(story.command)
        return shlex.join([words[0], "diff", *words[2:]])
    given = sum(snapshot.label != WITHOUT_PASSES for snapshot in story.snapshots[:index])
    return f"snapshots[{given - 1}][1].diff(snapshots[{given}][1])"
