"""From visits to rows: equal consecutive blocks share their rows, and modules are closed until the rows are few."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from graphopt.report.pictures.visits import Placement, Visit

__all__ = ["FRAME_HEAD", "ROW_HEIGHT", "Frame", "Row", "Sheet", "arrange"]

ROW_HEIGHT, FRAME_HEAD, FRAME_FOOT = 60.0, 26.0, 8.0
"""Heights in pixels: of a row, and of a frame above its first row and below its last."""


@dataclass(frozen=True, slots=True)
class Row:
    """A visit to a module, or the same visit in each of several equal blocks.

    ``key`` says which visit and stays from pass to pass. ``label`` is the module's path with ``*`` for the blocks'
    names; ``paths`` are the modules themselves, one for each of the folded blocks, in forward's order.
    """

    key: str
    label: str
    paths: tuple[str, ...]
    y: float


@dataclass(frozen=True, slots=True)
class Frame:
    """A module drawn around the rows ``first`` to ``last`` that are inside; ``depth`` counts the frames around it."""

    label: str
    copies: int
    depth: int
    first: int
    last: int
    y: float
    height: float


def arrange(visits: Iterable[Visit], placed: Sequence[Placement], *, title: str, fold: bool, max_rows: int) -> Sheet:
    """Give every visit its row.

    Args:
        visits: the visits of all programs, in order (``merge_visits``).
        placed: the programs' calls, with their visits filled in.
        title: what the row of the model itself is called.
        fold: let blocks that are equal in each program share their rows, and close modules while there are too many.
        max_rows: how many rows there may be if ``fold``; the outermost modules have theirs in any case.
    """
    order = list(visits)
    paths = [tuple(visit.path.split(".")) if visit.path else () for visit in order]
    items = _tree(paths, _signatures(placed, len(order)), 0, fold)
    depth = max((len(path) for path in paths), default=0)
    while fold and depth > 1 and _count(items, depth) > max_rows:
        depth -= 1
    sheet = Sheet(order, paths, title)
    sheet.draw(items, depth, (), [list(range(len(order)))], 0)
    return sheet


@dataclass(slots=True)
class _Item:
    """The visits to a module, or to several equal ones in a row: they start at ``starts`` and are ``length`` each."""

    names: list[str]
    starts: list[int]
    length: int
    shape: tuple[object, ...]
    inner: list[_Item]


def _signatures(placed: Sequence[Placement], count: int) -> list[int]:
    """A number for each visit; two are equal where the same ops run in the same order and phases in each program."""
    done: list[list[object]] = [[] for _ in range(count)]
    for mark, placement in enumerate(placed):
        for node in placement.calls:
            if node in placement.row:
                done[placement.row[node]].append((mark, placement.lane(node), placement.known[node].phase, node.target))
    numbers: dict[tuple[object, ...], int] = {}
    return [numbers.setdefault(tuple(found), len(numbers)) for found in done]


def _tree(paths: list[tuple[str, ...]], signatures: list[int], level: int, fold: bool) -> list[_Item]:
    """The modules at ``level`` among consecutive visits; a visit to the module around them is an item of its own."""
    items: list[_Item] = []
    own = itertools.count()
    start = 0
    for name, run in itertools.groupby(paths, lambda path: path[level] if len(path) > level else next(own)):
        length = len(list(run))
        inside = slice(start, start + length)
        shape = tuple(
            (path[level + 1 :], number) for path, number in zip(paths[inside], signatures[inside], strict=True)
        )
        last = items[-1] if items else None
        if isinstance(name, int):
            items.append(_Item([], [start], length, shape, []))
        elif fold and last and last.names and last.shape == shape and _stem(last.names[0]) == _stem(name) != name:
            last.names.append(name)
            last.starts.append(start)
        else:
            inner = _tree(paths[inside], signatures[inside], level + 1, fold) if length > 1 else []
            items.append(_Item([name], [start], length, shape, inner))
        start += length
    return items


def _stem(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _count(items: list[_Item], depth: int) -> int:
    """How many rows ``items`` take where modules are opened down to ``depth``."""
    return sum(_count(item.inner, depth - 1) if depth > 1 and item.inner else 1 for item in items)


class Sheet:
    """Rows and frames of a picture; ``where`` says to which row each visit went, as which of the folded blocks."""

    def __init__(self, visits: list[Visit], paths: list[tuple[str, ...]], title: str) -> None:
        self.rows: list[Row] = []
        self.frames: list[Frame] = []
        self.where: dict[int, tuple[int, int]] = {}
        self._visits, self._paths, self._title, self._y = visits, paths, title or "model", 0.0

    def draw(
        self, items: list[_Item], depth: int, around: tuple[str, ...], blocks: list[list[int]], frames: int
    ) -> None:
        """Put ``items``, which recur in each of ``blocks`` (lists of visits), down inside of ``frames`` frames."""
        for item in items:
            inside = [block[start : start + item.length] for block in blocks for start in item.starts]
            copies = max(len(item.names), 1)
            path = (*around, _stem(item.names[0])) if copies > 1 else (*around, *item.names)
            ends = item.names[:: copies - 1] if copies > 1 else []
            label = " … ".join(".".join((*around, name)) for name in ends) or ".".join(path)
            if depth <= 1 or not item.inner:
                self._row(label, inside, len(path))
                continue
            framed = copies > 1 or (len(item.inner) > 1 and frames < 2)
            first, top = len(self.rows), self._y
            self._y += FRAME_HEAD * framed
            place = len(self.frames)
            self.draw(item.inner, depth - 1, path, inside, frames + framed)
            self._y += FRAME_FOOT * framed
            if framed:
                frame = Frame(label, copies, frames, first, len(self.rows) - 1, top, self._y - top)
                self.frames.insert(place, frame)

    def _row(self, label: str, blocks: list[list[int]], level: int) -> None:
        for copy, block in enumerate(blocks):
            self.where.update(dict.fromkeys(block, (len(self.rows), copy)))
        paths = tuple(".".join(self._paths[block[0]][:level]) for block in blocks)
        self.rows.append(Row("".join(self._visits[blocks[0][0]]), label or self._title, paths, self._y))
        self._y += ROW_HEIGHT
