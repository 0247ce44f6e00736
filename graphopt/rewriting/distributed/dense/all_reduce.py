"""All-reduces of gradients in a program: fused into buckets, started when a bucket is complete, waited for late."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from graphopt.ir.node import Phase, info, value_of
from graphopt.ir.ops.communication.groups import Group
from graphopt.ir.program import Program
from graphopt.rewriting.distributed.dense.buckets import Bucket, BucketSizes, Item, pack
from graphopt.rewriting.distributed.flat_exchange import behind, read_parts, start_exchange

__all__ = ["Exchange", "buffer_writes", "exchange_buffers", "exchange_gradients", "final_gradients", "gradient_readers"]

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Exchange:
    """What is exchanged together.

    Attributes:
        bucket: the gradients, by the names of their parameters.
        start: the call that starts it.
        group: the ranks.
    """

    bucket: Bucket
    start: fx.Node
    group: Group


def final_gradients(program: Program) -> dict[str, fx.Node]:
    """The gradients of parameters that leave backward, by the names of the parameters.

    In a step program they are what the update reads; in a joint program what it returns.
    """
    if program.stage != "step":
        parameters = {spec.target for _, spec in program.inputs_of("parameter")}
        return {
            spec.target: value
            for value, spec in program.outputs_of("gradient")
            if isinstance(value, fx.Node) and spec.target in parameters
        }
    names = {f"{spec.target}~": spec.target for _, spec in program.inputs_of("parameter")}
    accumulators = {node: spec.target for node, spec in program.inputs_of("gradient")}
    update = set(program.phase_nodes(Phase.UPDATE))
    found: dict[str, fx.Node] = {}
    for node in program.phase_nodes(Phase.UPDATE):
        for source in node.all_input_nodes:
            if source not in update:
                named = (names[name] for name in info(source).names if name in names)
                target = accumulators.get(source) or next(named, "")
                if target:
                    found[target] = source
    return found


def exchange_gradients(
    program: Program,
    gradients: Mapping[str, fx.Node],
    groups: Mapping[str, Group],
    sizes: BucketSizes,
    *,
    origin: str,
    after: fx.Node | None = None,
) -> list[Exchange]:
    """Replace gradients by their mean over the ranks of a group.

    Gradients are copied into buckets, which are divided by the number of ranks and then summed, as torch's own data
    parallelism does; what read a gradient then reads its part of the bucket.

    Args:
        program: of stage joint or step.
        gradients: by the names of the parameters.
        groups: of at least two ranks, by the names of the parameters.
        sizes: of the buckets.
        origin: whose nodes they are.
        after: behind which call gradients are as they are to be exchanged; what reads them earlier stays as it is.

    Returns:
        the exchanges in the order in which they start.
    """
    position = {node: index for index, node in enumerate(program.graph.nodes)}
    earliest = -1 if after is None else position[after]
    items: list[Item] = []
    readers: dict[str, list[fx.Node]] = {}
    for name, node in gradients.items():
        value = value_of(node)
        kind = (value.dtype, value.device, groups[name].name)
        items.append(Item(name, value.numel() * value.element_size(), position[node], kind))
        readers[name] = [user for user in gradient_readers(node) if position[user] > earliest]
    done = []
    for bucket in pack(items, sizes.limit, sizes.first):
        members = [_Member(item.name, gradients[item.name], readers[item.name]) for item in bucket.items]
        start = _exchange(program, members, groups[members[0].name], origin, after)
        done.append(Exchange(bucket, start, groups[members[0].name]))
    return done


def gradient_readers(gradient: fx.Node) -> list[fx.Node]:
    """What reads a gradient as such: the update, and the program's output where it is returned."""
    return [user for user in gradient.users if user.op == "output" or info(user).phase is Phase.UPDATE]


@dataclass(frozen=True, slots=True)
class _Member:
    """One gradient of a bucket, and what reads its mean."""

    name: str
    gradient: fx.Node
    readers: list[fx.Node]


def _exchange(
    program: Program, members: Sequence[_Member], group: Group, origin: str, after: fx.Node | None
) -> fx.Node:
    """Exchange one bucket; returns the call that starts it."""
    nodes = [member.gradient for member in members]
    names = [member.name for member in members]
    whose = f"{origin}: {names[0]}" if len(names) == 1 else f"{origin}: {names[0]} to {names[-1]}"
    start = start_exchange(program, nodes, behind(program, after or nodes[-1]), group, "mean", whose)
    order = {node: index for index, node in enumerate(program.graph.nodes)}
    due = min((reader for member in members for reader in member.readers), key=order.__getitem__)
    for member, part in zip(members, read_parts(program, start, nodes, due, origin), strict=True):
        program.hand_over_name(f"{member.name}~", member.gradient, part)
        for reader in member.readers:
            reader.replace_input_with(member.gradient, part)
    return start


def exchange_buffers(program: Program, group: Group, how: Literal["broadcast", "mean"], origin: str) -> list[str]:
    """Let buffers that forward updates get the new values of rank 0, or the mean of the ranks' new values.

    The exchange starts at the end of forward; in a step program it is waited for in front of the update, in a joint
    program at once. Integers (counts of batches) are the same on all ranks anyway, and stay.

    Returns:
        the names of the buffers.
    """
    kinds: dict[Any, list[tuple[fx.Node, fx.Node, fx.Node]]] = {}
    for write, buffer, value in buffer_writes(program):
        kept = value_of(value)
        if kept.is_floating_point():
            kinds.setdefault((kept.dtype, kept.device), []).append((write, buffer, value))
    after = next((n for n in program.graph.nodes if n.op == "output" or _late(n)), program.output_node)
    due = after
    if program.stage == "step":
        due = next(program.phase_nodes(Phase.UPDATE), program.output_node)
    for same in kinds.values():
        values = [value for _, _, value in same]
        start = start_exchange(program, values, after, group, how, origin)
        for (write, buffer, _), part in zip(same, read_parts(program, start, values, due, origin), strict=True):
            write.args = (buffer, part)
            due.prepend(write)
    return [info(buffer).names[0] for same in kinds.values() for _, buffer, _ in same]


def buffer_writes(program: Program) -> list[tuple[fx.Node, fx.Node, fx.Node]]:
    """The calls that write new values into buffers and hand nothing on: call, buffer, new value."""
    buffers = {node for node, _ in program.inputs_of("buffer")}
    found = []
    for node in program.phase_nodes(Phase.FORWARD):
        if node.target is aten.copy_.default and not node.users:
            buffer, value = node.args[:2]
            if buffer in buffers and isinstance(buffer, fx.Node) and isinstance(value, fx.Node):
                found.append((node, buffer, value))
    return found


def _late(node: fx.Node) -> bool:
    return node.op == "call_function" and info(node).phase is not Phase.FORWARD
