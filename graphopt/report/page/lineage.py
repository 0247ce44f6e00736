"""Which calls of consecutive programs are the same one, and what a pass created, erased, moved and rewired."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import fx

from graphopt.ir.files.text import Writer
from graphopt.ir.node import info
from graphopt.ir.program import Program

__all__ = ["Difference", "Lineage", "follow"]

Key = Callable[[fx.Node], Hashable | None]


@dataclass(slots=True)
class Difference:
    """What happened to a program on the way from one snapshot to the next; every call is in one list at most.

    Attributes:
        created: calls that are new.
        erased: calls of the program before that are gone.
        moved: calls that run at another place among those that stayed (the fewest calls that explain the new order).
        rewired: calls that stayed in place and read other values, or do something else with them.
    """

    created: list[fx.Node] = field(default_factory=list)
    erased: list[fx.Node] = field(default_factory=list)
    moved: list[fx.Node] = field(default_factory=list)
    rewired: list[fx.Node] = field(default_factory=list)


@dataclass(slots=True)
class Lineage:
    """The nodes of the snapshots of one stage.

    Attributes:
        numbers: for each snapshot, a number for each of its nodes; equal numbers stand for the same one.
        differences: what happened before each snapshot; None before the first.
    """

    numbers: list[dict[fx.Node, int]]
    differences: list[Difference | None]

    def between(self, first: int, last: int) -> Difference:
        """What happened from one snapshot to a later one, over all those in between."""
        old, new = self.numbers[first], self.numbers[last]
        named = {number: node for node, number in old.items()}
        pairs = {node: named[number] for node, number in new.items() if number in named}
        return _difference(old, new, pairs)


def follow(programs: Sequence[Program], lowered: Sequence[bool]) -> Lineage:
    """Follow every node through the snapshots of one stage.

    Passes leave the names of nodes alone, so nodes of the same name and op are the same. A program that was lowered
    anew has names of its own; there the names for users come first.

    Args:
        programs: the snapshots, in order; output nodes are left out.
        lowered: for each, whether it was made by lowering another program (rather than by a pass on the one before).
    """
    lineage = Lineage([], [])
    count = 0
    for program, anew in zip(programs, lowered, strict=True):
        nodes = [node for node in program.graph.nodes if node.op != "output"]
        known = lineage.numbers[-1] if lineage.numbers else {}
        pairs = _pairs(list(known), nodes, (_user_key, _name_key) if anew else (_name_key, _user_key))
        number: dict[fx.Node, int] = {}
        for node in nodes:
            if node in pairs:
                number[node] = known[pairs[node]]
            else:
                number[node], count = count, count + 1
        lineage.differences.append(_difference(known, number, pairs) if lineage.numbers else None)
        lineage.numbers.append(number)
    return lineage


def _pairs(old: Iterable[fx.Node], new: Iterable[fx.Node], keys: Iterable[Key]) -> dict[fx.Node, fx.Node]:
    """Nodes of the second program, to those of the first that they are, by the first key that finds one."""
    found: dict[fx.Node, fx.Node] = {}
    left = list(old)
    for key in keys:
        table = {label: node for node in reversed(left) if (label := key(node)) is not None}
        for node in new:
            if node not in found and (match := table.pop(key(node), None)) is not None:
                found[node] = match
        taken = set(found.values())
        left = [node for node in left if node not in taken]
    return found


def _name_key(node: fx.Node) -> Hashable:
    return (node.name, *_sort(node))


def _user_key(node: fx.Node) -> Hashable | None:
    names = info(node).names
    return (names[0], *_sort(node)) if names else None


def _sort(node: fx.Node) -> tuple[Hashable, ...]:
    known = info(node)
    return node.op, "" if node.op == "placeholder" else str(node.target), known.phase, known.module


def _difference(old: dict[fx.Node, int], new: dict[fx.Node, int], pairs: dict[fx.Node, fx.Node]) -> Difference:
    calls = {node: index for index, node in enumerate(node for node in old if node.op != "placeholder")}
    stayed = [node for node in new if node in pairs and node.op != "placeholder"]
    in_order = increasing([calls[pairs[node]] for node in stayed])
    moved = [node for position, node in enumerate(stayed) if position not in in_order]
    gone = set(calls) - set(pairs.values())
    apart = set(moved)
    return Difference(
        [node for node in new if node not in pairs and node.op != "placeholder"],
        [node for node in calls if node in gone],
        moved,
        [n for n in stayed if n not in apart and _reads(n, new) != _reads(pairs[n], old)],
    )


def _reads(node: fx.Node, number: dict[fx.Node, int]) -> Hashable:
    """What a call does with which values, the same in both programs where it is the same."""
    if node.op != "call_function":
        return str(node.target)
    opening, arguments, closing = Writer(lambda source: f"#{number[source]}").call(node)
    return opening, tuple(arguments), closing


def increasing(values: Sequence[int]) -> set[int]:
    """The positions of a longest increasing subsequence (patience sorting, in O(n log n))."""
    tails: list[int] = []
    ends: list[int] = []
    previous: list[int] = []
    for position, value in enumerate(values):
        place = bisect_left(tails, value)
        previous.append(ends[place - 1] if place else -1)
        tails[place : place + 1] = [value]
        ends[place : place + 1] = [position]
    found: set[int] = set()
    position = ends[-1] if ends else -1
    while position >= 0:
        found.add(position)
        position = previous[position]
    return found
