"""Contiguous checkpoints: those of one shape share one block of memory, which is allocated once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

import torch
from torch import fx

from graphopt.ir.node import Phase, Policy, info, set_info, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.storage.contiguous import block, store
from graphopt.ir.ops.values import storage_bytes, type_text
from graphopt.ir.program import Program
from graphopt.ir.words.written_units import format_bytes
from graphopt.rewriting.memory.transfers.transfer_insertion import movable
from graphopt.rewriting.pass_ import Changed, Numerics, Pass, PassStage

__all__ = ["ContiguousCheckpoints"]

_ORIGIN = "contiguous-checkpoints"

_ALIGNMENT = {"cuda": 512}
"""Bytes to which each checkpoint starts aligned, as one with memory of its own does; by device type, 64 by default."""


@final
@dataclass(frozen=True)
class ContiguousCheckpoints(Pass):
    """Keep checkpoints of the same shape in one block of memory, so that long-lived tensors do not fragment it.

    Each checkpoint is copied to its place in the block as soon as forward has made it, and everything reads it there;
    what made it is freed. The block is allocated in front of the first copy, once for all of them, and freed when
    backward has read the last one: memory stays in one piece, and each checkpoint is held as long as the block. So the
    predicted peak seldom goes down and may go up, and the record says by how much.

    The checkpoints are what ``Recompute`` keeps on the device: with ``PartitionCheckpoints`` their slices, with
    ``Offload`` those that stay (what waits on the host lies in one mapping there). One without another of its shape,
    strides and dtype stays as it is.

    After Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020
    (arXiv 1910.02054), section 6.3, memory defragmentation.

    Example:
        >>> passes = [Recompute("blocks.*"), ContiguousCheckpoints()]
        >>> step = graphopt.optimize_step(model, optimizer, passes, loss=loss).prepare(x)
        >>> step.records[-1].name
        'contiguous-checkpoints'
    """

    name: ClassVar[str] = "contiguous-checkpoints"
    stage: ClassVar[PassStage] = "last"
    numerics: ClassVar[Numerics] = "bitwise"
    after: ClassVar[tuple[str, ...]] = ("fuse-update", "fit-memory", "partition-checkpoints", "offload")

    def apply(self, program: Program) -> Changed:
        """See the class; rewrites the program that runs."""
        if any(node.target is block for node in program.nodes):
            return Changed(reason="the checkpoints of this program lie in blocks already")
        groups, left = _choose(program)
        if not groups:
            none = "the program keeps no checkpoints on the device: give Recompute(...) too"
            return Changed(reason="; ".join(left) or none)
        names = tuple(_name(node) for group in groups for node in group)
        lines = [_store(program, group, number) for number, group in enumerate(groups)]
        return Changed(
            counts={"stored": sum(map(len, groups)), "blocks": len(groups)},
            tensors=names,
            lines=(*lines, *left),
        )


def _name(node: fx.Node) -> str:
    return info(node).names[0] if info(node).names else node.name


def _choose(program: Program) -> tuple[list[list[fx.Node]], list[str]]:
    """The checkpoints that can share a block, in the order in which forward makes them; a line for each other one."""
    alike: dict[tuple[object, ...], list[fx.Node]] = {}
    left = []
    for node in program.phase_nodes(Phase.FORWARD):
        if info(node).policy is Policy.MUST_SAVE:
            reason = _refusal(node)
            if reason:
                left.append(f"{_name(node)} stays as it is: {reason}")
            else:
                value = value_of(node)
                alike.setdefault((value.dtype, value.device, tuple(value.shape), value.stride()), []).append(node)
    left += [f"{_name(group[0])} stays as it is: no other is like it" for group in alike.values() if len(group) == 1]
    return [group for group in alike.values() if len(group) > 1], left


def _refusal(node: fx.Node) -> str:
    """Why a checkpoint cannot lie in a block; empty where it can."""
    reason = movable(node)
    if reason:
        return reason
    value = value_of(node)
    seen = (node, *schema.readers(node))
    if not value.numel() or storage_bytes(value) != value.numel() * value.element_size():
        return "its elements do not fill its memory"
    if any(user.op == "output" for reader in seen for user in reader.users):
        return "the program returns it"
    if all(info(reader).phase is Phase.FORWARD for reader in seen):
        return "nothing after forward reads it"
    if any(_counts_from_start(reader) for reader in seen):
        return "a view of it counts from the start of its storage"
    return ""


def _counts_from_start(node: fx.Node) -> bool:
    """Whether a view says where in the storage it begins, and so cannot be made of a part of a block."""
    if node.target is not torch.ops.aten.as_strided.default:
        return False
    return (node.args[3] if len(node.args) > 3 else node.kwargs.get("storage_offset")) is not None


def _store(program: Program, group: Sequence[fx.Node], number: int) -> str:
    """Give checkpoints of one shape a block; returns what there is to say about it."""
    value = value_of(group[0])
    size = value.element_size()
    step = -(-storage_bytes(value) // _alignment(value)) * _alignment(value) // size
    elements = step * (len(group) - 1) + value.numel()
    common: dict[str, Any] = {"phase": Phase.FORWARD, "origin": f"{_ORIGIN}: {_name(group[0])}", "like": group[0]}
    memory = program.insert(
        block, (elements, value.dtype, value.device, number), after=group[0], names=(f"{_ORIGIN}/{number}",), **common
    )
    position = {node: index for index, node in enumerate(program.graph.nodes)}
    until = {node: max(position[reader] for reader in schema.readers(node)) for node in group}
    longest = _name(max(group, key=until.__getitem__))
    for index, node in enumerate(group):
        _move_in(program, node, memory, index * step, memory if index == 0 else node)
    return (
        f"{len(group)} checkpoints {type_text(value)} ({format_bytes(storage_bytes(value))} each) lie in one block of "
        f"{format_bytes(elements * size)}: one allocation against fragmentation, held until backward has read {longest}"
    )


def _alignment(value: torch.Tensor) -> int:
    return _ALIGNMENT.get(value.device.type, 64)


def _move_in(program: Program, node: fx.Node, memory: fx.Node, offset: int, after: fx.Node) -> None:
    """Copy a checkpoint to its place, and let everything read it there; it takes its name along."""
    known = info(node)
    set_info(node, replace(known, names=(), policy=None))
    origin = f"{_ORIGIN}: {(known.names or (node.name,))[0]}"
    common: dict[str, Any] = {"phase": Phase.FORWARD, "like": node, "origin": origin}
    hint = f"{node.name}_stored"
    stored = program.insert(store, (memory, node, offset), after=after, names=known.names, hint=hint, **common)
    node.replace_all_uses_with(stored, delete_user_cb=lambda user: user is not stored)
    program.set_policy([stored], Policy.MUST_SAVE)
