"""Acting on decisions: forward values marked for recomputation are recomputed in backward, where first needed."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from torch import fx

from graphopt.ir.node import Phase, Policy, info, set_info
from graphopt.ir.ops import schema
from graphopt.ir.program import Program
from graphopt.rewriting.memory.recompute.replay import (
    CloneLabel,
    can_recompute,
    clone_call,
    is_replayable,
    save_generator,
    sources,
    stale_values,
)

__all__ = ["Rematerialized", "recomputed", "rematerialize"]


@dataclass
class Rematerialized:
    """What a rematerialization did.

    Attributes:
        clones: the clone of each forward node that now runs twice.
        replayed: the forward results whose random numbers the clones draw again from a saved generator state.
        states: the saved generator states.
        kept: nodes that were asked for, and that backward reads, but that may not be recomputed, with the reason.
    """

    clones: dict[fx.Node, fx.Node] = field(default_factory=dict)
    replayed: list[fx.Node] = field(default_factory=list)
    states: list[fx.Node] = field(default_factory=list)
    kept: dict[fx.Node, str] = field(default_factory=dict)


def rematerialize(program: Program, nodes: Iterable[fx.Node], *, origin: str | Mapping[fx.Node, str]) -> Rematerialized:
    """Compute ``nodes`` again in backward instead of keeping their values.

    Each clone stands just before the first node after forward that needs it, behind the clones it needs in turn, and
    exists once. Random ops replay the generator state they started from, so a clone equals its original and the
    generator ends where it would end anyway. Nodes that may not run twice are kept.

    Args:
        program: a joint or step program, rewritten in place.
        nodes: forward nodes; those whose values nothing after forward needs are left alone.
        origin: who asks, for provenance, or that text for each node.
    """
    done = Rematerialized()
    wanted = _allowed(program, [node for node in nodes if info(node).phase is Phase.FORWARD], done)
    origins = dict.fromkeys(wanted, origin) if isinstance(origin, str) else {n: origin.get(n, "") for n in wanted}
    for node in _needed(program, wanted):
        if schema.is_random(node):
            wanted.discard(node)
            result, state = save_generator(program, node)
            done.states.append(state)
            done.replayed.append(result)
            wanted.add(result)
            origins[result] = origins.pop(node)
    for consumer in program.nodes:
        if consumer.op in ("placeholder", "output") or info(consumer).phase is Phase.FORWARD:
            continue
        for value in consumer.all_input_nodes:
            if value in wanted:
                _clone(program, value, consumer, origins, done)
                consumer.replace_input_with(value, done.clones[value])
    return done


def recomputed(program: Program, nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Those of some forward nodes that ``rematerialize`` would recompute; the program is only read."""
    return _needed(program, _allowed(program, [*nodes], Rematerialized()))


def _allowed(program: Program, asked: list[fx.Node], done: Rematerialized) -> set[fx.Node]:
    """Those of the nodes that may run twice; the others that backward reads are noted in ``done.kept``."""
    stale = stale_values(program)
    possible = {node for node in asked if can_recompute(node)}
    reading_stale = {node for node in possible if stale.intersection(sources(node))}
    wanted = possible - reading_stale
    for node in asked:
        element = node.target is operator.getitem and not is_replayable(node)
        if element and node.args[0] not in wanted:
            wanted.discard(node)
    for node in asked:
        if node not in wanted and any(_is_late(user) for user in node.users):
            source = node.args[0] if node.target is operator.getitem else node
            reason = "it reads a buffer that forward overwrites" if source in reading_stale else "it has an effect"
            done.kept[node] = reason
    return wanted


def _is_late(node: fx.Node) -> bool:
    """Whether a node runs after forward; the program's output does not count."""
    return node.op != "output" and info(node).phase is not Phase.FORWARD


def _needed(program: Program, wanted: set[fx.Node]) -> list[fx.Node]:
    """The wanted nodes that something after forward needs, directly or through other wanted nodes; program order."""
    found: set[fx.Node] = set()
    for node in reversed(program.graph.nodes):
        if _is_late(node) or node in found:
            found.update(source for source in sources(node) if source in wanted)
    return [node for node in program.graph.nodes if node in found]


def _clone(
    program: Program, node: fx.Node, before: fx.Node, wanted: Mapping[fx.Node, str], done: Rematerialized
) -> None:
    """Make the clone of ``node`` in front of ``before``, after the clones that it needs and that do not exist yet."""
    pending = [node]
    while pending:
        current = pending[-1]
        missing = [n for n in sources(current) if n in wanted and n not in done.clones]
        if current not in done.clones and missing:
            pending += reversed(missing)
            continue
        pending.pop()
        if current not in done.clones:
            label = CloneLabel(wanted[current])
            done.clones[current] = clone_call(program, current, before, lambda n: done.clones.get(n, n), label)
            set_info(current, replace(info(current), policy=Policy.MUST_RECOMPUTE))
