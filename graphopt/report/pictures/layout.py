"""Where everything goes in the picture of a program: a U, forward down the left and backward up the right.

Every visit of forward to a module is a row, in the order of running; what belongs to the module elsewhere (backward,
recomputation, transfers) stands in the same row. Rows are keyed by module path and columns never move, so one picture
can be laid over the next. Repeated blocks that do the same share their rows. The layout takes time linear in nodes
and edges, and depends on nothing but the programs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch import fx

from graphopt.analysis.liveness import storages_of
from graphopt.ir.memory.timeline import Storage
from graphopt.ir.node import Phase
from graphopt.ir.program import Program
from graphopt.report.pictures.folding import FRAME_HEAD, ROW_HEIGHT, Frame, Row, Sheet, arrange
from graphopt.report.pictures.visits import Lane, Placement, merge_visits

__all__ = [
    "COLUMNS",
    "MAX_ROWS",
    "ROW_HEIGHT",
    "Box",
    "Edge",
    "Frame",
    "Lane",
    "Layout",
    "PlacedNode",
    "Row",
    "lay_out",
]

MAX_ROWS = 30
"""Rows that a folded picture has at most, unless the outermost modules are more than that."""

BOX_HEIGHT = 48.0
"""Pixels that the boxes of one row and column share."""

_CELLS = 24
"""Nodes side by side in a box; further ones continue below."""

COLUMNS = {
    Lane.FORWARD_OUTSIDE: (-216.0, 160.0),
    Lane.FORWARD: (0.0, 250.0),
    Lane.RECOMPUTE: (460.0, 220.0),
    Lane.BACKWARD: (720.0, 250.0),
    Lane.BACKWARD_OUTSIDE: (1026.0, 160.0),
}
"""Left edge and width of each column; the saved activations' arrows have the space between forward and recompute."""


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

    ``saved`` edges carry each tensor that is saved for backward once, with its bytes, to the row that reads it last.
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
    placed = [Placement(program) for program in programs]
    visits = merge_visits([placement.order for placement in placed])
    for placement in placed:
        placement.place(visits)
    title = programs[0].title if programs else ""
    sheet = arrange(visits, placed, title=title, fold=fold, max_rows=max_rows)
    update = Row("update", "optimizer.step", ("",), -ROW_HEIGHT - FRAME_HEAD)
    rows = [*sheet.rows, update] if any(len(p.row) < len(p.calls) for p in placed) else sheet.rows
    return [_picture(program, p, rows, sheet) for program, p in zip(programs, placed, strict=True)]


_Place = tuple[int, int]
"""A box, and which of the folded blocks."""


def _picture(program: Program, placement: Placement, rows: list[Row], sheet: Sheet) -> Layout:
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


def _edges(program: Program, placement: Placement, place: dict[fx.Node, _Place], layout: Layout) -> Iterator[Edge]:
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
