"""The text diff of all passes together and of each of them, cut where it is very long, and where to get the rest."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

from graphopt.ir.program import Program
from graphopt.report.page.records import Strings
from graphopt.report.page.story import ALL_PASSES, WITHOUT_PASSES, Story
from graphopt.report.text.diff import diff

__all__ = ["MAX_LINES", "MAX_WIDTH", "TextDiff", "text_diffs"]

MAX_LINES = 20_000
"""Lines of a diff that a page holds: all of it for some 30 blocks of a transformer, a megabyte or two."""

MAX_WIDTH = 1000
"""Characters of a line that a page holds."""


@dataclass(frozen=True, slots=True)
class TextDiff:
    """What changed in the program's text on the way to a snapshot.

    Attributes:
        label: the pass, or that all of them are meant.
        snapshot: the index of the snapshot that came of it.
        lines: the first of them is the summary.
        cut: how many lines are left out.
        rest: how to get all of them; empty where nothing is left out, or where no command line makes the page.
    """

    label: str
    snapshot: int
    lines: list[str]
    cut: int
    rest: str

    def to_json(self, strings: Strings) -> dict[str, Any]:
        """As plain data; lines are numbers of texts, since diffs of passes repeat lines of the whole one."""
        return {
            "label": self.label,
            "snapshot": self.snapshot,
            "lines": [strings(line) for line in self.lines],
            "cut": self.cut,
            "rest": self.rest,
        }


def text_diffs(story: Story) -> list[TextDiff]:
    """The diff of all passes together, where they are several steps, and of each pass."""
    programs = [snapshot.program for snapshot in story.snapshots]
    found = []
    if story.compares_all:
        ends = programs[story.before], programs[story.after]
        found.append(_text_diff(ALL_PASSES, story.after, *ends, None, _whole_rest(story)))
    for index, snapshot in enumerate(story.snapshots):
        if snapshot.record is None:
            continue
        was, now = snapshot.record.peak_before, snapshot.record.peak_after
        peaks = None if was is None or now is None else (was, now)
        given = _given(story, index)
        rest = _whole_rest(story) or f"snapshots[{given - 1}][1].diff(snapshots[{given}][1])"
        found.append(_text_diff(snapshot.label, index, programs[index - 1], programs[index], peaks, rest))
    return found


def _text_diff(
    label: str, index: int, before: Program, after: Program, peaks: tuple[int, int] | None, rest: str
) -> TextDiff:
    lines = diff(before, after, peaks=peaks).splitlines()
    held = [_short(line) for line in lines[:MAX_LINES]]
    cut = len(lines) - len(held)
    shortened = any(len(line) > MAX_WIDTH for line in lines[:MAX_LINES])
    return TextDiff(label, index, held, cut, rest if cut or shortened else "")


def _short(line: str) -> str:
    return line if len(line) <= MAX_WIDTH else f"{line[:MAX_WIDTH]}… ({len(line) - MAX_WIDTH} characters more)"


def _whole_rest(story: Story) -> str:
    """The command line that prints the whole diff of all passes; empty where the story has none."""
    words = shlex.split(story.command)
    return shlex.join([words[0], "diff", *words[2:]]) if words else ""


def _given(story: Story, index: int) -> int:
    """The place of a snapshot among those that were given, without the one that the page made."""
    return sum(snapshot.label != WITHOUT_PASSES for snapshot in story.snapshots[:index])
