"""Acting on a plan: calls are recomputed where the plan says so, and what comes later reads the newest values."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from graphopt.ir.node import Phase, Policy, info, value_of
from graphopt.ir.ops import schema
from graphopt.ir.program import Program
from graphopt.rewriting.memory.recompute.replay import (
    CloneLabel,
    clone_call,
    is_replayable,
    label_clone,
    save_generator,
)

__all__ = ["Again", "Recomputation", "recompute"]


@dataclass(frozen=True, slots=True)
class Again:
    """A value that is made again: ``node`` runs once more just before ``before`` runs; ``origin`` says why.

    With ``instead``, a node that stands in front of ``before`` already, nothing runs: from there on it holds the value.
    """

    node: fx.Node
    before: fx.Node
    origin: str
    instead: fx.Node | None = None


@dataclass
class Recomputation:
    """What was inserted.

    Attributes:
        clones: of each call, in order.
        replayed: the random results that clones draw again.
        replaced: for each random call that now saves its state, the node that holds its result.
    """

    clones: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    replayed: list[fx.Node] = field(default_factory=list)
    replaced: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def first(self, node: fx.Node) -> fx.Node:
        """The call that runs where a call of the original program ran; a random op that saves its state is another."""
        result = self.replaced.get(node)
        return node if result is None else result.args[0]  # type: ignore[return-value]


def recompute(program: Program, runs: Sequence[Again]) -> Recomputation:
    """Insert clones of calls, and let everything behind each of them read it instead of earlier runs.

    Views are made anew on the values that are read. Random ops replay the generator's state of their first run.

    Args:
        program: a joint or step program, rewritten in place.
        runs: in the order in which they take place.
    """
    done = Recomputation()
    replaced = done.replaced
    for node in dict.fromkeys(again.node for again in runs if again.instead is None):
        if schema.is_random(node):
            replaced[node], _ = save_generator(program, node)
            done.replayed.append(replaced[node])
    by_anchor: dict[fx.Node, list[Again]] = {}
    for again in runs:
        anchor = done.first(again.before)
        by_anchor.setdefault(anchor, []).append(replace(again, node=replaced.get(again.node, again.node)))
    walker = _Walker(program, done)
    for node in program.nodes:
        for again in by_anchor.get(node, ()):
            if again.instead is not None:
                walker.stands_for(again.node, again.instead)
            else:
                walker.again(again.node, node, again.origin)
        walker.visit(node)
    program.set_policy(done.clones, Policy.MUST_RECOMPUTE)
    return done


class _Walker:
    """Goes through a program in order, knowing which node holds each value at the moment."""

    def __init__(self, program: Program, done: Recomputation) -> None:
        self._program = program
        self._done = done
        self._newest: dict[fx.Node, fx.Node] = {}
        self._reads: dict[fx.Node, dict[fx.Node, fx.Node]] = {}
        self._views: dict[fx.Node, tuple[list[fx.Node], fx.Node]] = {}

    def visit(self, node: fx.Node) -> None:
        """Let a node read the newest values; from what it read before, what is newest later can be told."""
        if node.op in ("placeholder", "output"):
            return
        reads = {source: self.current(source, node) for source in node.all_input_nodes}
        for source, newest in reads.items():
            if newest is not source:
                node.replace_input_with(source, newest)
        self._reads[node] = {newest: source for source, newest in reads.items()}

    def current(self, node: fx.Node, before: fx.Node) -> fx.Node:
        """The node that holds a value now; where that needs a new view, it is made in front of ``before``."""
        newest = self._newest.get(node)
        if newest is not None:
            return newest
        if node.op != "call_function" or not _sees_through(node):
            return node
        reads = self._read_now(node, before)
        bases = list(reads.values())
        if bases == list(reads):
            return node
        known = self._views.get(node)
        if known is not None and known[0] == bases:
            return known[1]
        view = self._copy(node, before, reads, CloneLabel("a view of what is recomputed", _phase_at(before)))
        self._views[node] = (bases, view)
        return view

    def _read_now(self, node: fx.Node, before: fx.Node) -> dict[fx.Node, fx.Node]:
        """For each argument that a visited node has, the node that holds its value now."""
        return {given: self.current(source, before) for given, source in self._reads[node].items()}

    def stands_for(self, node: fx.Node, newest: fx.Node) -> None:
        """From here on another node holds a value."""
        self._newest[node] = newest

    def again(self, node: fx.Node, before: fx.Node, origin: str) -> None:
        """Run a call again here."""
        made = self._done.clones.setdefault(node, [])
        reader = node.args[0] if is_replayable(node) else node
        reads = self._read_now(reader, before)  # type: ignore[arg-type]
        label = CloneLabel(origin, _phase_at(before), len(made) + 1)
        clone = clone_call(self._program, node, before, lambda n: reads.get(n, n), label)
        made.append(clone)
        if isinstance(value_of(node), torch.Tensor):
            self._newest[node] = clone
            return
        count = len(value_of(clone))
        for element in [user for user in node.users if user.target is operator.getitem]:
            if element.args[1] < count:  # type: ignore[operator]
                self._newest[element] = self._copy(element, before, {node: clone}, label)

    def _copy(self, node: fx.Node, before: fx.Node, reads: dict[fx.Node, fx.Node], label: CloneLabel) -> fx.Node:
        with self._program.graph.inserting_before(before):
            copy = self._program.graph.node_copy(node, lambda n: reads.get(n, n))
        label_clone(copy, node, label)
        return copy


def _sees_through(node: fx.Node) -> bool:
    """Whether a node's value is that of its arguments, seen differently."""
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and source.op == "call_function" and _sees_through(source)
    return schema.is_view(node)


def _phase_at(before: fx.Node) -> Phase:
    """Forward for what is recomputed within forward, so that it stays there when forward and backward are parted."""
    early = before.op != "output" and info(before).phase is Phase.FORWARD
    return Phase.FORWARD if early else Phase.RECOMPUTE
