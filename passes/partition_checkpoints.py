"""Partitioned checkpoints: each rank of a group keeps a slice of every checkpoint, and backward gathers them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

import torch
from torch import fx

from graphopt.errors import GraphoptError
from graphopt.ir.node import Phase, Policy, info, set_info, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.communication.collectives import ALL_GATHER, WAIT
from graphopt.ir.ops.communication.groups import Group, find_group
from graphopt.ir.ops.communication.same_on_all_ranks import same_on_all_ranks
from graphopt.ir.ops.values import storage_bytes, type_text
from graphopt.ir.program import Program
from graphopt.ir.words.written_units import format_bytes
from graphopt.rewriting.memory.recompute.recompute_plan import Again, recompute
from graphopt.rewriting.memory.transfers.transfer_insertion import movable
from graphopt.rewriting.pass_ import Changed, Numerics, Pass, PassStage

__all__ = ["PartitionCheckpoints"]

_ORIGIN = "partition-checkpoints"


@final
@dataclass(frozen=True)
class PartitionCheckpoints(Pass):
    """Keep a slice of each checkpoint on each rank of a model-parallel group, and gather them before backward reads.

    The ranks of the group must hold the same checkpoints, as tensor-parallel ranks do, to which every rank gives the
    same data; at the first run that is checked, bit by bit. Behind its last use in forward a checkpoint is cut into as
    many slices as the group has ranks, the last ones padded where its size does not divide evenly; a rank keeps its own
    slice, and the whole is freed. Just before backward first needs it, the slices are gathered: the values are those
    that were cut, to the last bit.

    The checkpoints are what ``Recompute`` keeps, and the slice of ``blocks.0`` is called ``blocks.0/part``: with
    ``Offload`` it is the slices that wait on the host. Every rank has to capture the same program; that is checked
    when the pass runs, which is a collective call. Where slices would not lower the peak, nothing is done.

    After Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020
    (arXiv 1910.02054), partitioned activation checkpointing.

    Args:
        group: name of the process group (``group.group_name``), or of a dimension of a ``DeviceMesh``; empty for the
            default group.
        min_bytes: smaller checkpoints are kept whole.
        check: compare a digest of each checkpoint among the ranks at the first run of the program; every rank raises
            where they differ. Without it, ranks that hold other values train to nonsense, and nothing says so.

    Raises:
        GraphoptError: where torch.distributed is not initialised, where there is no such group, and where the ranks
            of the group have different checkpoints; at the first run, naming rank and tensor, where these hold other
            values.

    Example:
        >>> str(graphopt.Pipeline([PartitionCheckpoints(min_bytes=1000), Recompute("blocks.*")]))
        'recompute{checkpoints=blocks.*},partition-checkpoints{min-bytes=1000}'
    """

    name: ClassVar[str] = "partition-checkpoints"
    stage: ClassVar[PassStage] = "last"
    numerics: ClassVar[Numerics] = "bitwise"
    after: ClassVar[tuple[str, ...]] = ("fuse-update", "fit-memory")

    group: str = ""
    min_bytes: int = 1_000_000
    check: bool = True

    def __post_init__(self) -> None:
        if self.min_bytes < 0:
            raise GraphoptError(f"min_bytes is a number of bytes of at least 0, got {self.min_bytes}")

    def apply(self, program: Program) -> Changed:
        """See the class; rewrites the program that runs."""
        if any(info(node).made_by == _ORIGIN for node in program.phase_nodes(Phase.SYNC)):
            return Changed(reason="the checkpoints of this program are partitioned already")
        group = find_group(self.group)
        if group.size == 1:
            return Changed(reason=f"the group {group.name!r} has one process, which keeps its checkpoints whole")
        chosen, left = self._choose(program)
        changed = self._partition(program, chosen, left, group) if chosen else Changed(reason=_no_checkpoints(left))
        plan = [f"{item.name} {type_text(value_of(item.node))}" for item in chosen] + [f"check={self.check}"]
        group.agree(plan if changed else [], _ORIGIN)
        return changed

    def _choose(self, program: Program) -> tuple[list[_Checkpoint], list[str]]:
        """The checkpoints to partition, in the order in which backward needs them; a line for each of the others."""
        position = {node: index for index, node in enumerate(program.graph.nodes)}
        found, left = [], []
        for node in program.phase_nodes(Phase.FORWARD):
            if info(node).policy is not Policy.MUST_SAVE:
                continue
            name = info(node).names[0] if info(node).names else node.name
            readers = sorted(schema.readers(node), key=position.__getitem__)
            early = [reader for reader in readers if info(reader).phase is Phase.FORWARD]
            late = [reader for reader in readers if info(reader).phase is not Phase.FORWARD]
            reason = self._refusal(node) or ("" if late else "nothing after forward reads it")
            if reason:
                left.append(f"{name} is kept whole: {reason}")
            else:
                found.append(_Checkpoint(node, name, [node, *early][-1], late[0]))
        return sorted(found, key=lambda item: position[item.first]), left

    def _refusal(self, node: fx.Node) -> str:
        """Why a checkpoint is kept whole; empty where it is not."""
        reason = movable(node)
        if reason:
            return reason
        value = value_of(node)
        if not value.is_floating_point():
            return f"it holds no floating-point numbers, but {value.dtype}"
        if storage_bytes(value) < self.min_bytes:
            return f"its {format_bytes(storage_bytes(value))} are less than min_bytes"
        if any(user.op == "output" for seen in (node, *schema.readers(node)) for user in seen.users):
            return "the program returns it"
        return ""

    def _partition(self, program: Program, chosen: list[_Checkpoint], left: list[str], group: Group) -> Changed:
        before = program.memory()
        total = sum(storage_bytes(value_of(item.node)) for item in chosen)
        if self._peak_with(program, chosen, group) >= before.peak_bytes:
            where = (info(before.peak_at).names or (before.peak_at.name,))[0]
            return Changed(
                reason=f"the peak of {format_bytes(before.peak_bytes)} is at {where}, where partitioning "
                f"{format_bytes(total)} in {len(chosen)} checkpoints would not lower it"
            )
        kept = _insert(program, chosen, group, check=self.check)
        line = (
            f"rank {group.rank} of {group.size} of the group {group.name!r} keeps {format_bytes(kept)} of "
            f"{format_bytes(total)} in {len(chosen)} checkpoints"
        )
        return Changed(
            counts={"partitioned": len(chosen)},
            tensors=tuple(item.name for item in chosen),
            lines=(line, *left),
        )

    def _peak_with(self, program: Program, chosen: Sequence[_Checkpoint], group: Group) -> int:
        """The peak in bytes of the program with these checkpoints partitioned."""
        trial = program.copy()
        named = {node.name: node for node in trial.graph.nodes}
        _insert(trial, [item.within(named) for item in chosen], group, check=self.check)
        trial.erase_dead()
        return trial.memory().peak_bytes


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """A checkpoint: its node and name, the last call of forward that reads it, and the first after forward."""

    node: fx.Node
    name: str
    last: fx.Node
    first: fx.Node

    def within(self, named: dict[str, fx.Node]) -> _Checkpoint:
        """The same checkpoint in a copy of the program."""
        return _Checkpoint(named[self.node.name], self.name, named[self.last.name], named[self.first.name])


def _no_checkpoints(left: Sequence[str]) -> str:
    return "; ".join(left) or "the program has no checkpoints: give Recompute(...) too"


def _insert(program: Program, chosen: Sequence[_Checkpoint], group: Group, *, check: bool) -> int:
    """Cut and gather each checkpoint; returns the bytes of this rank's slices."""
    returned, kept = [], 0
    for item in chosen:
        part = _cut(program, item, group)
        if check:
            common: dict[str, Any] = {"phase": Phase.FORWARD, "like": item.node, "origin": f"{_ORIGIN}: {item.name}"}
            program.insert(same_on_all_ranks, (item.node, item.name, group.name), after=item.last, **common)
        kept += storage_bytes(value_of(part))
        gathered = _gather(program, item, part, group)
        returned.append(Again(item.node, item.first, f"{_ORIGIN}: {item.name}", gathered))
        set_info(item.node, replace(info(item.node), policy=None))
        program.set_policy([part], Policy.MUST_SAVE)
    recompute(program, returned)
    return kept


