"""The modules of a program as a tree whose leaves are forward's visits, with equal neighbours grouped."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from graphopt.report.pictures.visits import Placement, Visit

__all__ = ["Item", "module_tree"]

Kind = Literal["module", "group", "visit"]


@dataclass(slots=True)
class Item:
    """A module, a visit to one that has no modules inside, or a group of equal modules in a row.

    Attributes:
        label: what is written: the module's name in the one around it, or the first and the last of a group's.
        path: the module's whole path; a group's has ``*`` for what differs.
        kind: what it is; the children of a group are its modules, and do the same in each program.
        rows: the first visit, and one past the last.
        children: what is inside, in forward's order.
    """

    label: str
    path: str
    kind: Kind
    rows: tuple[int, int]
    children: list[Item] = field(default_factory=list)


def module_tree(visits: Sequence[Visit], placed: Sequence[Placement], title: str) -> list[Item]:
    """The outermost modules, in forward's order.

    Args:
        visits: the visits of all programs, in order; ``Item.rows`` counts in them.
        placed: the programs' calls, with their visits filled in. Modules are grouped where their names differ in
            numbers alone, and the same ops run in the same columns and phases in each of the programs.
        title: what the model itself is called.
    """
    paths = [tuple(visit.path.split(".")) if visit.path else () for visit in visits]
    return _Tree(visits, paths, _signatures(placed, len(visits)), title).inside(0, len(visits), 0)


def _signatures(placed: Sequence[Placement], count: int) -> list[int]:
    """A number for each visit; two are equal where the same runs in each program."""
    done: list[list[object]] = [[] for _ in range(count)]
    for mark, placement in enumerate(placed):
        for node, row in placement.row.items():
            done[row].append((mark, placement.lane(node), placement.known[node].phase, node.target))
    numbers: dict[tuple[object, ...], int] = {}
    return [numbers.setdefault(tuple(found), len(numbers)) for found in done]


def _stem(text: str) -> str:
    return re.sub(r"\d+", "*", text)


@dataclass(slots=True)
class _Tree:
    visits: Sequence[Visit]
    paths: list[tuple[str, ...]]
    signatures: list[int]
    title: str

    def inside(self, start: int, end: int, level: int) -> list[Item]:
        """The items at ``level`` among the visits from ``start`` to ``end`` (not included)."""
        own = itertools.count()
        items: list[Item] = []
        key = [path[level] if len(path) > level else next(own) for path in self.paths[start:end]]
        first = start
        for name, run in itertools.groupby(key):
            last = first + len(list(run))
            items.append(self._module(name, first, last, level) if isinstance(name, str) else self._visit(first, ""))
            first = last
        return self._grouped(items, level)

    def _module(self, name: str, start: int, end: int, level: int) -> Item:
        path = self.paths[start][: level + 1]
        if end - start == 1 and len(self.paths[start]) == level + 1:
            return self._visit(start, name)
        children = self.inside(start, end, level + 1)
        if len(children) == 1:
            only = children[0]
            return Item(f"{name}.{only.label}", only.path, only.kind, only.rows, only.children)
        return Item(name, ".".join(path), "module", (start, end), children)

    def _visit(self, row: int, name: str) -> Item:
        visit = self.visits[row]
        again = visit.which if visit.which.startswith(" #") and visit.which != " #1" else ""
        own = "own ops" if visit.path else f"{self.title or 'model'}: own ops"
        label = f"{name}{again}" if name else own
        return Item(label, visit.path, "visit", (row, row + 1))

    def _grouped(self, items: list[Item], level: int) -> list[Item]:
        """Equal consecutive modules whose names differ in numbers as one item."""
        grouped: list[Item] = []
        for _, run in itertools.groupby(items, lambda item: self._shape(item, level)):
            same = list(run)
            if len(same) == 1:
                grouped += same
                continue
            label = f"{same[0].label} … {same[-1].label}"
            path = ".".join((*self.paths[same[0].rows[0]][:level], _stem(same[0].label)))
            grouped.append(Item(label, path, "group", (same[0].rows[0], same[-1].rows[1]), same))
        return grouped

    def _shape(self, item: Item, level: int) -> object:
        """Equal for modules that may stand in one group."""
        name = item.label
        if name == _stem(name) or len(self.paths[item.rows[0]]) <= level:
            return id(item)
        rows = range(*item.rows)
        return _stem(name), tuple((self.paths[row][level + 1 :], self.signatures[row]) for row in rows)
