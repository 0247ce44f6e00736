"""What differs between two programs, node by node."""

from __future__ import annotations

import difflib
import textwrap
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import fx

from graphopt.errors import GraphoptError
from graphopt.ir.files.text import Writer, ends_of_life, input_line, output_line, statement
from graphopt.ir.node import NodeInfo, OutputSpec, Phase, info, value_of
from graphopt.ir.ops.values import type_text
from graphopt.ir.program import Program
from graphopt.ir.words.written_units import counted, format_bytes

__all__ = ["diff"]

_CONTEXT = 3
_NAMES_SHOWN = 20


def diff(before: Program, after: Program, *, peaks: tuple[int, int] | None = None) -> str:
    """A unified diff of two programs' texts, under a line that sums it up.

    Nodes are matched by what they compute, not by how they are numbered, and the matched nodes of ``after`` are
    called what they are called in ``before`` (a new node whose name is taken gets ``_new`` behind it). A ``del`` shows
    only where a value's last use became another one. Decisions of planners are listed at the end.

    Args:
        before: of any stage.
        after: a later state of the same program, or another program.
        peaks: their predicted peaks in bytes, where they are known; simulated by default.

    Returns:
        ``+12 nodes, -3 nodes, 5 moved; peak 256.3 MB -> 67.1 MB``, and the hunks; each hunk's header says phase and
        module. Bytes are predicted peaks, of joint and step programs.
    """
    matched = _Matching(before, after).found
    old, new = _Side.of(before), _Side.of(after, matched, {node.name for node in before.graph.nodes})
    changes = list(_merge(old.entries, new.entries))
    summary = _summary(changes, _lifetimes(old, new, matched)) + _peaks(before, after, peaks)
    marks = _marks(after, matched)
    if not marks and all(change.sign == " " for change in changes):
        return f"{summary}: the programs are equal\n"
    lines = [summary]
    if any(change.sign != " " for change in changes):
        lines += [f"--- {_label(before)}", f"+++ {_label(after)}", *_hunks(changes)]
    return "\n".join([*lines, *marks]) + "\n"


def _label(program: Program) -> str:
    passes = ", ".join(program.history) or "as captured"
    return f"{program.title or 'program'}, {program.stage} stage: {passes}"


# --- which node of one program is which of the other -----------------------------------------------------------------


class _Matching:
    """Pairs the nodes of two programs; ``found`` maps nodes of the second to nodes of the first.

    Every node gets the number of what it computes, the same in both programs for equal calls of equal arguments.
    """

    def __init__(self, before: Program, after: Program) -> None:
        self.found: dict[fx.Node, fx.Node] = {}
        self._taken: set[fx.Node] = set()
        self._numbers: dict[Hashable, int] = {}
        self._number: dict[fx.Node, int] = {}
        for program in (before, after):
            self._count(program)
        self._old = [node for node in before.graph.nodes if node.op != "output"]
        self._new = [node for node in after.graph.nodes if node.op != "output"]
        self._pair_all(self._number.__getitem__)
        common = {self._number[node] for node in self._old} & {self._number[node] for node in self._new}
        known = Writer(lambda node: f"#{self._number[node]}" if self._number[node] in common else "_")
        self._pair_all(lambda node: _typed_key(node, known))
        self._align()
        self._pair_all(self._number.__getitem__, equal_counts=False)
        self._pair_all(_name_key, equal_counts=False)

    def _count(self, program: Program) -> None:
        writer = Writer(lambda node: f"#{self._number[node]}")
        for node, spec in zip(program.placeholders, program.inputs, strict=True):
            self._number[node] = self._numbers.setdefault(spec, len(self._numbers))
        for node in program.graph.nodes:
            if node.op not in ("placeholder", "output"):
                self._number[node] = self._numbers.setdefault(_call_key(node, writer), len(self._numbers))

    def _pair(self, new: fx.Node, old: fx.Node) -> None:
        self.found[new] = old
        self._taken.add(old)

    def _left(self) -> tuple[list[fx.Node], list[fx.Node]]:
        return [n for n in self._old if n not in self._taken], [n for n in self._new if n not in self.found]

    def _pair_all(self, key: Callable[[fx.Node], Hashable], *, equal_counts: bool = True) -> None:
        """Pair nodes of equal keys, in order; where both sides have different numbers of them only if asked to."""
        sides: list[dict[Hashable, list[fx.Node]]] = []
        for nodes in self._left():
            groups: dict[Hashable, list[fx.Node]] = defaultdict(list)
            for node in nodes:
                groups[key(node)].append(node)
            sides.append(groups)
        for label, new in sides[1].items():
            old = sides[0].get(label, [])
            if len(old) == len(new) or not equal_counts:
                for pair in zip(new, old, strict=False):
                    self._pair(*pair)

    def _align(self) -> None:
        """Pair what stands at the same place between pairs: runs of nodes that call the same ops on other arguments."""
        blank = Writer(lambda _: "_")
        pairs = {old: new for new, old in self.found.items()}
        old_keys = [(pairs[node].name,) if node in pairs else _typed_key(node, blank) for node in self._old]
        new_keys = [(node.name,) if node in self.found else _typed_key(node, blank) for node in self._new]
        matcher = difflib.SequenceMatcher(None, old_keys, new_keys, autojunk=False)
        for start, other, size in matcher.get_matching_blocks():
            for step in range(size):
                if self._new[other + step] not in self.found:
                    self._pair(self._new[other + step], self._old[start + step])