def _cut(program: Program, item: _Checkpoint, group: Group) -> fx.Node:
    """This rank's slice of a checkpoint, flat, a tensor of its own, as long as those of the other ranks."""
    aten = torch.ops.aten
    count = _elements(item.node)
    length = -(-count // group.size)
    start = min(group.rank * length, count)
    end = min(start + length, count)
    common: dict[str, Any] = {"phase": Phase.FORWARD, "like": item.node, "origin": f"{_ORIGIN}: {item.name}"}
    flat = program.insert(aten.as_strided.default, (item.node, [count], [1]), after=item.last, **common)
    mine = program.insert(aten.slice.Tensor, (flat, 0, start, end), after=flat, **common)
    common |= {"after": mine, "names": (f"{item.name}/part",), "hint": f"{item.node.name}_part"}
    if end - start == length:
        return program.insert(aten.clone.default, (mine,), **common)
    return program.insert(aten.constant_pad_nd.default, (mine, [0, length - (end - start)]), **common)


def _gather(program: Program, item: _Checkpoint, part: fx.Node, group: Group) -> fx.Node:
    """The whole checkpoint again, in front of its first reader after forward, with its size and strides."""
    value = value_of(item.node)
    common: dict[str, Any] = {
        "before": item.first,
        "phase": Phase.SYNC,
        "like": item.node,
        "origin": f"{_ORIGIN}: {item.name}",
    }
    arguments = (part, group.size, group.name)
    started = program.insert(ALL_GATHER, arguments, hint=f"{item.node.name}_gather", **common)
    whole = program.insert(WAIT, (started,), hint=f"{item.node.name}_gathered", **common)
    layout = (whole, list(value.shape), list(value.stride()), 0)
    return program.insert(torch.ops.aten.as_strided.default, layout, **common)


def _elements(node: fx.Node) -> int:
    """How many elements the storage of a tensor has."""
    value = value_of(node)
    return storage_bytes(value) // int(value.element_size())
