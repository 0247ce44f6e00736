"""Running a call a second time: which calls may, and clones of them that give the same values to the last bit."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from graphopt import _torch
from graphopt.ir.node import Phase, info, info_like, set_info, set_value, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.layers.rms_norm import without_statistics
from graphopt.ir.program import Program

__all__ = [
    "CloneLabel",
    "can_recompute",
    "clone_call",
    "forget_generator",
    "is_replayable",
    "label_clone",
    "replayed_result",
    "save_generator",
    "sources",
    "stale_values",
]


def can_recompute(node: fx.Node) -> bool:
    """Whether a forward node may run a second time: no writes, no effects, of collectives gathers of shards alone.

    Random ops are replayed.
    """
    if schema.is_gather(node):
        return True
    if node.op != "call_function" or schema.is_collective(node) or schema.mutated_inputs(node):
        return False
    if schema.is_random(node) and not node.all_input_nodes and node.kwargs.get("device") is None:
        return False  # torch replays the generator of a device that it knows from the arguments
    if schema.op_name(node) == "quantize":
        return False  # what is stored in a few bits waits so until backward reads it
    if node.target is operator.getitem:
        return True
    return isinstance(node.target, _torch.OpOverload) and (schema.is_random(node) or not schema.has_effect(node))


def stale_values(program: Program) -> set[fx.Node]:
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


def is_replayable(node: fx.Node) -> bool:
    """Whether a node is the result half of an op that saved its generator state."""
    if node.target is not operator.getitem or node.args[1] != 1:
        return False
    source = node.args[0]
    return isinstance(source, fx.Node) and source.target is _torch.run_and_save_rng_state


def sources(node: fx.Node) -> list[fx.Node]:
    """What running a node again needs."""
    if is_replayable(node):
        return node.args[0].all_input_nodes  # type: ignore[union-attr]
    _, args, kwargs, _ = _second_run(node)
    return list(dict.fromkeys(schema.nodes_in((args, kwargs))))


def _second_run(node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any], int | None]:
    """What calling an op a second time calls: the op, its arguments, and how many of its results that gives.

    BatchNorm runs in the form that leaves its statistics alone; everything else as it is, with all results (None).
    """
    pure = without_statistics(node)
    if pure is None:
        return node.target, node.args, dict(node.kwargs), None
    target, args, results = pure
    return target, args, {}, results


def save_generator(program: Program, node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Let a random op save the generator's state before it runs.

    Returns:
        The node that now holds its result, and the node of the saved state.
    """
    known = info(node)
    common: dict[str, Any] = {
        "before": node,
        "phase": Phase.FORWARD,
        "like": node,
        "origin": "keeps the generator's state for a replay",
    }
    saving, arguments = _torch.run_and_save_rng_state, (node.target, *node.args)
    both = program.insert(saving, arguments, dict(node.kwargs), hint=f"{node.name}_random", **common)
    state = program.insert(operator.getitem, (both, 0), hint=f"{node.name}_state", **common)
    result = program.insert(operator.getitem, (both, 1), hint=f"{node.name}_result", **common)
    set_value(result, value_of(node))
    set_info(result, replace(info(result), names=known.names, region=known.region))
    node.replace_all_uses_with(result)
    program.graph.erase_node(node)
    return result, state


def replayed_result(program: Program, state: fx.Node) -> fx.Node:
    """The result of the random op that has saved a state of the generator; it is there again where nothing read it."""
    both: Any = state.args[0]
    found = next((user for user in both.users if is_replayable(user)), None)
    if found is None:
        how: dict[str, Any] = {"phase": Phase.FORWARD, "origin": info(both).origin, "like": both}
        found = program.insert(operator.getitem, (both, 1), after=both, **how)
        set_value(found, value_of(both)[1])
    return found


def forget_generator(program: Program, result: fx.Node) -> fx.Node:
    """Let a random op that has saved the generator's state be as it was before, where nothing replays it.

    Args:
        program: rewritten in place.
        result: of the op; see ``save_generator``.

    Returns:
        the node of the op; ``result`` itself, where its state is read.
    """
    both: Any = result.args[0]
    states = [user for user in both.users if user is not result]
    if any(state.users for state in states):
        return result
    target, *args = both.args
    known = info(result)
    how: dict[str, Any] = {"phase": known.phase, "origin": "capture", "like": both, "names": known.names}
    plain = program.insert(target, args, dict(both.kwargs), before=both, hint=both.name.removesuffix("_random"), **how)
    set_value(plain, value_of(result))
    set_info(plain, replace(info(plain), region=known.region))
    result.replace_all_uses_with(plain)
    for node in (result, *states, both):
        program.graph.erase_node(node)
    return plain


@dataclass(frozen=True, slots=True)
class CloneLabel:
    """What is noted about a clone.

    Attributes:
        origin: provenance, for people.
        phase: when it runs.
        number: which clone of its call it is; its names get as many primes.
    """

    origin: str
    phase: Phase = Phase.RECOMPUTE
    number: int = 1


def clone_call(
    program: Program, node: fx.Node, before: fx.Node, current: Callable[[fx.Node], fx.Node], label: CloneLabel
) -> fx.Node:
    """Insert a clone of a call that gives the same values.

    A random op draws from the state that it saved (``save_generator``); BatchNorm leaves its statistics alone.

    Args:
        program: rewritten in place.
        node: the call.
        before: where the clone goes.
        current: which node the clone reads instead of an argument of the original.
        label: what is noted about the clone.
    """
    target, args, kwargs, results = _second_run(node)
    with program.graph.inserting_before(before):
        if is_replayable(node):
            clone = _replay(program, node, current)
        elif results is not None:
            args, kwargs = _torch.map_aggregate((args, kwargs), lambda a: current(a) if isinstance(a, fx.Node) else a)
            clone = program.graph.call_function(target, args, kwargs)
        else:
            clone = program.graph.node_copy(node, current)
    label_clone(clone, node, label)
    if results is not None:
        set_value(clone, tuple(value_of(node)[:results]))
    return clone


def _replay(program: Program, node: fx.Node, current: Callable[[fx.Node], fx.Node]) -> fx.Node:
    """A random op again, from the state of the generator that the first run has saved."""
    both: Any = node.args[0]
    state = next(user for user in both.users if user.args[1] == 0)
    args, kwargs = _torch.map_aggregate(
        ((state, *both.args), both.kwargs), lambda a: current(a) if isinstance(a, fx.Node) else a
    )
    return program.graph.call_function(_torch.run_with_rng_state, args, kwargs)


def label_clone(clone: fx.Node, node: fx.Node, label: CloneLabel) -> None:
    """Give a clone the value and the source of its original, names of its own, and what is noted about it."""
    clone.meta = {key: value for key, value in node.meta.items() if key in ("val", "stack_trace")}
    names = tuple(name + "'" * label.number for name in info(node).names)
    set_info(clone, info_like(node, label.phase, label.origin, names))
