"""Where everything goes in the picture of a program: a U, forward down the left and backward up the right.

Every visit of forward to a module is a row, in the order of running; what belongs to the module elsewhere (backward,
recomputation, transfers) stands in the same row. Rows are keyed by module path and columns never move, so one picture
can be held against the next. Repeated blocks that do the same share their rows. The layout takes time linear in nodes
and edges, and depends on nothing but the programs.
"""

from __future__ import annotations

import enum
import itertools
import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch import fx

from graphopt.analysis.liveness import Storage, storages_of
from graphopt.ops import schema
from graphopt.program import Phase, Program, info

__all__ = ["MAX_ROWS", "Box", "Edge", "Frame", "Lane", "Layout", "PlacedNode", "Row", "lay_out"]

MAX_ROWS = 60
"""Rows that a folded picture has at most, unless the outermost modules are more than that."""

ROW_HEIGHT, BOX_HEIGHT, FRAME_HEAD, FRAME_FOOT = 60.0, 48.0, 26.0, 8.0
_CELLS = 24
"""Nodes side by side in a box; further ones continue below."""


class Lane(enum.StrEnum):
    """A column. The outer ones hold what talks to the outside: host memory and other ranks."""

    FORWARD_OUTSIDE = "forward outside"
    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    BACKWARD_OUTSIDE = "backward outside"


COLUMNS = {
    Lane.FORWARD_OUTSIDE: (-216.0, 160.0),
    Lane.FORWARD: (0.0, 250.0),
    Lane.RECOMPUTE: (460.0, 220.0),
    Lane.BACKWARD: (720.0, 250.0),
    Lane.BACKWARD_OUTSIDE: (1026.0, 160.0),
}
"""Left edge and width of each column; the saved activations' arrows have the space between forward and recompute."""

_INSIDE = {Phase.FORWARD: Lane.FORWARD, Phase.RECOMPUTE: Lane.RECOMPUTE} | dict.fromkeys(
    (Phase.BACKWARD, Phase.UPDATE), Lane.BACKWARD
)


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


@dataclass(slots=True)
class Box:
    """The calls of one phase in one row. ``nodes`` are those of the first of the folded blocks, in running order.

    ``kept`` holds, for each of the blocks, the bytes of results that live from before the turn of the U to after it.
    """

    row: int
    lane: Lane
    phase: Phase
    x: float
    y: float
    width: float
    kept: list[int]
    height: float = BOX_HEIGHT
    nodes: list[str] = field(default_factory=list)


class PlacedNode(NamedTuple):
    """A node's place: its box, which of the folded blocks it belongs to, and a point inside the box."""

    name: str
    box: int
    copy: int
    x: float
    y: float


class Edge(NamedTuple):
    """From box to box; ``crossing`` goes from one of the folded blocks to another.

    ``saved`` edges carry each tensor that is kept for backward once, with its bytes, to the row that reads it last.
    ``data`` edges stand for arguments on the same side of the U, and have no bytes.
    """

    source: int
    target: int
    kind: Literal["saved", "data"]
    crossing: bool
    bytes: int
    tensors: int


@dataclass(slots=True)
class Layout:
    """A picture as plain data. Units are pixels at 100 %; y grows downwards and the first module's row is at y 0.

    The optimizer's update, where there is one, is the last of ``rows`` and stands above the first.
    """

    rows: list[Row]
    frames: list[Frame]
    boxes: list[Box]
    nodes: list[PlacedNode]
    edges: list[Edge]


def lay_out(programs: Sequence[Program], *, fold: bool = True, max_rows: int = MAX_ROWS) -> list[Layout]:
    """The pictures of several programs, with the same modules in the same places.

    Args:
        programs: what a program was after each pass, or one program. A module that any of them has gets its row in
            all pictures, and blocks are folded where they are equal to each other in each of the programs.
        fold: let equal consecutive blocks share their rows, and close modules until at most ``max_rows`` rows are left.
        max_rows: how many rows a folded picture may have.
    """
    placed = [_Placement(program) for program in programs]
    visits = _merge([placement.order for placement in placed])
    for placement in placed:
        placement.place(visits)
    paths = [tuple(visit.path.split(".")) if visit.path else () for visit in visits]
    items = _tree(paths, _signatures(placed, len(visits)), 0, fold)
    depth = max((len(path) for path in paths), default=0)
    while fold and depth > 1 and _count(items, depth) > max_rows:
        depth -= 1
    sheet = _Sheet(list(visits), paths, programs[0].title if programs else "")
    sheet.draw(items, depth, (), [list(range(len(paths)))], 0)
    update = Row("update", "optimizer.step", ("",), -ROW_HEIGHT - FRAME_HEAD)
    rows = [*sheet.rows, update] if any(p.update < len(p.calls) for p in placed) else sheet.rows
    return [_picture(program, p, rows, sheet) for program, p in zip(programs, placed, strict=True)]


