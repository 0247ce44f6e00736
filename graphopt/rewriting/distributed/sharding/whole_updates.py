"""Updates of shards that take whole parameters in between (Muon): the work on whole ones is divided among ranks.

Of as many parameters of one shape as there are ranks, each rank gets one whole: an all-to-all of the shards makes them,
the calls that take a whole one run once, on every rank for its own, and a second all-to-all gives every rank its shard
of all results. Calls, and bytes of whole tensors, are divided by the number of ranks. Where parameters of a shape are
fewer than ranks, the last one is worked on by several. While one is worked on, the next ones are exchanged.

Source: Liu, Su, Yao and others, "Muon is Scalable for LLM Training", 2025 (arXiv 2502.16982), section 2.3, where shards
are gathered for what takes a whole matrix; Ahn, Xu and others, "Dion: Distributed Orthonormalized Updates", 2025 (arXiv
2504.05295), whose code divides Muon's matrices among ranks by all-to-all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch
from torch import fx

from graphopt import _torch
from graphopt.errors import GraphoptError
from graphopt.ir.gradients import base_of
from graphopt.ir.node import Phase, info, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.communication.collectives import ALL_TO_ALL, WAIT
from graphopt.ir.ops.communication.groups import Group
from graphopt.ir.ops.updates.whole_parameter import SHARD_OF_WHOLE, WHOLE_OF_SHARD
from graphopt.ir.ops.values import is_dense, storage_bytes
from graphopt.ir.program import Program
from graphopt.ir.words.written_units import counted, format_bytes
from graphopt.rewriting.shards import piece_of

__all__ = ["DividedUpdates", "divide_whole_updates"]

aten = torch.ops.aten


@dataclass(frozen=True)
class DividedUpdates:
    """What of an update takes whole parameters, for the record of a pass.

    Attributes:
        parameters: so many.
        rounds: in each of which every rank has one of them.
        sent: bytes that a rank puts into all-to-alls, in a step.
    """

    parameters: int = 0
    rounds: int = 0
    sent: int = 0

    @property
    def counts(self) -> dict[str, int]:
        """For ``Changed``."""
        return {"parameters whole for the update": self.parameters} if self.parameters else {}

    @property
    def lines(self) -> tuple[str, ...]:
        """For ``Changed``."""
        if not self.parameters:
            return ()
        taken = f"the update takes {counted(self.parameters, 'parameters')} whole, each on one rank"
        exchanged = f"{format_bytes(self.sent)} in all-to-alls of shards per step"
        return (f"{taken}, in {counted(self.rounds, 'rounds')}: {exchanged}",)


@dataclass(eq=False)
class _Region:
    """The calls of an update that take one parameter whole.

    Attributes:
        wholes: where they get whole tensors of shards.
        calls: in between, in order.
        shards: where shards are taken of what they make.
    """

    wholes: list[fx.Node] = field(default_factory=list)
    calls: list[fx.Node] = field(default_factory=list)
    shards: list[fx.Node] = field(default_factory=list)

    def form(self) -> str:
        """Equal for regions of which one can run in the place of another, on what that one gets."""
        number = {node: f"%{index}" for index, node in enumerate([*self.wholes, *self.calls])}

        def named(item: Any) -> Any:
            return number.get(item, item.name) if isinstance(item, fx.Node) else item

        given = [(value.dtype, value.device, whole.args[1:]) for whole in self.wholes for value in [value_of(whole)]]
        calls = [(str(call.target), _torch.map_aggregate((call.args, call.kwargs), named)) for call in self.calls]
        return repr((given, calls, [(named(shard.args[0]), shard.args[3]) for shard in self.shards]))


def divide_whole_updates(program: Program, group: Group, origin: str, *, by_rows: bool = False) -> DividedUpdates:
    """Put exchanges in the place of what stands for them in an update of shards.

    Args:
        program: of stage step, whose update is of this rank's shards.
        group: the ranks that have the shards.
        origin: the pass that asks.
        by_rows: a shard is of whole rows, as ``fully_shard`` has it.

    Raises:
        GraphoptError: where a whole parameter is needed for the update of another one, or twice one after the other.
    """
    regions = _regions(program)
    if not regions:
        return DividedUpdates()
    place = _place(program, regions)
    later = _Later(program, regions, place)
    alike: dict[str, list[_Region]] = {}
    for region in regions:
        alike.setdefault(region.form(), []).append(region)
    batches = [found[i : i + group.size] for found in alike.values() for i in range(0, len(found), group.size)]
    division = _Division(program, group, f"{origin}: whole parameters", later, place, by_rows)
    sent = division.send_shards(batches[0])
    returning: list[fx.Node] = []
    for number, batch in enumerate(batches):
        division.wait_for_whole(batch, sent)
        if number + 1 < len(batches):
            sent = division.send_shards(batches[number + 1])
        begun = division.work(batch)
        if number:
            division.wait_for_shards(batches[number - 1], returning)
            later.put_back()
        returning = begun
    division.wait_for_shards(batches[-1], returning)
    later.put_back()
    return DividedUpdates(len(regions), len(batches), division.sent)


def _place(program: Program, regions: Sequence[_Region]) -> fx.Node:
    """The first place behind all that goes into the calls that take whole parameters."""
    position = {node: index for index, node in enumerate(program.graph.nodes)}
    moved = {node for region in regions for node in (*region.wholes, *region.calls, *region.shards)}
    given = {source for region in regions for call in region.calls for source in call.all_input_nodes} - moved
    place = max((*given, *(whole for region in regions for whole in region.wholes)), key=position.__getitem__)
    place = place.next
    while place in moved:
        place = place.next
    return place


def _regions(program: Program) -> list[_Region]:
    """The calls that take whole parameters, by parameter, in order."""
    of: dict[fx.Node, _Region] = {}
    for node in program.phase_nodes(Phase.UPDATE):
        if node.target is WHOLE_OF_SHARD:
            of[node] = _Region(wholes=[node])
            continue
        found = list(dict.fromkeys(of[source] for source in node.all_input_nodes if source in of))
        if not found:
            continue
        region = found[0]
        if node.target is SHARD_OF_WHOLE:
            region.shards.append(node)
            continue
        for other in found[1:]:
            region.wholes += other.wholes
            region.calls += other.calls
            region.shards += other.shards
            of |= {known: region for known, its in of.items() if its is other}
        region.calls.append(node)
        of[node] = region
    return list(dict.fromkeys(of.values()))


class _Later:
    """What an update does with shards of results, which are there later than where it was traced."""

    def __init__(self, program: Program, regions: Sequence[_Region], place: fx.Node) -> None:
        """Find the calls in front of a place that have to wait.

        Args:
            program: of stage step.
            regions: where the results come from.
            place: behind all that goes into them.

        Raises:
            GraphoptError: where a region has to wait itself.
        """
        self._place = place
        self._missing = {shard for region in regions for shard in region.shards}
        self._waiting: dict[fx.Node, set[fx.Node]] = {}
        """By the call, in order: the memory that it touches."""
        own = {node for region in regions for node in (*region.wholes, *region.calls, *region.shards)}
        late, read, written = set(self._missing), set[fx.Node](), set[fx.Node]()
        for node in takewhile(lambda node: node is not place, program.graph.nodes):
            touched = {base_of(source) for source in node.all_input_nodes}
            writes = {base_of(target) for target in schema.mutated_inputs(node)}
            if late.isdisjoint(node.all_input_nodes) and written.isdisjoint(touched) and read.isdisjoint(writes):
                continue
            if node in own:
                raise GraphoptError(
                    f"{node.name} ({info(node).origin}) takes a whole parameter behind another one that was taken "
                    "whole: leave the pass that shards the update out"
                )
            late.add(node)
            read |= touched
            written |= writes
            self._waiting[node] = touched

    def arrived(self, shard: fx.Node) -> None:
        """That a shard of a result is there."""
        self._missing.discard(shard)

    def put_back(self) -> None:
        """Put the calls that have all they need in front of the place."""
        kept: dict[fx.Node, set[fx.Node]] = {}
        for node, touched in self._waiting.items():
            waits = self._missing | set(kept)
            if waits.isdisjoint(node.all_input_nodes) and all(touched.isdisjoint(other) for other in kept.values()):
                self._place.prepend(node)
            else:
                kept[node] = touched
        self._waiting = kept


class _Division:
    """Inserts the exchanges of batches of parameters, and the work on them, in front of one place."""

    def __init__(
        self, program: Program, group: Group, origin: str, later: _Later, place: fx.Node, by_rows: bool
    ) -> None:
        self._program, self._group, self._later, self._place = program, group, later, place
        self._by_rows = by_rows
        self.sent = 0
        self._common: dict[str, Any] = {"before": place, "phase": Phase.SYNC, "origin": origin}

    def send_shards(self, batch: Sequence[_Region]) -> list[fx.Node]:
        """Start to make parameters whole; returns the exchange of each tensor that is needed of them."""
        started = []
        for number, whole in enumerate(batch[0].wholes):
            piece = self._piece(value_of(whole))
            rows = [self._row(_node(region.wholes[number].args[0]), piece) for region in batch]
            rows += rows[-1:] * (self._group.size - len(rows))  # so that no rank works on what an update never sees
            started.append(self._exchange(self._insert(aten.cat.default, (rows,), hint="shards")))
        return started

    def wait_for_whole(self, batch: Sequence[_Region], sent: Sequence[fx.Node]) -> None:
        """Have this rank's parameter of a batch."""
        for whole, start in zip(batch[0].wholes, sent, strict=True):
            done = self._insert(WAIT, (start,), hint="whole")
            view = self._insert(aten.as_strided.default, (done, *whole.args[1:]))
            whole.replace_all_uses_with(view)

    def work(self, batch: Sequence[_Region]) -> list[fx.Node]:
        """Make the calls that take the parameter whole; returns the exchange of each result."""
        for call in batch[0].calls:
            self._place.prepend(call)
        started = []
        for shard in batch[0].shards:
            result = _node(shard.args[0])
            elements = self._flat(result, shard.args[3])
            missing = self._group.size * self._piece(value_of(result)) - value_of(elements).numel()
            if missing:
                elements = self._insert(aten.constant_pad_nd.default, (elements, [0, missing]))
            started.append(self._exchange(elements))
        return started

    def wait_for_shards(self, batch: Sequence[_Region], begun: Sequence[fx.Node]) -> None:
        """Have this rank's shards of the results of a batch."""
        for number, start in enumerate(begun):
            done = self._insert(WAIT, (start,), hint="shards")
            for row, region in enumerate(batch):
                shard = region.shards[number]
                first = row * self._piece(value_of(_node(shard.args[0])))
                given = (done, 0, first, first + value_of(shard).numel())
                shard.replace_all_uses_with(self._insert(aten.slice.Tensor, given, like=shard))
                self._later.arrived(shard)
        for region in batch:
            calls = region.calls if region is not batch[0] else ()
            for node in (*region.shards, *reversed(calls), *region.wholes):
                self._program.graph.erase_node(node)

    def _piece(self, whole: torch.Tensor) -> int:
        if self._by_rows and whole.numel():
            return piece_of(whole.shape[0], self._group.size) * (whole.numel() // whole.shape[0])
        return piece_of(whole.numel(), self._group.size)

    def _exchange(self, parts: fx.Node) -> fx.Node:
        """Start to send a part to each rank."""
        self.sent += storage_bytes(value_of(parts))
        return self._insert(ALL_TO_ALL, (parts, self._group.size, self._group.name), hint="all_to_all")

    def _row(self, shard: fx.Node, piece: int) -> fx.Node:
        """A shard as long as the largest: part of the update, so that it is known as the same thing on all ranks."""
        missing = piece - value_of(shard).numel()
        given: dict[str, Any] = {"phase": Phase.UPDATE, "like": shard, "hint": "shard"}
        if value_of(shard).dim() != 1:
            shard = self._insert(aten.reshape.default, (shard, [-1]), **given)
        if missing:
            return self._insert(aten.constant_pad_nd.default, (shard, [0, missing]), **given)
        return self._insert(aten.slice.Tensor, (shard, 0, 0, piece), **given)

    def _flat(self, node: fx.Node, strides: Any) -> fx.Node:
        """All elements of a tensor, as they lie in memory with these strides."""
        value = value_of(node)
        if list(value.stride()) != list(strides) or not is_dense(value):
            order = sorted(range(value.dim()), key=lambda dim: (-strides[dim], dim))
            node = self._insert(aten.permute.default, (node, order))
            node = self._insert(aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
        return self._insert(aten.as_strided.default, (node, [value.numel()], [1]))

    def _insert(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, **more: Any) -> fx.Node:
        return self._program.insert(target, args, kwargs, **{**self._common, **more})


def _node(argument: Any) -> fx.Node:
    assert isinstance(argument, fx.Node)
    return argument
