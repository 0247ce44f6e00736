"""Exchanges of models after ``fully_shard`` beside the computation: gathers begin earlier, sums are awaited later.

The gather of a group of parameters begins as soon as that of the group before has arrived, and the sums of a group's
gradients are awaited where those of the next group are about to be put together: one of each is under way at a time, as
with FSDP2. Each takes the bytes of what is sent and of what arrives for so long. Where passes keep a program within a
number of bytes, an exchange moves only where the peak stays what it is.

Source: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023 (arXiv 2304.11277),
sections 3.3.2 and 3.3.3.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from graphopt.analysis.liveness import simulate
from graphopt.ir.node import Phase, info, set_info, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.communication.collectives import ALL_GATHER, WAIT
from graphopt.ir.ops.values import storage_bytes
from graphopt.ir.program import Program
from graphopt.rewriting.distributed.agreed_decision import decided_in_group
from graphopt.rewriting.memory.recompute.gathered_parameters import gathering_group, made_of_shards

__all__ = ["overlap_exchanges"]


@dataclass(frozen=True, slots=True)
class _Move:
    """An exchange that may begin earlier, or be awaited later.

    Attributes:
        exchange: the gather, or the call that waits for a reduction.
        with_it: the calls that move with it, in order.
        place: the call behind which a gather begins, or in front of which a reduction is awaited; None for the end.
        bytes: that are alive for longer.
    """

    exchange: fx.Node
    with_it: tuple[fx.Node, ...]
    place: fx.Node | None
    bytes: int


def overlap_exchanges(program: Program, *, limited: bool) -> int:
    """Let gathers of parameters and reductions of their gradients run beside the computation.

    Args:
        program: that runs; rewritten in place.
        limited: whether a pass keeps it within a number of bytes, so that its peak must not rise.

    Returns:
        how many exchanges moved.
    """
    group = gathering_group(program)
    if group is None:
        return 0
    gathers, reductions = _gathers(program), _reductions(program)
    chosen: Iterable[int] = range(len(gathers) + len(reductions))
    if limited:  # the bytes of ranks may differ by a row, and what they exchange may not
        chosen = decided_in_group(group, lambda: _within_peak(program, [*gathers, *reductions]))
    taken = set(chosen)
    for number in reversed(range(len(gathers))):  # the last one first: each begins behind one that is there still
        if number in taken:
            _begin(program, gathers[number])
    for number, move in enumerate(reductions, start=len(gathers)):
        if number in taken:
            _await(program, move)
    return len(taken)


def _gathers(program: Program) -> list[_Move]:
    """The gathers that may begin behind the one before, in the same part of the program."""
    found, before = list[_Move](), None
    order = {node: place for place, node in enumerate(program.graph.nodes)}
    parameters = {node for node, _ in program.inputs_of("parameter")}
    for node in list(program.graph.nodes):
        put = made_of_shards(node) if schema.is_gather(node) else set()
        if not _of_parameters(node, put, parameters):  # other calls, and gathers of activations
            continue
        if before is not None and _part(before) == _part(node):
            late = tuple(sorted((call for call in put if order[call] > order[before]), key=order.__getitem__))
            size = storage_bytes(value_of(node)) + sum(
                storage_bytes(value_of(source)) for source in node.all_input_nodes
            )
            found.append(_Move(node, late, before, size))
        before = node
    return found


def _of_parameters(node: fx.Node, put: set[fx.Node], parameters: set[fx.Node]) -> bool:
    """Whether a call gathers shards of parameters, which some calls put together."""
    sources = {source for call in (node, *put) for source in call.all_input_nodes} - put
    known = all(schema.op_name(call) in _PUT_TOGETHER for call in put)
    return schema.is_gather(node) and known and bool(sources) and sources <= parameters


def _part(node: fx.Node) -> bool:
    """Whether a call runs in forward, which ends where a drop-in model gives its results."""
    return info(node).phase is Phase.FORWARD


def _reductions(program: Program) -> list[_Move]:
    """The waits for reduced gradients of which nothing is read before the next ones are put together."""
    order = {node: place for place, node in enumerate(program.graph.nodes)}
    waits = [
        node
        for node in program.graph.find_nodes(op="call_function", target=WAIT)
        if info(node).phase is Phase.BACKWARD and _starts_reduction(node)
    ]
    found = []
    for number, wait in enumerate(waits):
        readers = sorted(_readers(wait), key=order.__getitem__)
        stops = [node for node in readers if info(node).phase is not Phase.BACKWARD or schema.has_effect(node)]
        stops += [_first_of(waits[number + 1], order)] if number + 1 < len(waits) else []
        place = min(stops, key=order.__getitem__, default=None)
        end = len(order) - 1 if place is None else order[place]
        moved = tuple(node for node in readers if order[node] < end)
        cuts = all(schema.op_name(node) in _CUT_OUT for node in moved)  # and no layer, as of gradients of activations
        if cuts and end - order[wait] > len(moved) + 1:  # something else runs meanwhile
            size = storage_bytes(value_of(wait.all_input_nodes[0]))
            found.append(_Move(wait, moved, place, size))
    return found


def _starts_reduction(wait: fx.Node) -> bool:
    start = wait.all_input_nodes[0]
    return schema.is_collective(start) and "reduce" in schema.op_name(start)


def _first_of(wait: fx.Node, order: dict[fx.Node, int]) -> fx.Node:
    """The first call that puts together what a reduction takes: all that stands without a gap in front of it."""
    start = wait.all_input_nodes[0]
    first, chain = start, {start}
    node = start.prev
    while node.op == "call_function" and chain.intersection(node.users) and info(node).phase is Phase.BACKWARD:
        if schema.op_name(node) not in _PUT_TOGETHER:
            break
        chain.add(node)
        first, node = node, node.prev
    assert first in order
    return first


_PUT_TOGETHER = (
    "_chunk_cat",
    "view",
    "_unsafe_view",
    "_to_copy",
    "div",
    "cat",
    "constant_pad_nd",
    "clone",
    "as_strided",
)
"""Ops that make one tensor of a group's shards, or of its gradients."""


