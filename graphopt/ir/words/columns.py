"""Rows of text in columns, as wide as they are or as wide as a terminal is."""

from __future__ import annotations

import contextlib
import re
import textwrap
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

__all__ = ["aligned", "filled", "table_width", "width_of_tables"]

_GAP = "  "
_NARROW, _NARROW_FIRST = 14, 24
"""How far a column of text, and the first one, is cut before a table is divided instead."""

_width: ContextVar[int | None] = ContextVar("graphopt_table_width", default=None)


@contextlib.contextmanager
def table_width(columns: int | None) -> Iterator[None]:
    """While the block runs, tables keep within so many columns; None lets them be as wide as they are."""
    token = _width.set(columns)
    try:
        yield
    finally:
        _width.reset(token)


def _cut(cell: str, size: int) -> str:
    """A cell that is too long: words lose their end, and a name what is in its middle."""
    if " " in cell:
        return f"{cell[: size - 1]}…"
    end = (size - 1) // 2
    return f"{cell[: size - 1 - end]}…{cell[-end:]}"


def width_of_tables() -> int | None:
    """How wide tables may be now; None for as wide as they are."""
    return _width.get()


def aligned(rows: Sequence[Sequence[str]], right: Sequence[int] = (), *, indent: int = 0) -> list[str]:
    """Rows of text in columns, two blanks apart; columns that are empty throughout are left out.

    Where ``table_width`` says how wide a table may be, columns of text are cut, which an ellipsis shows; where that is
    not enough, the table is divided, and each part begins with the first column.

    Args:
        rows: all of one length.
        right: the columns that are aligned to the right; they are never cut.
        indent: blanks before each line.
    """
    if not rows:
        return []
    used = [column for column in range(len(rows[0])) if any(row[column] for row in rows)]
    lines: list[str] = []
    for part in _parts(rows, used, right, indent):
        sizes = _fitted(rows, part, right, indent)
        lines += [*([""] if lines else []), *(_line(row, sizes, right, indent) for row in rows)]
    return lines


def _natural(rows: Sequence[Sequence[str]], column: int) -> int:
    return max(len(row[column]) for row in rows)


def _total(sizes: Sequence[int], indent: int) -> int:
    return indent + sum(sizes) + len(_GAP) * (len(sizes) - 1)


def _least(rows: Sequence[Sequence[str]], column: int, right: Sequence[int]) -> int:
    """The width below which a column is not cut."""
    natural = _natural(rows, column)
    return natural if column in right else min(natural, _NARROW if column else _NARROW_FIRST)


def _parts(rows: Sequence[Sequence[str]], used: Sequence[int], right: Sequence[int], indent: int) -> list[list[int]]:
    """The columns of each part of a table, from left to right; one part where all of them fit."""
    width = _width.get()
    if width is None or not used:
        return [list(used)]
    first, *others = used
    parts = [[first]]
    for column in others:
        least = [_least(rows, each, right) for each in (*parts[-1], column)]
        if _total(least, indent) > width and len(parts[-1]) > 1:
            parts.append([first])
        parts[-1].append(column)
    return parts


def _fitted(rows: Sequence[Sequence[str]], part: Sequence[int], right: Sequence[int], indent: int) -> dict[int, int]:
    """The width of each column of a part: the widest columns of text are cut first."""
    sizes = {column: _natural(rows, column) for column in part}
    width = _width.get()
    while width is not None and _total(list(sizes.values()), indent) > width:
        cut = [column for column in part if column not in right and sizes[column] > _least(rows, column, right)]
        if not cut:
            break
        sizes[max(cut, key=sizes.__getitem__)] -= 1
    return sizes


def _line(row: Sequence[str], sizes: dict[int, int], right: Sequence[int], indent: int) -> str:
    cells = []
    for column, size in sizes.items():
        cell = row[column] if len(row[column]) <= size else _cut(row[column], size)
        cells.append(cell.rjust(size) if column in right else cell.ljust(size))
    return f"{' ' * indent}{_GAP.join(cells)}".rstrip()


def filled(text: str) -> str:
    """A report whose sentences are broken where ``table_width`` says so; tables are within it already."""
    width = _width.get()
    if width is None:
        return text
    return "\n".join(piece for line in text.split("\n") for piece in _broken(line, width))


def _broken(line: str, width: int) -> list[str]:
    begin = re.match(r"\s*(?:# *)?", line)
    assert begin is not None
    if len(line) <= width or "│" in line:
        return [line]
    label = re.match(r"\s*(?:# *)?\S+(?: \S+){0,3} {2,}(?=\S)", line)  # "network      8 ranks, …"
    hanging = " " * label.end() if label else f"{begin[0]}{'' if begin[0] else '  '}"
    if not label and begin[0] and not begin[0].strip():
        hanging = f"{begin[0]}  "
    elif not label and "#" in begin[0]:
        hanging = f"{begin[0].rstrip()}   "
    head = label[0] if label else begin[0]
    return textwrap.wrap(
        line[len(head) :],
        width,
        initial_indent=head,
        subsequent_indent=hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )
