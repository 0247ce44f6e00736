"""Calls of backward in an order in which what they free is free sooner.

Of two calls that do not need each other, the one that frees more than it makes runs first: a product for the gradient
of a weight, say, which is the last to read an activation, in front of the product that makes the next gradient. Each
exchange of two leaves the bytes that are alive at every call as they were or lower, and all results to the bit.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from torch import fx

from graphopt.analysis.liveness import storages_of
from graphopt.ir.memory.timeline import Storage
from graphopt.ir.node import Phase, own_phase, slice_number
from graphopt.ir.ops import schema
from graphopt.ir.program import Program

__all__ = ["freeing_first"]


def freeing_first(program: Program, *, weigh: bool = True) -> tuple[Program, str] | None:
    """A program whose calls of backward free what they can sooner.

    Args:
        program: is only read.
        weigh: whether to look at the peak; not where another program of the capture has that order already.

    Returns:
        a copy in that order, with what a user should read; None where nothing moves, or where a compiler, which has an
        order of its own, makes the code.
    """
    if program.context.compiled:
        return None
    trial = program.copy()
    order = _Order(trial)
    moved = sum(order.improve(run) for run in list(_runs(trial)))
    if not moved or (weigh and trial.memory().peak_bytes > program.memory().peak_bytes):
        return None
    if moved == 1:
        return trial, "1 op of backward runs sooner, for what it is the last to read"
    return trial, f"{moved} ops of backward run sooner, for what they are the last to read"


def _runs(program: Program) -> Iterator[list[fx.Node]]:
    """The calls of backward that follow each other, in one slice of the batch where that is in slices."""

    def kind(node: fx.Node) -> tuple[bool, int | None]:
        if node.op != "call_function" or own_phase(node) is not Phase.BACKWARD:
            return False, None
        return True, slice_number(node)

    for (backward, _), run in groupby(program.graph.nodes, kind):
        if backward:
            yield list(run)


class _Order:
    """The order of a program's calls, and who reads which storage."""

    def __init__(self, program: Program) -> None:
        self._graph = program.graph
        storages, self._refers = storages_of(program)
        end = sum(node.op not in ("placeholder", "output") for node in program.graph.nodes)
        self._lasting = {id(s) for s in storages if s.owner.op == "placeholder" or s.last >= end}
        self._place = {node: place for place, node in enumerate(program.graph.nodes)}
        self._readers: dict[int, set[fx.Node]] = {}
        self._made: dict[fx.Node, list[Storage]] = {}
        for storage in storages:
            self._made.setdefault(storage.owner, []).append(storage)
        for node in program.graph.nodes:
            if not _is_of_another(node):
                for key in self._read(node):
                    self._readers.setdefault(key, set()).add(node)

    def improve(self, run: Sequence[fx.Node]) -> int:
        """Put the calls of a run into a better order; how many have moved."""
        calls = [node for node in run if not _is_of_another(node)]
        needs = self._needs(run, calls)
        places = [self._place[node] for node in calls]
        moved = 0
        for index in range(1, len(calls)):
            at = index
            while at and self._goes_first(calls[at], calls[at - 1], needs):
                calls[at - 1], calls[at] = calls[at], calls[at - 1]
                self._place[calls[at - 1]], self._place[calls[at]] = places[at - 1], places[at]
                at -= 1
            moved += at < index
        if moved:
            self._write(run, calls, needs)
        return moved

    def _goes_first(self, node: fx.Node, before: fx.Node, needs: dict[fx.Node, set[fx.Node]]) -> bool:
        """Whether a call had better run in front of the one before it."""
        if before in needs[node] or schema.has_effect(node) or schema.has_effect(before):
            return False
        shared = self._read(before)
        if any(id(storage) in shared for storage in self._refers[node]):
            return False  # it is taken in place of what the other one reads, which it could not be in front of it
        freed = [storage for storage in self._freed(node) if id(storage) not in shared]
        if sum(s.bytes for s in freed) <= self._bytes_made(node):
            return False
        return self._bytes_made(before) >= sum(s.bytes for s in self._freed(before))

    def _read(self, node: fx.Node) -> dict[int, Storage]:
        return {id(s): s for source in node.all_input_nodes for s in self._refers.get(source, ())}

    def _freed(self, node: fx.Node) -> list[Storage]:
        """What a call is the last to read."""
        place = self._place[node]
        return [
            storage
            for key, storage in self._read(node).items()
            if key not in self._lasting and all(self._place[reader] <= place for reader in self._readers[key])
        ]

    def _bytes_made(self, node: fx.Node) -> int:
        return sum(storage.bytes for storage in self._made.get(node, ()))

    def _needs(self, run: Sequence[fx.Node], calls: Sequence[fx.Node]) -> dict[fx.Node, set[fx.Node]]:
        """The calls of a run that each one reads, through views."""
        inside, found = set(run), dict[fx.Node, set[fx.Node]]()
        for node in calls:
            pending, seen = list(node.all_input_nodes), set[fx.Node]()
            while pending:
                source = pending.pop()
                if source in inside and source not in seen:
                    seen.add(source)
                    if _is_of_another(source):
                        pending += source.all_input_nodes
            found[node] = seen
        return found

    def _write(self, run: Sequence[fx.Node], calls: Iterable[fx.Node], needs: dict[fx.Node, set[fx.Node]]) -> None:
        """Put a run's calls into an order: views in front of who reads them, elements behind the call that makes them.

        Views that no call of the run reads, such as those that an update reads, stay behind what they are views of.
        """
        inside, done = set(run), set[fx.Node]()
        waiting = {source for sources in needs.values() for source in sources if not _is_element(source)}
        anchor = run[-1].next

        def put(node: fx.Node) -> None:
            for source in node.all_input_nodes:
                if source in inside and source not in done:
                    put(source)
            done.add(node)
            anchor.prepend(node)
            for user in node.users:
                if user in inside and user not in done and user not in waiting and _is_of_another(user):
                    put(user)

        for node in (*calls, *run):
            if node not in done:
                put(node)


def _is_of_another(node: fx.Node) -> bool:
    """Whether a node is a view of another call's result, or an element of it: it takes neither time nor memory."""
    return node.op == "call_function" and (_is_element(node) or schema.is_view(node))


def _is_element(node: fx.Node) -> bool:
    return node.target is operator.getitem
