"""All-reduces of gradients that are in a program already: found, and taken out by passes that exchange differently."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphopt.errors import GraphoptError
from graphopt.ir.gradients import in_own_storage
from graphopt.ir.node import Phase, info, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.communication.collectives import ALL_REDUCE, BROADCAST, WAIT
from graphopt.ir.ops.communication.groups import Group, find_group
from graphopt.ir.ops.updates.scale import FOUND_INF
from graphopt.ir.program import Program
from graphopt.rewriting.distributed.dense.all_reduce import buffer_writes, gradient_readers
from graphopt.rewriting.distributed.flat_exchange import read_parts, start_exchange

__all__ = [
    "Member",
    "Reduction",
    "agree_on_skipping",
    "one_group",
    "reductions",
    "remove_all_reduces",
    "remove_buffer_averages",
]

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Member:
    """One gradient of an all-reduce.

    Attributes:
        name: of its parameter.
        gradient: what goes in.
        part: the mean that comes out.
    """

    name: str
    gradient: fx.Node
    part: fx.Node


@dataclass(frozen=True, slots=True)
class Reduction:
    """One fused all-reduce of gradients.

    Attributes:
        start: the call that starts it.
        members: the gradients, in the order in which they lie in the bucket.
        group: the ranks.
    """

    start: fx.Node
    members: tuple[Member, ...]
    group: Group


def reductions(program: Program) -> list[Reduction]:
    """The fused all-reduces of gradients in a program (``exchange_gradients`` made them), in order."""
    found = []
    for start in program.graph.find_nodes(op="call_function", target=ALL_REDUCE):
        members = _members(start)
        if members:
            name = start.args[2]
            assert isinstance(name, str)
            found.append(Reduction(start, members, find_group(name)))
    return found


def one_group(found: Sequence[Reduction], origin: str) -> Group:
    """The group of all these exchanges.

    Raises:
        GraphoptError: where there are several.
    """
    groups = {reduction.group.name: reduction.group for reduction in found}
    if len(groups) > 1:
        raise GraphoptError(
            f"{origin} works on one group of ranks, and gradients are exchanged over several: {', '.join(groups)}; "
            "leave it out, or leave groups= of data-parallel out"
        )
    return found[0].group


def _members(start: fx.Node) -> tuple[Member, ...]:
    """The gradients of an all-reduce; none where it is of something else."""
    members = []
    for value, part in _pairs(start):
        names = [name.removesuffix("~") for name in info(part).names if name.endswith("~")]
        if not names:
            return ()
        members.append(Member(names[0], value, part))
    return tuple(members)


def _pairs(start: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """What goes into a fused exchange, and the part of the result that comes out for it; none for other exchanges."""
    joined = start.args[0]
    if isinstance(joined, fx.Node) and joined.target is aten.mul_.Scalar:
        joined = joined.args[0]
    if not isinstance(joined, fx.Node) or joined.target is not aten.cat.default:
        return []
    flats = joined.args[0]
    assert isinstance(flats, Sequence)
    parts = [user for done in start.users if done.target is WAIT for user in done.users]
    parts = [part for part in parts if part.target is aten.as_strided.default]
    parts.sort(key=lambda part: value_of(part).storage_offset())
    return [(_source(flat), part) for flat, part in zip(flats, parts, strict=True)] if len(flats) == len(parts) else []


def _source(flat: Any) -> fx.Node:
    """The value behind its flat view, and behind the contiguous copy where one was needed."""
    value: fx.Node = flat.all_input_nodes[0]
    if value.op == "call_function" and value.target is aten.clone.default and info(value).phase is Phase.SYNC:
        value = value.all_input_nodes[0]
    return value


def remove_all_reduces(program: Program, found: Sequence[Reduction], origin: str) -> dict[str, fx.Node]:
    """Take all-reduces out of a program: what read a mean reads the rank's own gradient again.

    Gradients that are written in place by what reads them (loss scaling, clipping) get memory of their own where they
    need it.

    Args:
        program: of stage step.
        found: from ``reductions``.
        origin: the pass that asks.

    Returns:
        the gradients by the names of their parameters, in the order in which they were exchanged.
    """
    gradients: dict[str, fx.Node] = {}
    for reduction in found:
        for member in reduction.members:
            program.hand_over_name(f"{member.name}~", member.part, member.gradient)
            member.part.replace_all_uses_with(member.gradient)
            gradients[member.name] = member.gradient
    program.erase_dead()
    for reduction in found:
        _erase(program, reduction.start)
    program.erase_dead()
    return _owned(program, gradients, origin)


def _erase(program: Program, start: fx.Node) -> None:
    """Erase an exchange of which nothing is read; what it copied is dead then."""
    (done,) = start.users
    shared = start.args[0]
    assert isinstance(shared, fx.Node)
    for node in (done, start, shared):
        program.graph.erase_node(node)


def remove_buffer_averages(program: Program) -> int:
    """Let buffers that forward updates keep the rank's own values; returns how many were exchanged."""
    starts = [
        node
        for target in (ALL_REDUCE, BROADCAST)
        for node in program.graph.find_nodes(op="call_function", target=target)
    ]
    came = {part: (value, start) for start in starts for value, part in _pairs(start)}
    freed = set()
    writes = [(write, buffer, came[value]) for write, buffer, value in buffer_writes(program) if value in came]
    for write, buffer, (value, start) in writes:
        write.args = (buffer, value)
        freed.add(start)
    program.erase_dead()
    for start in freed:
        _erase(program, start)
    program.erase_dead()
    return len(writes)


def _owned(program: Program, gradients: dict[str, fx.Node], origin: str) -> dict[str, fx.Node]:
    values = list(dict.fromkeys(gradients.values()))
    written = [
        node for node in program.phase_nodes(Phase.UPDATE) if set(schema.mutated_inputs(node)).intersection(values)
    ]
    if not written:
        return gradients
    position = {node: index for index, node in enumerate(program.graph.nodes)}
    readers = [user for value in values for user in gradient_readers(value) if user.op == "call_function"]
    own = in_own_storage(program, values, origin, before=min(readers, key=position.__getitem__))
    named = dict(zip(values, own, strict=True))
    return {name: named[node] for name, node in gradients.items()}


def agree_on_skipping(program: Program, group: Group, origin: str) -> fx.Node | None:
    """Let every rank skip the update where one of them has to, once gradients are checked that ranks do not share.

    Args:
        program: of stage step, perhaps with loss scaling.
        group: at least two ranks.
        origin: the pass that asks.

    Returns:
        what all ranks agree on: float32, one element, 1 where the update is skipped; None where nothing is checked.
    """
    own = program.names().get(FOUND_INF)
    if own is None:
        return None
    readers, place = list(own.users), own.next
    start = start_exchange(program, [own], place, group, "max", f"{origin}: whether a rank skips")
    (agreed,) = read_parts(program, start, [own], place, origin)
    for reader in readers:
        reader.replace_input_with(own, agreed)
    program.hand_over_name(FOUND_INF, own, agreed)
    return agreed