def _call_key(node: fx.Node, writer: Writer) -> Hashable:
    known = _known(node)
    if node.op in ("placeholder", "get_attr"):
        return node.op, str(node.target)
    opening, arguments, closing = writer.call(node)
    return opening, tuple(arguments), closing, known.phase, known.module


def _typed_key(node: fx.Node, writer: Writer) -> Hashable:
    return _call_key(node, writer), type_text(value_of(node))


def _name_key(node: fx.Node) -> Hashable:
    known = _known(node)
    return node.op, str(node.target), known.phase, known.names[0] if known.names else node.name


def _known(node: fx.Node) -> NodeInfo:
    try:
        return info(node)
    except GraphoptError:
        return NodeInfo(Phase.FORWARD, origin="added to the graph directly, without phase and module")


# --- a program as lines that can be compared -------------------------------------------------------------------------


@dataclass(frozen=True)
class _Entry:
    """One statement: what it is the statement of (equal on both sides where it is the same one), and its lines."""

    key: Hashable
    kind: str
    place: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class _Side:
    """A program as entries, and the key of the last use of every value, by the value's name."""

    entries: list[_Entry]
    last_use: dict[str, str]

    @classmethod
    def of(
        cls, program: Program, matched: dict[fx.Node, fx.Node] | None = None, taken: set[str] | None = None
    ) -> _Side:
        names = _names(program, matched or {}, taken or set())
        writer = Writer(names.__getitem__)
        ends = ends_of_life(program.graph)
        entries = [
            _Entry(("input", spec), "input", "inputs", (input_line(node, spec, names[node]),))
            for node, spec in zip(program.placeholders, program.inputs, strict=True)
        ]
        last_use: dict[str, str] = {}
        for node in program.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            known = _known(node)
            place = f"{known.phase.value}, {known.module or 'top level'}"
            plain = replace(known, policy=None, names=tuple(name for name in known.names if "::" not in name))
            lines = tuple(statement(node, plain, program.attributes, writer))
            entries.append(_Entry(("node", names[node]), "node", place, lines))
            for dead in sorted(names[value] for value in ends.get(node, ())):
                last_use[dead] = names[node]
                entries.append(_Entry(("del", dead, names[node]), "del", place, (f"del {dead}",)))
        entries += _output_entries(program, writer)
        return cls(entries, last_use)


def _output_entries(program: Program, writer: Writer) -> list[_Entry]:
    pairs: list[tuple[object, OutputSpec]] = list(zip(program.output_values, program.outputs, strict=True))
    return [
        _Entry(("output", spec), "output", "outputs", (f"return {output_line(writer.value(value), spec)}",))
        for value, spec in pairs
    ]


def _names(program: Program, matched: dict[fx.Node, fx.Node], taken: set[str]) -> dict[fx.Node, str]:
    """What nodes are called in the diff: a matched node like the one it matches."""
    used = set(taken)
    names: dict[fx.Node, str] = {}
    for node in program.graph.nodes:
        name = node.name
        if node in matched:
            name = matched[node].name
        else:
            while name in used:
                name += "_new"
            used.add(name)
        names[node] = name
    return names


# --- comparing -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Change:
    """One line of the result; ``what`` is added, removed, changed, moved or same."""

    sign: str
    line: str
    entry: _Entry
    what: str


def _merge(old: list[_Entry], new: list[_Entry]) -> Iterator[_Change]:
    """Both sides in one sequence: what stays is in both, and everything else stands before what follows it."""
    position = {entry.key: index for index, entry in enumerate(old)}
    after = {entry.key for entry in new}
    stay = {entry.key for entry in _in_order(new, position)}
    start = 0
    added: list[_Entry] = []
    for entry in new:
        if entry.key not in stay:
            added.append(entry)
            continue
        end = position[entry.key]
        yield from _removed(old[start:end], after)
        yield from _added(added, position)
        yield from _compared(old[end], entry)
        start, added = end + 1, []
    yield from _removed(old[start:], after)
    yield from _added(added, position)


def _added(entries: list[_Entry], before: Mapping[Hashable, int]) -> Iterator[_Change]:
    for entry in entries:
        what = "moved" if entry.key in before else "added"
        yield from (_Change("+", line, entry, what) for line in entry.lines)


def _removed(entries: list[_Entry], after: set[Hashable]) -> Iterator[_Change]:
    for entry in entries:
        # a moved entry counts where it went to; here it only leaves
        what = "left" if entry.key in after else "removed"
        yield from (_Change("-", line, entry, what) for line in entry.lines)


