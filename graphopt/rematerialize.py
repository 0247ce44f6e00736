"""Acting on decisions: forward values marked for recomputation are computed again in backward, where first needed."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from graphopt import _torch
from graphopt.ops import schema
from graphopt.ops.statistics import without_statistics
from graphopt.program import Phase, Policy, Program, info, set_info

__all__ = ["Rematerialized", "can_recompute", "rematerialize"]


@dataclass
class Rematerialized:
    """What a rematerialization did.

    Attributes:
        clones: the clone of each forward node that now runs twice.
        replayed: the forward results whose random numbers the clones draw again from a saved generator state.
        states: the saved generator states.
        kept: nodes that were asked for, and that backward reads, but that may not run again, with the reason.
    """

    clones: dict[fx.Node, fx.Node] = field(default_factory=dict)
    replayed: list[fx.Node] = field(default_factory=list)
    states: list[fx.Node] = field(default_factory=list)
    kept: dict[fx.Node, str] = field(default_factory=dict)


def can_recompute(node: fx.Node) -> bool:
    """Whether a forward node may run a second time: no collectives, no writes, no effects (random ops are replayed)."""
    if node.op != "call_function" or schema.is_collective(node) or schema.mutated_inputs(node):
        return False
    if node.target is operator.getitem:
        return True
    return isinstance(node.target, _torch.OpOverload) and (schema.is_random(node) or not schema.has_effect(node))


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
            result = _save_generator(program, node, done)
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


def _allowed(program: Program, asked: list[fx.Node], done: Rematerialized) -> set[fx.Node]:
    """Those of the nodes that may run twice; the others that backward reads are noted in ``done.kept``."""
    stale = _overwritten(program)
    possible = {node for node in asked if can_recompute(node)}
    reading_stale = {node for node in possible if stale.intersection(_sources(node))}
    wanted = possible - reading_stale
    for node in asked:
        element = node.target is operator.getitem and not _is_replayable(node)
        if node in wanted and element and node.args[0] not in wanted:
            wanted.discard(node)
    for node in asked:
        if node not in wanted and any(u.op != "output" and info(u).phase is not Phase.FORWARD for u in node.users):
            source = node.args[0] if node.target is operator.getitem else node
            reason = "it reads a buffer that forward overwrites" if source in reading_stale else "it has an effect"
            done.kept[node] = reason
    return wanted


def _is_replayable(node: fx.Node) -> bool:
    """Whether a node is the result half of an op that saved its generator state."""
    if node.target is not operator.getitem or node.args[1] != 1:
        return False
    source = node.args[0]
    return isinstance(source, fx.Node) and source.target is _torch.run_and_save_rng_state


def _sources(node: fx.Node) -> list[fx.Node]:
    """What running a node again needs."""
    if _is_replayable(node):
        return node.args[0].all_input_nodes  # type: ignore[union-attr]
    pure = without_statistics(node)
    if pure is None:
        return node.all_input_nodes
    return [argument for argument in pure[1] if isinstance(argument, fx.Node)]


def _needed(program: Program, wanted: set[fx.Node]) -> list[fx.Node]:
    """The wanted nodes that something after forward needs, directly or through other wanted nodes; program order."""
    found: set[fx.Node] = set()
    for node in reversed(program.graph.nodes):
        late = node.op != "output" and info(node).phase is not Phase.FORWARD
        if late or node in found:
            found.update(source for source in _sources(node) if source in wanted)
    return [node for node in program.graph.nodes if node in found]


def _overwritten(program: Program) -> set[fx.Node]:
    """Placeholders that forward writes to, and views of them: reading them again would read other values."""
    pending = [
        target
        for node in program.phase_nodes(Phase.FORWARD)
        if node.op == "call_function"
        for target in schema.mutated_inputs(node)
    ]
    found = set(pending)
    while pending:
        for user in pending.pop().users:
            if user.op == "call_function" and schema.is_view(user) and user not in found:
                found.add(user)
                pending.append(user)
    return found


def _save_generator(program: Program, node: fx.Node, done: Rematerialized) -> fx.Node:
    """Let a random op save the generator's state before it runs; returns the node that now holds its result."""
    known = info(node)
    common: dict[str, Any] = {
        "phase": Phase.FORWARD,
        "like": node,
        "origin": "keeps the generator's state for a replay",
    }
    both = program.insert(
        _torch.run_and_save_rng_state, (node.target, *node.args), dict(node.kwargs), before=node,
        hint=f"{node.name}_random", **common,
    )  # fmt: skip
    state = program.insert(operator.getitem, (both, 0), before=node, hint=f"{node.name}_state", **common)
    result = program.insert(operator.getitem, (both, 1), before=node, hint=f"{node.name}_result", **common)
    result.meta["val"] = node.meta["val"]
    set_info(result, replace(info(result), names=known.names, region=known.region))
    node.replace_all_uses_with(result)
    program.graph.erase_node(node)
    done.states.append(state)
    done.replayed.append(result)
    return result


def _clone(
    program: Program, node: fx.Node, before: fx.Node, wanted: Mapping[fx.Node, str], done: Rematerialized
) -> None:
    """Make the clone of ``node`` in front of ``before``, after the clones that it needs and that do not exist yet."""
    pending = [node]
    while pending:
        current = pending[-1]
        missing = [n for n in _sources(current) if n in wanted and n not in done.clones]
        if current not in done.clones and missing:
            pending += reversed(missing)
            continue
        pending.pop()
        if current not in done.clones:
            done.clones[current] = _clone_one(program, current, before, done.clones, wanted[current])
            set_info(current, replace(info(current), policy=Policy.MUST_RECOMPUTE))


def _clone_one(
    program: Program, node: fx.Node, before: fx.Node, clones: dict[fx.Node, fx.Node], origin: str
) -> fx.Node:
    pure = without_statistics(node)
    with program.graph.inserting_before(before):
        if _is_replayable(node):
            both: Any = node.args[0]
            state = next(user for user in both.users if user.args[1] == 0)
            args, kwargs = _torch.map_aggregate(
                ((state, *both.args), both.kwargs), lambda a: clones.get(a, a) if isinstance(a, fx.Node) else a
            )
            clone = program.graph.call_function(_torch.run_with_rng_state, args, kwargs)
        elif pure is not None:
            args = tuple(clones.get(a, a) if isinstance(a, fx.Node) else a for a in pure[1])
            clone = program.graph.call_function(pure[0], args)
        else:
            clone = program.graph.node_copy(node, lambda n: clones.get(n, n))
    clone.meta = {key: value for key, value in node.meta.items() if key in ("val", "stack_trace")}
    if pure is not None:
        clone.meta["val"] = tuple(node.meta["val"][: pure[2]])
    known = info(node)
    names = tuple(f"{name}'" for name in known.names)
    set_info(clone, replace(known, phase=Phase.RECOMPUTE, names=names, origin=origin, policy=None, region=None))
    return clone
