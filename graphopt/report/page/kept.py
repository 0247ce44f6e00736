"""What forward saves for backward, before and after the passes, with layers that do the same in one line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from graphopt.ir.files.text import short_source
from graphopt.ir.memory.timeline import MemoryTimeline, Storage
from graphopt.ir.node import Phase, info, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.values import tensors_of, type_text
from graphopt.report.page.sheet import merge_orders
from graphopt.report.page.timeline_columns import named_nodes
from graphopt.report.pictures.visits import Lane, Placement

__all__ = ["Activation", "activations", "activations_json", "kept_storages", "last_readers"]

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A part of a module path that is a number."""


def kept_storages(placement: Placement, refers: dict[fx.Node, list[Storage]]) -> list[Storage]:
    """The storages that the side of forward makes and the side of backward reads, in the order of making.

    Args:
        placement: which calls are on which side.
        refers: the storages behind each node's value.
    """
    found: dict[int, Storage] = {}
    for node in placement.calls:
        if node in placement.early:
            continue
        for source in node.all_input_nodes:
            found |= {id(s): s for s in refers[source] if s.owner in placement.early and s.bytes}
    return sorted(found.values(), key=lambda storage: storage.first)


def last_readers(placement: Placement, refers: dict[fx.Node, list[Storage]]) -> list[tuple[Storage, fx.Node]]:
    """What is saved for backward, and for each the call that stands for its last use.

    That is the first of the calls that read it in the row where it is read last.

    Args:
        placement: which calls are on which side, and in which row.
        refers: the storages behind each node's value.
    """
    reading: dict[int, dict[tuple[int, Lane], fx.Node]] = {}
    for node in placement.calls:
        if node in placement.early:
            continue
        for source in node.all_input_nodes:
            for storage in refers[source]:
                rows = reading.setdefault(id(storage), {})
                row = placement.row.get(node, -1), placement.lane(node)
                rows[row] = rows.pop(row, node)
    return [(s, next(reversed(reading[id(s)].values()))) for s in kept_storages(placement, refers)]


@dataclass(frozen=True, slots=True)
class Activation:
    """What forward makes for backward, of one layer or of ``count`` layers that are equal in everything shown.

    Attributes:
        name: of the tensor; ``*`` stands for the layers' numbers.
        count: how many tensors.
        type: dtype and shape; both, where passes changed it.
        before: bytes saved for backward without passes, all together; 0 where it is not saved.
        after: bytes saved with passes.
        what: what passes do with it: saved, recomputed, offloaded, not saved, new.
        source: the user's line.
        first: the node of the first one, of the program with passes where it is saved there.
    """

    name: str
    count: int
    type: str
    before: int
    after: int
    what: str
    source: str
    first: fx.Node


@dataclass(frozen=True, slots=True)
class _Kept:
    node: fx.Node
    name: str
    bytes: int
    type: str
    source: str


def activations(
    before: tuple[Placement, MemoryTimeline], after: tuple[Placement, MemoryTimeline]
) -> list[Activation]:  # fmt: skip
    """The table, in the order of forward.

    Args:
        before: the program without passes, and its timeline.
        after: the program with them; the same objects, where there are none.
    """
    old, new = _kept(*before), _kept(*after)
    again, away = _again(after[0]), _moved(after[0])
    rows: dict[tuple[str, str, int, int, str], list[_Kept]] = {}
    for name in merge_orders([list(old), list(new)]):
        was, now = old.get(name), new.get(name)
        some = [kept for kept in (was, now) if kept is not None]
        key = (
            _folded(name), " → ".join(dict.fromkeys(kept.type for kept in some)), was.bytes if was else 0,
            now.bytes if now else 0, _what(name, was, now, again, away),
        )  # fmt: skip
        rows.setdefault(key, []).append(some[-1])
    return [
        Activation(
            folded if len(items) > 1 else items[0].name, len(items), kind, old_size * len(items),
            new_size * len(items), what, short_source(items[0].source), items[0].node,
        )
        for (folded, kind, old_size, new_size, what), items in rows.items()
    ]  # fmt: skip


def _folded(name: str) -> str:
    """A tensor's name with ``*`` for the numbers in its module's path."""
    path, mark, rest = name.partition("::")
    return _NUMBER.sub("*", path) + mark + rest


def activations_json(rows: Sequence[Activation], record: dict[fx.Node, int]) -> list[list[Any]]:
    """Rows as plain lists, in the order of the fields of ``Activation``; ``record`` has the nodes of both programs."""
    return [[r.name, r.count, r.type, r.before, r.after, r.what, r.source, record[r.first]] for r in rows]


def _kept(placement: Placement, timeline: MemoryTimeline) -> dict[str, _Kept]:
    """What is saved, by name: the tensor's or, where it has none, its node's and which of the node's results it is."""
    found = {}
    named = named_nodes(timeline)
    for storage in kept_storages(placement, timeline.refers):
        made = timeline.refers[storage.owner]
        place = next((index for index, one in enumerate(made) if one is storage), 0)
        name = storage.names[0] if storage.names else storage.owner.name
        name = f"{name}.{place}" if name in found else name
        tensors = tensors_of(value_of(storage.owner))
        kind = type_text(tensors[place]) if len(tensors) == len(made) else ""
        found[name] = _Kept(
            named.get(id(storage), storage.owner), name, storage.bytes, kind, info(storage.owner).source
        )
    return found


def _again(placement: Placement) -> set[str]:
    """The names of what is recomputed."""
    return {
        name.rstrip("'")
        for node in placement.calls
        if placement.known[node].phase is Phase.RECOMPUTE
        for name in placement.known[node].names
    }


def _moved(placement: Placement) -> set[str]:
    """The names of what forward hands to a transfer."""
    return {
        name
        for node in placement.calls
        if placement.known[node].phase is Phase.TRANSFER and node in placement.early
        for source in node.all_input_nodes
        for name in info(schema.storage_root(source)).names
    }


def _what(name: str, was: _Kept | None, now: _Kept | None, again: set[str], away: set[str]) -> str:
    if now is not None:
        return "saved" if was is not None else "new"
    if name in away:
        return "offloaded"
    return "recomputed" if name in again else "not saved"
