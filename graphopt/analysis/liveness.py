"""Which storages are alive when: the byte-exact memory timeline of a program, as its generated code runs.

Memory is counted by storage: views belong to their base, each result of an op with several results is a storage of its
own. A storage lives from the op that allocates it to the last use of the last value that refers to it; inputs by
reference live throughout, outputs live to the end.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from graphopt import _torch
from graphopt.analysis.device_timelines import alive_bytes, device_of, split_by_device
from graphopt.analysis.known_timelines import known_timeline
from graphopt.analysis.returned_loss import peaks_of_loops
from graphopt.analysis.workspace import Usage, measured_usage
from graphopt.ir.lowering import reused_operands
from graphopt.ir.memory.timeline import MemoryTimeline, Storage
from graphopt.ir.node import Phase, info, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.values import storage_bytes, tensors_of
from graphopt.ir.program import Program

__all__ = ["bytes_of_copy", "simulate", "storages_of"]

_BLOCK = {"cuda": 512}
"""Allocation granularity in bytes, by device type; the CPU allocator is exact."""

_SCALAR = 16
"""Bytes up to which the tangent of an output is taken for that of the loss."""

_INPUT_CATEGORY = {
    "parameter": "parameters",
    "buffer": "buffers",
    "constant": "buffers",
    "state": "optimizer state",
    "hyperparameter": "optimizer state",
    "gradient": "gradients",
    "input": "inputs",
    "tangent": "gradients",
    "pass_state": "pass state",
}

_PHASE_CATEGORY = {
    Phase.FORWARD: "activations",
    Phase.BACKWARD: "backward",
    Phase.RECOMPUTE: "recomputed",
    Phase.TRANSFER: "in flight",
    Phase.SYNC: "in flight",
    Phase.UPDATE: "update",
}


def _size(tensor: Any) -> int:
    size = storage_bytes(tensor)
    block = _BLOCK.get(_torch.device_kind(tensor))
    return -(-size // block) * block if block else size


def storages_of(
    program: Program, *, forward_in_place: bool = True
) -> tuple[list[Storage], dict[fx.Node, list[Storage]]]:
    """Every allocation of a program, and which allocations the value of each node refers to.

    Args:
        program: of any stage.
        forward_in_place: whether calls of forward that the generated code takes in place share their operand's storage;
            without, each has a storage of its own, for those who make values of forward again or move them.
    """
    calls = [node for node in program.graph.nodes if node.op not in ("placeholder", "output")]
    position = {node: index for index, node in enumerate(calls)}
    refers = _input_storages(program, len(calls))
    storages = [storage for owned in refers.values() for storage in owned]
    storages += _persistent_storages(program, len(calls))
    reused = reused_operands(program, in_forward=forward_in_place)
    for node in calls:
        operand = reused.get(node)
        if operand is None:
            refers[node] = _refer(node, refers, storages, position[node])
        else:
            refers[node] = refers[operand]
            for storage in refers[node]:
                storage.names = (*info(node).names, *storage.names)
    outside = _loss_outside(program, calls)
    _live_to_last_use(refers, position, outside)
    if outside is not None:
        _place_tangents(program, refers, position, outside)
    _categorise(program, refers)
    return storages, refers


def _input_storages(program: Program, end: int) -> dict[fx.Node, list[Storage]]:
    """The storages behind each input; they are alive throughout, and take nothing where they reside elsewhere."""
    refers: dict[fx.Node, list[Storage]] = {}
    sharded = {state.source for state in program.pass_state.values() if state.shard is not None}
    for node, spec in zip(program.placeholders, program.inputs, strict=True):
        category, names = _INPUT_CATEGORY[spec.role], info(node).names
        away = schema.resides_elsewhere(node) or node.name in program.context.offloaded.names
        away = away or (spec.role == "parameter" and spec.target in sharded)
        refers[node] = [
            Storage(
                node,
                0 if away else _size(tensor),
                category,
                -1,
                end,
                names,
                device_of(tensor),
                of=(spec.role, spec.target),
            )
            for tensor in tensors_of(value_of(node))
        ]
    return refers


def _persistent_storages(program: Program, end: int) -> list[Storage]:
    """The storages of what is in memory throughout without being an input; they belong to the first input."""
    inputs = {(spec.role, spec.target) for spec in program.inputs}
    return [
        Storage(
            program.placeholders[0],
            _size(value),
            _INPUT_CATEGORY[role],
            -1,
            end,
            (target,),
            device_of(value),
            of=(role, target),
        )
        for (role, target), value in program.context.step.persistent.items()
        if (role, target) not in inputs
    ]


def _live_to_last_use(refers: dict[fx.Node, list[Storage]], position: dict[fx.Node, int], outside: int | None) -> None:
    """Let the storages of calls live to the last use of the last value that refers to them.

    Args:
        refers: the storages by node.
        position: of each call, in program order.
        outside: where backward starts if the user computes the loss.
    """
    end = len(position)
    handed_out = end if outside is None else outside
    for node, index in position.items():
        last = max((position.get(user, handed_out) for user in node.users), default=index)
        for storage in refers[node]:
            storage.last = max(storage.last, last)


def _loss_outside(program: Program, calls: list[fx.Node]) -> int | None:
    """Where backward starts in a program whose loss the user computes: outputs are handed out until there."""
    if not program.inputs_of("tangent"):
        return None
    return next((index for index, node in enumerate(calls) if info(node).phase is not Phase.FORWARD), len(calls))


def _place_tangents(
    program: Program, refers: dict[fx.Node, list[Storage]], position: dict[fx.Node, int], start: int
) -> None:
    """Tangents come into being with the user's loss and die at their last use; gradients stay to the end.

    What the model returns may stay with the caller to the end, as in ``out = model(x); loss(out).backward()``. The
    tangent of a loss that it returns stays with autograd.
    """
    end = len(position)
    tangents = {id(storage) for node, _ in program.inputs_of("tangent") for storage in refers[node]}
    last: dict[int, int] = dict.fromkeys(tangents, start)
    for node, storages in refers.items():
        users = [position[user] for user in node.users if user in position]
        for storage in storages if users else ():
            if id(storage) in tangents:
                last[id(storage)] = max(last[id(storage)], *users)
    for node, _ in program.inputs_of("tangent"):
        for storage in refers[node]:
            storage.first = start
            storage.last = end if storage.bytes <= _SCALAR else last[id(storage)]
    for value, _ in program.outputs_of("gradient", "output", "base"):
        for storage in refers[value] if isinstance(value, fx.Node) else ():
            storage.last = end


def _refer(
    node: fx.Node, refers: dict[fx.Node, list[Storage]], storages: list[Storage], position: int
) -> list[Storage]:
    """The storages behind a call's value; new ones are appended to ``storages``."""
    if node.target is operator.getitem:
        source, index = node.args
        return _element(source, index, refers)  # type: ignore[arg-type]
    if schema.holds_elsewhere(node):
        return []
    aliased = schema.aliased_inputs(node)
    if aliased:
        return [storage for source in aliased for storage in refers.get(source, [])]
    category = _PHASE_CATEGORY[info(node).phase]
    new = [
        Storage(node, _size(tensor), category, position, position, info(node).names, device_of(tensor))
        for tensor in tensors_of(value_of(node))
    ]
    storages += new
    return new


