"""Which visit of forward to a module every call of a program belongs to, and on which side of the U it stands."""

from __future__ import annotations

import enum
import itertools
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import fx

from graphopt.ir.node import Phase, info
from graphopt.ir.ops import schema
from graphopt.ir.program import Program

__all__ = ["Lane", "Placement", "Visit", "merge_visits"]


class Lane(enum.StrEnum):
    """A column of the picture. The outer ones hold what talks to the outside: host memory and other ranks."""

    FORWARD_OUTSIDE = "forward outside"
    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    BACKWARD_OUTSIDE = "backward outside"


_INSIDE = {Phase.FORWARD: Lane.FORWARD, Phase.RECOMPUTE: Lane.RECOMPUTE} | dict.fromkeys(
    (Phase.BACKWARD, Phase.UPDATE), Lane.BACKWARD
)


class Visit(NamedTuple):
    """A module path and which of forward's visits to it: the n-th or, where it has modules inside, after which one."""

    path: str
    which: str


def _around(path: str) -> Iterator[str]:
    """The paths of the modules around ``path``, innermost first; the model's own is empty."""
    while path:
        path = path.rpartition(".")[0]
        yield path


class Placement:
    """Which visit every call of a program belongs to; the update belongs to none.

    Attributes:
        calls: all nodes but inputs and output, in running order.
        known: what is known of each call.
        order: forward's visits, in running order.
        row: the index of each call's visit, once ``place`` has filled it in.
        turn: the position in ``calls`` of the first call of backward, or their number where there is none.
        update: the same of the optimizer's update, as far as it comes behind backward.
        early: the calls on the side of forward.
    """

    def __init__(self, program: Program) -> None:
        self.calls = [node for node in program.graph.nodes if node.op not in ("placeholder", "output")]
        self.known = {node: info(node) for node in self.calls}
        self.row: dict[fx.Node, int] = {}
        phases = [known.phase for known in self.known.values()]
        self.turn = phases.index(Phase.BACKWARD) if Phase.BACKWARD in phases else len(phases)
        late = (Phase.BACKWARD, Phase.RECOMPUTE)
        end = max((i + 1 for i, phase in enumerate(phases) if phase in late), default=0)
        self.update = next((i for i in range(end, len(phases)) if phases[i] is Phase.UPDATE), len(phases))
        self.early = {n for i, n in enumerate(self.calls) if i < self.turn or self.known[n].phase is Phase.FORWARD}
        self._visit: dict[fx.Node, Visit] = {}
        self.order = self._forward_visits()

    def _forward_visits(self) -> list[Visit]:
        forward = [node for node in self.calls if self.known[node].phase is Phase.FORWARD]
        inner = {around for path in {self.known[n].module for n in forward} for around in _around(path)}
        count: Counter[str] = Counter()
        leaf, previous = Visit("", ""), ""
        for node in forward:
            path = self.known[node].module
            if path in inner:
                inside = leaf.path.startswith(f"{path}." if path else "")
                visit = Visit(path, f" after {leaf.path}{leaf.which}" if inside and leaf.path else " first")
            else:
                count[path] += path != previous
                visit = leaf = Visit(path, f" #{count[path]}")
            self._visit[node], previous = visit, path
        return list(dict.fromkeys(self._visit.values())) or [Visit("", " first")]

    def place(self, visits: dict[Visit, int]) -> None:
        """Fill ``row``, given the index of each visit (``merge_visits``)."""
        by_path: dict[str, list[int]] = defaultdict(list)
        for visit, index in visits.items():
            by_path[visit.path].append(index)
        twins = {name: visit for node, visit in self._visit.items() for name in self.known[node].names}
        for index, node in enumerate(self.calls):
            known = self.known[node]
            again = known.names[0].rstrip("'") if known.phase is Phase.RECOMPUTE and known.names else ""
            if found := self._visit.get(node) or twins.get(again):
                self.row[node] = visits[found]
            elif known.phase is not Phase.UPDATE and (index < self.update or known.module):
                self.row[node] = self._find(node, by_path)

    def _find(self, node: fx.Node, by_path: dict[str, list[int]]) -> int:
        """The visit of a call outside of forward: its module's; its arguments tell which, where there are several.

        A gradient flows upwards, so an op of backward belongs to the last visit that is not below the one its gradient
        comes from. A sum of gradients belongs where its last summand does.
        """
        path = self.known[node].module
        rows = _nearest(path, by_path)
        read = [source for source in node.all_input_nodes if source in self.row]
        late = [s for s in read if self.known[s].phase not in (Phase.FORWARD, Phase.RECOMPUTE)]
        if (len(rows) == 1 and path) or not read:
            return rows[-1] if rows else 0
        if not rows or _is_sum(node, late):
            return self.row[read[-1]]
        if late and self.known[node].phase is Phase.BACKWARD:
            return rows[max(bisect_right(rows, self.row[late[-1]]) - 1, 0)]
        return rows[min(bisect_left(rows, max(self.row[s] for s in read)), len(rows) - 1)]

    def lane(self, node: fx.Node) -> Lane:
        """The column of a call."""
        side = Lane.FORWARD_OUTSIDE if node in self.early else Lane.BACKWARD_OUTSIDE
        return _INSIDE.get(self.known[node].phase, side)


def _nearest(path: str, by_path: dict[str, list[int]]) -> list[int]:
    """The visits of a module, or of the nearest one around it that has any."""
    return next((by_path[p] for p in (path, *_around(path)) if p in by_path), [])


def _is_sum(node: fx.Node, late: list[fx.Node]) -> bool:
    """Whether a call adds up gradients: several operands, all of them late."""
    return len(late) == len(node.all_input_nodes) > 1 and schema.op_name(node) == "add"


def merge_visits(orders: Sequence[list[Visit]]) -> dict[Visit, int]:
    """All visits of several programs, to their places in one order.

    A visit that only a later program has comes behind the one that it follows there.
    """
    following: dict[Visit | None, list[Visit]] = defaultdict(list)
    seen: set[Visit] = set()
    for order in orders:
        for previous, visit in itertools.pairwise([None, *order]):
            if visit is not None and visit not in seen:
                seen.add(visit)
                following[previous].append(visit)
    merged: dict[Visit, int] = {}
    pending = list(following[None])
    while pending:
        visit = pending.pop()
        merged[visit] = len(merged)
        pending += following[visit]
    return merged
