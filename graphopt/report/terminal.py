"""What a terminal gets and a file or a pipe does not: colours, a spinner, its width."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

__all__ = ["is_terminal", "line_style", "terminal_width", "working", "write", "write_error"]

_SUMMARY = re.compile(r"\+\d+ nodes, -\d+ nodes")
"""The first line of a diff, which sums it up."""

_PLAIN_WIDTH = 100
"""Columns where nothing says how many there are."""


def is_terminal(stream: TextIO) -> bool:
    """Whether colours and live output make sense: a terminal that is not ``dumb``, and ``NO_COLOR`` is not set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def terminal_width() -> int:
    """Columns of the terminal (or what ``COLUMNS`` says), 100 where there is none."""
    return shutil.get_terminal_size(fallback=(_PLAIN_WIDTH, 24)).columns


def line_style(line: str) -> str:
    """The style of a line of a report: as unified diffs are coloured, comments and headings apart."""
    if line.startswith(("+++", "---", "@@", "==== ")) or _SUMMARY.match(line):
        return "bold"
    if line.startswith("+"):
        return "green"
    if line.startswith("-"):
        return "red"
    return "dim" if line.lstrip().startswith("#") else ""


def write(text: str, stream: TextIO, *, style: Callable[[str], str] | None = None) -> None:
    """Write ``text`` and one line break, without reflowing it.

    Args:
        text: what to write; characters that the stream's encoding lacks are replaced.
        stream: where to.
        style: the rich style of a line, used where the stream is a terminal.
    """
    text = text.removesuffix("\n")
    if style is not None and is_terminal(stream):
        from rich.console import Console
        from rich.text import Text

        console = Console(file=stream)
        for line in text.split("\n"):
            console.print(Text(line, style=style(line)), soft_wrap=True)
        return
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")


def write_error(error: BaseException) -> None:
    """The message and the notes of an error on stderr."""
    lines = f"error: {error}".split("\n")
    lines += [f"  {line}" for note in getattr(error, "__notes__", ()) for line in note.split("\n")]
    write("\n".join(lines), sys.stderr, style=lambda line: "bold red" if line.startswith("error: ") else "")


@contextlib.contextmanager
def working(message: str) -> Iterator[None]:
    """A spinner with ``message`` on stderr while the block runs, where stderr is a terminal; nothing elsewhere."""
    if not is_terminal(sys.stderr):
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(message):
        yield