# --- calls to visits -------------------------------------------------------------------------------------------------


class _Visit(NamedTuple):
    """A module path and which of forward's visits to it: the n-th or, where it has modules inside, after which one."""

    path: str
    which: str


def _around(path: str) -> Iterator[str]:
    """The paths of the modules around ``path``, innermost first; the model's own is empty."""
    while path:
        path = path.rpartition(".")[0]
        yield path


_Place = tuple[int, int]
"""A box, and which of the folded blocks."""


class _Placement:
    """Which visit (``row``, an index) every call of a program belongs to; the update belongs to none."""

    def __init__(self, program: Program) -> None:
        self.calls = [node for node in program.graph.nodes if node.op not in ("placeholder", "output")]
        self.known = {node: info(node) for node in self.calls}
        self.row: dict[fx.Node, int] = {}
        phases = [known.phase for known in self.known.values()]
        self.turn, self.update = (
            phases.index(phase) if phase in phases else len(phases) for phase in (Phase.BACKWARD, Phase.UPDATE)
        )
        self.early = {n for i, n in enumerate(self.calls) if i < self.turn or self.known[n].phase is Phase.FORWARD}
        self._visit: dict[fx.Node, _Visit] = {}
        self.order = self._forward_visits()

    def _forward_visits(self) -> list[_Visit]:
        forward = [node for node in self.calls if self.known[node].phase is Phase.FORWARD]
        inner = {around for path in {self.known[n].module for n in forward} for around in _around(path)}
        count: Counter[str] = Counter()
        leaf, previous = _Visit("", ""), ""
        for node in forward:
            path = self.known[node].module
            if path in inner:
                inside = leaf.path.startswith(f"{path}." if path else "")
                visit = _Visit(path, f" after {leaf.path}{leaf.which}" if inside and leaf.path else " first")
            else:
                count[path] += path != previous
                visit = leaf = _Visit(path, f" #{count[path]}")
            self._visit[node], previous = visit, path
        return list(dict.fromkeys(self._visit.values())) or [_Visit("", " first")]

    def place(self, visits: dict[_Visit, int]) -> None:
        """Fill ``row``, given the index of each visit."""
        by_path: dict[str, list[int]] = defaultdict(list)
        for visit, index in visits.items():
            by_path[visit.path].append(index)
        twins = {name: visit for node, visit in self._visit.items() for name in self.known[node].names}
        for index, node in enumerate(self.calls):
            known = self.known[node]
            again = known.names[0].rstrip("'") if known.phase is Phase.RECOMPUTE and known.names else ""
            if found := self._visit.get(node) or twins.get(again):
                self.row[node] = visits[found]
            elif index < self.update or (known.module and known.phase is not Phase.UPDATE):
                self.row[node] = self._find(node, by_path)

    def _find(self, node: fx.Node, by_path: dict[str, list[int]]) -> int:
        """The visit of a call outside of forward: its module's; its arguments tell which, where there are several.

        A gradient flows upwards, so an op of backward belongs to the last visit that is not below the one its gradient
        comes from. A sum of gradients belongs where its last summand does.
        """
        path = self.known[node].module
        rows = next((by_path[p] for p in (path, *_around(path)) if p in by_path), [])
        read = [source for source in node.all_input_nodes if source in self.row]
        late = [s for s in read if self.known[s].phase not in (Phase.FORWARD, Phase.RECOMPUTE)]
        if (len(rows) == 1 and path) or not read:
            return rows[-1] if rows else 0
        if not rows or (len(late) == len(node.all_input_nodes) > 1 and schema.op_name(node) == "add"):
            return self.row[read[-1]]
        if late and self.known[node].phase is Phase.BACKWARD:
            return rows[max(bisect_right(rows, self.row[late[-1]]) - 1, 0)]
        return rows[min(bisect_left(rows, max(self.row[s] for s in read)), len(rows) - 1)]

    def lane(self, node: fx.Node) -> Lane:
        """The column of a call."""
        side = Lane.FORWARD_OUTSIDE if node in self.early else Lane.BACKWARD_OUTSIDE
        return _INSIDE.get(self.known[node].phase, side)


def _merge(orders: Sequence[list[_Visit]]) -> dict[_Visit, int]:
    """All visits in one order; one that only a later program has comes behind the one that it follows there."""
    following: dict[_Visit | None, list[_Visit]] = defaultdict(list)
    seen: set[_Visit] = set()
    for order in orders:
        for previous, visit in itertools.pairwise([None, *order]):
            if visit is not None and visit not in seen:
                seen.add(visit)
                following[previous].append(visit)
    merged: dict[_Visit, int] = {}
    pending = list(following[None])
    while pending:
        visit = pending.pop()
        merged[visit] = len(merged)
        pending += following[visit]
    return merged