def _compared(old: _Entry, new: _Entry) -> Iterator[_Change]:
    if old.lines == new.lines:
        yield from (_Change(" ", line, new, "same") for line in new.lines)
        return
    matcher = difflib.SequenceMatcher(None, old.lines, new.lines, autojunk=False)
    for tag, old_start, old_end, new_start, new_end in matcher.get_opcodes():
        if tag == "equal":
            yield from (_Change(" ", line, new, "changed") for line in new.lines[new_start:new_end])
            continue
        yield from (_Change("-", line, old, "changed") for line in old.lines[old_start:old_end])
        yield from (_Change("+", line, new, "changed") for line in new.lines[new_start:new_end])


def _in_order(new: list[_Entry], position: dict[Hashable, int]) -> list[_Entry]:
    """The longest run of entries that stand in the same order on both sides; the others have moved."""
    common = [entry for entry in new if entry.key in position]
    tails: list[int] = []
    ends: list[int] = []
    previous: list[int] = []
    for index, entry in enumerate(common):
        place = bisect_left(tails, position[entry.key])
        previous.append(ends[place - 1] if place else -1)
        tails[place : place + 1] = [position[entry.key]]
        ends[place : place + 1] = [index]
    found: list[_Entry] = []
    index = ends[-1] if ends else -1
    while index >= 0:
        found.append(common[index])
        index = previous[index]
    return found[::-1]


def _hunks(changes: list[_Change]) -> Iterator[str]:
    """The changed lines with three lines around them, as in a unified diff."""
    touched = [index for index, change in enumerate(changes) if change.sign != " "]
    ranges: list[list[int]] = []
    for index in touched:
        if ranges and index - _CONTEXT <= ranges[-1][1] + _CONTEXT:
            ranges[-1][1] = index + 1
        else:
            ranges.append([index, index + 1])
    old = new = 1
    done = 0
    for first, last in ranges:
        start, end = max(0, first - _CONTEXT), min(len(changes), last + _CONTEXT)
        old += sum(change.sign != "+" for change in changes[done:start])
        new += sum(change.sign != "-" for change in changes[done:start])
        inside = changes[start:end]
        old_size = sum(change.sign != "+" for change in inside)
        new_size = sum(change.sign != "-" for change in inside)
        yield f"@@ -{old},{old_size} +{new},{new_size} @@ {changes[first].entry.place}"
        yield from (change.sign + change.line for change in inside)
        old, new, done = old + old_size, new + new_size, end


# --- summing up ------------------------------------------------------------------------------------------------------


def _summary(changes: list[_Change], lifetimes: int) -> str:
    def count(what: str, kind: str) -> int:
        return len({change.entry.key for change in changes if change.what == what and change.entry.kind == kind})

    parts = [f"+{count('added', 'node')} nodes", f"-{count('removed', 'node')} nodes"]
    parts += [f"{count(what, 'node')} {what}" for what in ("changed", "moved") if count(what, "node")]
    if lifetimes:
        parts.append(f"{counted(lifetimes, 'lifetimes')} changed")
    for kind in ("input", "output"):
        parts += [
            f"{sign}{count(what, kind)} {kind}s"
            for sign, what in (("+", "added"), ("-", "removed"), ("~", "changed"))
            if count(what, kind)
        ]
    return ", ".join(parts)


def _peaks(before: Program, after: Program, known: tuple[int, int] | None) -> str:
    if "forward" in (before.stage, after.stage):
        return ""
    try:
        old, new = known or (before.memory().peak_bytes, after.memory().peak_bytes)
    except GraphoptError as error:
        return f"; peak unknown: {error}"
    return f"; peak {format_bytes(old)}" + (f" -> {format_bytes(new)}" if old != new else "")


def _lifetimes(old: _Side, new: _Side, matched: dict[fx.Node, fx.Node]) -> int:
    """How many values that both programs have end after another node than before."""
    both = [node.name for node in matched.values()]
    return sum(old.last_use.get(name) != new.last_use.get(name) for name in both)


def _marks(after: Program, matched: dict[fx.Node, fx.Node]) -> list[str]:
    """The decisions that were taken or withdrawn, with the tensors' names."""
    groups: dict[str, list[str]] = defaultdict(list)
    for new in after.graph.nodes:
        if new not in matched:
            continue
        was, now = _known(matched[new]).policy, _known(new).policy
        if was is not now:
            name = next(iter(_known(new).names), new.name)
            for sign, policy in (("-", was), ("+", now)):
                if policy is not None:
                    groups[f"{sign}{policy.value}"].append(name)
    lines: list[str] = ["@@ decisions @@"] if groups else []
    for mark, names in groups.items():
        shown = names[:_NAMES_SHOWN] + ([f"and {len(names) - _NAMES_SHOWN} more"] if len(names) > _NAMES_SHOWN else [])
        head, *rest = textwrap.wrap(
            f"{mark} {len(names)}: {', '.join(shown)}", 110, break_long_words=False, break_on_hyphens=False
        )
        lines += [head, *(f"{mark[0]}    {line}" for line in rest)]
    return lines
