"""What a terminal gets and a file or a pipe does not: colours, live displays, its width."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TextIO

from graphopt.report.console.escape import visible

__all__ = [
    "LogFormatter",
    "Span",
    "displayed",
    "first_rank",
    "is_terminal",
    "line_style",
    "shown_width",
    "terminal_width",
    "working",
    "write",
    "write_error",
    "write_problem",
    "write_spans",
]

_SUMMARY = re.compile(r"\+\d+ nodes, -\d+ nodes")
"""The first line of a diff, which sums it up."""

_PLAIN_WIDTH = 100
"""Columns where nothing says how many there are."""

_LEAST_WIDTH = 60
"""Columns that tables take in any case."""

Span = tuple[str, str]
"""Text and its rich style."""


def is_terminal(stream: TextIO) -> bool:
    """Whether colours and live output make sense: a terminal that is not ``dumb``, and ``NO_COLOR`` is not set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def first_rank() -> bool:
    """Whether this process speaks for all: rank 0 of torch.distributed or of a launcher, or the only process."""
    dist = sys.modules.get("torch.distributed")  # only where it is imported can there be a process group
    if dist is not None and dist.is_available() and dist.is_initialized():
        return bool(dist.get_rank() == 0)
    return os.environ.get("RANK", "0") == "0"


def terminal_width() -> int:
    """Columns of the terminal (or what ``COLUMNS`` says), 100 where there is none."""
    return shutil.get_terminal_size(fallback=(_PLAIN_WIDTH, 24)).columns


def shown_width(stream: TextIO) -> int | None:
    """The columns that reports keep to: of a terminal, or what ``COLUMNS`` says; None for files and pipes."""
    if not stream.isatty() and not os.environ.get("COLUMNS", "").isdecimal():
        return None
    return max(terminal_width(), _LEAST_WIDTH)


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
        text: what to write; characters that the stream's encoding lacks are replaced, and on a terminal those that
            would steer it are written out.
        stream: where to.
        style: the rich style of a line, used where the stream is a terminal.
    """
    text = text.removesuffix("\n")
    if style is None or not is_terminal(stream):
        _write_plain(text, stream)
    else:
        write_spans(([(line, style(line))] for line in text.split("\n")), stream)


def write_spans(lines: Iterable[Sequence[Span]], stream: TextIO) -> None:
    """Write lines made of pieces, each with a rich style that is used where the stream is a terminal.

    Args:
        lines: what to write, as for ``write``.
        stream: where to.
    """
    if is_terminal(stream):
        from rich.console import Console
        from rich.text import Text

        console = Console(file=stream, highlight=False)
        for line in lines:
            console.print(Text.assemble(*((visible(text), style) for text, style in line)), soft_wrap=True)
        return
    for line in lines:
        _write_plain("".join(text for text, _ in line), stream)


def _write_plain(text: str, stream: TextIO) -> None:
    text = visible(text) if stream.isatty() else text
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")


def write_error(error: BaseException) -> None:
    """The message and the notes of an error on stderr."""
    lines = [f"  {line}" for note in getattr(error, "__notes__", ()) for line in note.split("\n")]
    write_problem("\n".join([str(error), *lines]))


def write_problem(message: str) -> None:
    """What is wrong, on stderr, begun as all errors of the command line are."""
    begin = "graphopt: error: "
    write(f"{begin}{message}", sys.stderr, style=lambda line: "bold red" if line.startswith(begin) else "")


class LogFormatter(logging.Formatter):
    """Lines of a log for stderr; on a terminal, what would steer it is written out."""

    def format(self, record: logging.LogRecord) -> str:
        """The record's line."""
        text = super().format(record)
        return visible(text) if sys.stderr.isatty() else text


# --- what moves ------------------------------------------------------------------------------------------------------


class _Display(Protocol):
    """A live display of rich."""

    def start(self) -> None:
        """Begin to show it."""

    def stop(self) -> None:
        """Take it away."""


_shown: list[_Display] = []
"""The live displays of this process, each inside of the one before; only the last one is on the terminal."""


@contextlib.contextmanager
def displayed(display: _Display) -> Iterator[None]:
    """Show a live display while the block runs; one that is shown already comes back afterwards."""
    if _shown:
        _shown[-1].stop()
    _shown.append(display)
    try:
        display.start()
        yield
    finally:
        display.stop()
        _shown.remove(display)
        if _shown:
            _shown[-1].start()


@contextlib.contextmanager
def working(message: str) -> Iterator[Callable[[str], None]]:
    """A spinner with ``message`` on stderr while the block runs, where stderr is a terminal and this is rank 0.

    Gives a function to be called with a remark to show behind the message. Nothing is shown elsewhere.
    """
    if not (is_terminal(sys.stderr) and first_rank()):
        yield lambda remark: None
        return
    from rich.console import Console
    from rich.status import Status
    from rich.text import Text

    status = Status(Text(visible(message)), console=Console(stderr=True))

    def show(remark: str) -> None:
        status.update(Text(visible(f"{message}: {remark}" if remark else message)))

    with displayed(status):
        yield show