# --- visits to rows --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Item:
    """The visits to a module, or to several equal ones in a row: they start at ``starts`` and are ``length`` each."""

    names: list[str]
    starts: list[int]
    length: int
    shape: tuple[object, ...]
    inner: list[_Item]


def _signatures(placed: Sequence[_Placement], count: int) -> list[int]:
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


class _Sheet:
    """Rows and frames of a picture, and where each visit went: to which row, as which of the folded blocks."""

    def __init__(self, visits: list[_Visit], paths: list[tuple[str, ...]], title: str) -> None:
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


# --- the picture -----------------------------------------------------------------------------------------------------


def _picture(program: Program, placement: _Placement, rows: list[Row], sheet: _Sheet) -> Layout:
    layout = Layout(rows, sheet.frames, [], [], [])
    place: dict[fx.Node, _Place] = {}
    boxes: dict[tuple[int, Lane, Phase], int] = {}
    for node in placement.calls:
        lane, phase = placement.lane(node), placement.known[node].phase
        row, copy = sheet.where[placement.row[node]] if node in placement.row else (len(rows) - 1, 0)
        box = boxes.setdefault((row, lane, phase), len(boxes))
        if box == len(layout.boxes):
            layout.boxes.append(
                Box(row, lane, phase, COLUMNS[lane][0], rows[row].y, COLUMNS[lane][1], [0] * len(rows[row].paths))
            )
        place[node] = (box, copy)
        if copy == 0:
            layout.boxes[box].nodes.append(node.name)
    _stack(layout.boxes)
    layout.nodes = list(_points(layout.boxes, place))
    layout.edges = list(_edges(program, placement, place, layout))
    return layout


def _stack(boxes: list[Box]) -> None:
    """Let boxes of one row and column (transfers and collectives) share the height."""
    places: dict[tuple[int, Lane], list[Box]] = defaultdict(list)
    for box in boxes:
        places[box.row, box.lane].append(box)
    for shared in places.values():
        for position, box in enumerate(shared):
            box.height = BOX_HEIGHT / len(shared)
            box.y += position * box.height


def _points(boxes: list[Box], place: dict[fx.Node, _Place]) -> Iterator[PlacedNode]:
    """Each node's point: the nodes of one block fill their box line by line; equal nodes of equal blocks coincide."""
    filled: Counter[tuple[int, int]] = Counter()
    for node, at in place.items():
        box = boxes[at[0]]
        line, cell = divmod(filled[at], _CELLS)
        filled[at] += 1
        x = box.x + (cell + 0.5) * box.width / _CELLS
        y = box.y + (line + 0.5) * box.height / -(-len(box.nodes) // _CELLS)
        yield PlacedNode(node.name, *at, x, y)


def _blocks(rows: list[Row], frames: list[Frame]) -> list[int]:
    """For each row, a number that rows of the same folded block share."""
    block = list(range(len(rows)))
    for frame in reversed(frames):
        if frame.copies > 1:
            block[frame.first : frame.last + 1] = [frame.first] * (frame.last + 1 - frame.first)
    return block


def _edges(program: Program, placement: _Placement, place: dict[fx.Node, _Place], layout: Layout) -> Iterator[Edge]:
    """All edges, and what each box keeps. Of several boxes in the row that frees a tensor, the first reads it."""
    block = _blocks(layout.rows, layout.frames)
    rows = [box.row for box in layout.boxes]
    found: dict[tuple[int, int, Literal["saved", "data"], bool], list[int]] = defaultdict(lambda: [0, 0])

    def add(source: _Place, target: _Place, kind: Literal["saved", "data"], size: int) -> None:
        crossing = source[1] != target[1] and block[rows[source[0]]] == block[rows[target[0]]]
        total = found[source[0], target[0], kind, crossing]
        total[0] += size
        total[1] += 1

    refers = storages_of(program)[1]
    readers: dict[int, tuple[Storage, dict[_Place, _Place]]] = {}
    for node in placement.calls:
        late = node not in placement.early
        for source in (s for s in node.all_input_nodes if s in place):
            if late is (source not in placement.early) and place[source] != place[node]:
                add(place[source], place[node], "data", 0)
            for storage in refers[source] if late else ():
                if storage.owner in placement.early and storage.bytes:
                    reading = readers.setdefault(id(storage), (storage, {}))[1]
                    row = (rows[place[node][0]], place[node][1])
                    reading[row] = reading.pop(row, place[node])
    for storage, reading in readers.values():
        box, copy = place[storage.owner]
        layout.boxes[box].kept[copy] += storage.bytes
        add((box, copy), next(reversed(reading.values())), "saved", storage.bytes)
    for (start, end, kind, crossing), (size, tensors) in found.items():
        yield Edge(start, end, kind, crossing, size, tensors)