def _element(source: fx.Node, index: int, refers: dict[fx.Node, list[Storage]]) -> list[Storage]:
    """The storages of one element of a tuple: a flat slice of the tuple's own."""
    value = value_of(source)
    owned = refers[source]
    if schema.aliased_inputs(source) and source.target is not operator.getitem:
        return owned
    before = sum(len(tensors_of(item)) for item in value[:index])
    return owned[before : before + len(tensors_of(value[index]))]


def _categorise(program: Program, refers: dict[fx.Node, list[Storage]]) -> None:
    """Tell gradients, which live until the update or the end, from the rest of what backward allocates."""
    gradients = [value for value, _ in program.outputs_of("gradient") if isinstance(value, fx.Node)]
    gradients += [
        source
        for node in program.phase_nodes(Phase.UPDATE)
        for source in node.all_input_nodes
        if source.op == "call_function" and info(source).phase is Phase.BACKWARD
    ]
    for node in gradients:
        for storage in refers[node]:
            if storage.category == "backward":
                storage.category = "gradients"
    for node, storages in refers.items():
        for storage in storages:
            if not storage.names and info(node).names:
                storage.names = info(node).names


def _correct(storages: list[Storage], usage: list[Usage]) -> None:
    """Give the storages that ops allocated the sizes that were measured."""
    made: dict[int, list[Storage]] = {}
    for storage in storages:
        if not storage.is_input and storage.owner.op != "placeholder":
            made.setdefault(storage.first, []).append(storage)
    for position, owned in made.items():
        sizes = usage[position].results
        if sizes is not None and len(sizes) == len(owned):
            for storage, size in zip(owned, sizes, strict=True):
                storage.bytes = size