_CUT_OUT = ("slice", "clone", "as_strided", "view", "div", "mul", "_to_copy", "getitem")
"""Ops that make shards' gradients of what was reduced."""


def _readers(wait: fx.Node) -> set[fx.Node]:
    """Everything that is computed from what a call waits for."""
    found, pending = set[fx.Node](), [wait]
    while pending:
        for user in pending.pop().users:
            if user.op != "output" and user not in found:
                found.add(user)
                pending.append(user)
    return found


def _within_peak(program: Program, moves: Iterable[_Move]) -> list[int]:
    """The numbers of the exchanges whose bytes fit beside what is alive meanwhile."""
    memory = simulate(program)
    alive, peak = list(memory.bytes), memory.peak_bytes
    position = {node: place for place, node in enumerate(memory.nodes)}
    found = []
    for number, move in enumerate(moves):
        here = position[move.exchange]
        there = len(alive) if move.place is None else position[move.place]
        span = range(min(here, there), max(here, there))
        if all(alive[place] + move.bytes <= peak for place in span):
            found.append(number)
            for place in span:
                alive[place] += move.bytes
    return found


def _begin(program: Program, move: _Move) -> None:
    """Start a gather behind the one before, and wait for it where it was."""
    node, place = move.exchange, move.place
    assert place is not None
    for call in move.with_it:
        place.append(call)
        place = call
    arguments = schema.named_arguments(node)
    phase = Phase.FORWARD if _part(node) else Phase.BACKWARD
    common: dict[str, Any] = {"phase": phase, "origin": info(node).origin, "like": node}
    given = arguments["input"], arguments["group_size"], arguments["group_name"]
    start = program.insert(ALL_GATHER, given, after=place, hint="all_gather", **common)
    wait = program.insert(WAIT, (start,), before=node, hint=node.name, **common)
    set_info(wait, replace(info(node), phase=phase))
    node.replace_all_uses_with(wait)
    program.graph.erase_node(node)


def _await(program: Program, move: _Move) -> None:
    """Wait for a reduction later, with what is computed of it."""
    place = program.output_node if move.place is None else move.place
    for call in (move.exchange, *move.with_it):
        place.prepend(call)
