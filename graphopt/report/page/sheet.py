"""Where every call stands: the row of its module, the column of its phase, and a place there that it keeps.

Rows are forward's visits to modules, the same for all snapshots. Within a row and a column every call of any snapshot
of a stage has a place of its own, so that nothing moves from one snapshot to the next; what a pass erases leaves its
place empty. The scripts of the page add the heights of what is open and closed, and nothing else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from torch import fx

from graphopt.ir.node import Phase
from graphopt.ir.program import Program
from graphopt.report.page.lineage import Lineage
from graphopt.report.page.tree import Item, module_tree
from graphopt.report.pictures.visits import Lane, Placement, Visit, merge_visits

__all__ = ["LANES", "Place", "Sheet", "merge_orders", "set_out"]

LANES = tuple(Lane)
"""The columns, left to right."""

T = TypeVar("T", bound=Hashable)


class Place(NamedTuple):
    """Row (the update's is one past the last visit), column (an index into ``LANES``) and place of a call there."""

    row: int
    lane: int
    slot: int


@dataclass(slots=True)
class Sheet:
    """Where everything stands in all snapshots.

    Attributes:
        visits: the rows.
        tree: the modules around them.
        placements: each snapshot's calls.
        places: for each snapshot, the place of each call.
        slots: for each stage, how many places each ``(row, lane)`` has.
    """

    visits: list[Visit]
    tree: list[Item]
    placements: list[Placement]
    places: list[dict[fx.Node, Place]]
    slots: dict[str, dict[tuple[int, int], int]]


def set_out(programs: Sequence[Program], lineages: dict[str, Lineage]) -> Sheet:
    """Give every call of every snapshot its place.

    Args:
        programs: all snapshots, those of one stage together.
        lineages: for each stage, which nodes of its snapshots are the same.
    """
    placements = [Placement(program) for program in programs]
    visits = merge_visits([placement.order for placement in placements])
    for placement in placements:
        placement.place(visits)
    tree = module_tree(list(visits), placements, programs[-1].title)
    sheet = Sheet(list(visits), tree, placements, [], {})
    for stage, lineage in lineages.items():
        mine = [p for program, p in zip(programs, placements, strict=True) if program.stage == stage]
        places, slots = _places(mine, lineage, len(visits))
        sheet.places += places
        sheet.slots[stage] = slots
    return sheet


def _places(
    placements: Sequence[Placement], lineage: Lineage, update: int
) -> tuple[list[dict[fx.Node, Place]], dict[tuple[int, int], int]]:
    """The places of the calls of one stage's snapshots, and how many each row and column has."""
    cells: list[dict[fx.Node, tuple[int, int]]] = []
    orders: dict[tuple[int, int], list[list[int]]] = defaultdict(list)
    for placement, number in zip(placements, lineage.numbers, strict=True):
        cell = {node: (placement.row.get(node, update), _lane(placement, node)) for node in placement.calls}
        mine: dict[tuple[int, int], list[int]] = defaultdict(list)
        for node, where in cell.items():
            mine[where].append(number[node])
        for where, order in mine.items():
            orders[where].append(order)
        cells.append(cell)
    slot = {where: {n: i for i, n in enumerate(merge_orders(found))} for where, found in orders.items()}
    places = [
        {node: Place(*where, slot[where][number[node]]) for node, where in cell.items()}
        for cell, number in zip(cells, lineage.numbers, strict=True)
    ]
    return places, {where: len(taken) for where, taken in slot.items()}


def _lane(placement: Placement, node: fx.Node) -> int:
    lane = Lane.BACKWARD if placement.known[node].phase is Phase.UPDATE else placement.lane(node)
    return LANES.index(lane)


def merge_orders(orders: Iterable[Sequence[T]]) -> list[T]:
    """Everything that several orders hold, once; what is new in one stands behind what it follows there.

    The order of the first is kept as it is.
    """
    following: dict[T, T] = {}
    first: T | None = None
    seen: set[T] = set()
    for order in orders:
        before: T | None = None
        for item in order:
            if item not in seen:
                seen.add(item)
                after = first if before is None else following.get(before)
                if after is not None:
                    following[item] = after
                if before is None:
                    first = item
                else:
                    following[before] = item
            before = item
    merged: list[T] = []
    while first is not None:
        merged.append(first)
        first = following.get(first)
    return merged