def _copied_in(
    program: Program, calls: Sequence[fx.Node], refers: Mapping[fx.Node, list[Storage]]
) -> Iterator[tuple[int, int]]:
    """The positions of calls that touch inputs which reside elsewhere, and the bytes that are copied in for each."""
    away = [node for node in program.placeholders if node.name in program.context.offloaded.names]
    sizes = {id(s): bytes_of_copy(program, node) for node in away for s in refers[node]}
    for position, node in enumerate(calls if sizes else ()):
        touched = {id(storage) for source in node.all_input_nodes for storage in refers.get(source, ())}
        if not schema.is_view(node) and not touched.isdisjoint(sizes):
            yield position, sum(sizes[key] for key in touched & sizes.keys())


def bytes_of_copy(program: Program, node: fx.Node) -> int:
    """Bytes that an input which resides elsewhere takes while it is copied in.

    A parameter that is gathered from shards takes what fills them up, too.
    """
    value = value_of(node)
    shapes = {state.source: state.shape for state in program.pass_state.values() if state.shard is not None}
    specs = zip(program.placeholders, program.inputs, strict=True) if shapes else ()
    name = next((spec.target for other, spec in specs if other is node), "")
    if name not in shapes:
        return _size(value)
    (piece,) = shapes[name]
    return int(-(-value.numel() // piece) * piece * value.element_size())


def _in_flight(calls: Sequence[fx.Node], refers: Mapping[fx.Node, list[Storage]]) -> Iterator[tuple[int, int]]:
    """Where what an exchange sends stays behind its last use, up to where the exchange is waited for, and its bytes."""
    position = {node: index for index, node in enumerate(calls)}
    for node in calls:
        if not schema.starts_exchange(node):
            continue
        waits = max((position[user] for user in node.users if user in position), default=position[node])
        sent = {id(storage): storage for source in node.all_input_nodes for storage in refers[source]}
        for storage in sent.values():
            for step in range(storage.last + 1, waits + 1):
                yield step, storage.bytes


def simulate(
    program: Program,
    *,
    measure: bool = True,
    forward_in_place: bool = True,
    sizes: Mapping[str, int] | None = None,
) -> MemoryTimeline:
    """Bytes alive at every call of ``program``, as its generated code runs it, for each device that values are on.

    Args:
        program: of any stage.
        measure: count what ops allocate for themselves, measured on zeros at the first call per shapes; without,
            temporaries count as 0.
        forward_in_place: as for ``storages_of``.
        sizes: values of the symbols in sizes that vary; by default those that the program is planned for
            (``PlannedSizes.planned``), else those of the example inputs.
    """
    taken = program.context.sizes.planned if sizes is None else sizes
    measured = measure, torch.get_num_threads(), _torch.profiler_is_running()  # beside which nothing is measured
    way = measured, forward_in_place, frozenset(taken.items()), program.context.offloaded.names
    with _torch.sizes_taken_as(taken):
        return known_timeline(program, way, lambda: _simulate(program, measure, forward_in_place))


def _simulate(program: Program, measure: bool, forward_in_place: bool) -> MemoryTimeline:
    calls = [node for node in program.graph.nodes if node.op not in ("placeholder", "output")]
    usage = measured_usage(calls) if measure else [Usage()] * len(calls)
    storages, refers = storages_of(program, forward_in_place=forward_in_place)
    _correct(storages, usage)
    temporaries = [item.temporary for item in usage]
    for position, size in (*_copied_in(program, calls, refers), *_in_flight(calls, refers)):
        temporaries[position] += size
    alive, resident = alive_bytes(storages, temporaries)
    device = program.context.device
    timeline = split_by_device(MemoryTimeline(calls, alive, resident, storages, temporaries, refers, device))
    timeline.loops, timeline.there = peaks_of_loops(program, timeline), program.context.step.there
    return timeline
