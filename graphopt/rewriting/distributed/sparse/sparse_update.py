"""Updates of the entries that have arrived, in place of whole tensors.

Where an update leaves elements as they are whose gradient is 0, as that of SGD without momentum and weight decay does,
sparse exchange needs no dense sums. In place of ``update_([p, ...], [mean, ...])`` a program has::

    indices, sums = graphopt.sum_entries(wait_tensor(gathered), ...)
    part = p.view(-1)[indices of p]
    update_([part, ...], [sums of p, ...])
    p.view(-1).index_copy_(0, indices of p, part)

Entries that several ranks sent stand there several times, with the same sum, and are written with the same number.

The warm-up of sparse exchange: which sparsity at which step. Plain data.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphopt import _torch
from graphopt.ir.node import Phase, info, value_of
from graphopt.ir.ops.communication.sparse import sum_entries
from graphopt.ir.ops.values import is_dense
from graphopt.ir.program import Program
from graphopt.rewriting.distributed.dense.all_reduce import final_gradients, gradient_readers
from graphopt.rewriting.distributed.flat_exchange import memory_strides

__all__ = ["FEWEST", "Rampup", "Use", "adds_gradients", "few_enough", "reason_for_dense", "update_entries", "uses_of"]

aten = torch.ops.aten

FEWEST = 64
"""Elements for each entry that arrives from which on updating entries is faster: each of them has to be sorted."""

_SGD = (aten._fused_sgd_.default, aten._fused_sgd_.tensor_lr)


_Entries = tuple[fx.Node, fx.Node]
"""Of one tensor: the indices of the entries that have arrived, and their sums."""


@dataclass(frozen=True, slots=True)
class Use:
    """Where an update reads a gradient that it takes element by element.

    Attributes:
        gradient: that is read.
        call: an op in place on one tensor, or on a list of them.
        place: of the gradient in the list; None for an op on one tensor.
        parameter: that it updates.
    """

    gradient: fx.Node
    call: fx.Node
    place: int | None
    parameter: fx.Node


def few_enough(ranks: int, counts: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether so few entries arrive that updating just them is faster than adding up whole tensors.

    Args:
        ranks: that send.
        counts: entries that each of them sends, by tensor.
        sizes: elements, by tensor.
    """
    return FEWEST * ranks * sum(counts) <= sum(sizes)


def reason_for_dense(adds: bool, ranks: int, counts: Sequence[int], sizes: Sequence[int]) -> str:
    """Why an update reads dense sums; empty where it reads the entries that arrive.

    Args:
        adds: whether the update does no more than adding gradients to parameters.
        ranks: as of ``few_enough``, and so are the others.
        counts: entries by tensor.
        sizes: elements by tensor.
    """
    if not adds:
        return "the update does more than adding gradients to parameters"
    return "" if few_enough(ranks, counts, sizes) else f"more than one of {FEWEST} elements arrives"


def adds_gradients(program: Program, *, momentum: bool = False) -> bool:
    """Whether the update does no more than adding gradients, times numbers, to parameters.

    Args:
        program: of stage step or, without an update, joint.
        momentum: count that of fused SGD, and the weight decay with it, as nothing more, since sparse exchange applies
            them by itself.
    """
    found = final_gradients(program).values() if program.stage == "step" else ()
    return bool(found) and all(uses_of(program, node, gradient_readers(node), momentum=momentum) for node in found)


def uses_of(program: Program, gradient: fx.Node, readers: Sequence[fx.Node], *, momentum: bool = False) -> list[Use]:
    """All uses of a gradient by the update; empty where one of them does more than adding it to a parameter.

    Args:
        program: of stage step.
        gradient: of any layout.
        readers: what reads it behind its exchange.
        momentum: as of ``adds_gradients``.
    """
    parameters = {node for node, _ in program.inputs_of("parameter")}
    value = value_of(gradient)
    found: list[Use] = []
    for reader in readers:
        uses = [use for use in _additions(reader, gradient, momentum) if use.parameter in parameters]
        alike = all(_same_order(value_of(use.parameter), value) for use in uses)
        if not uses or not alike or len(uses) != _occurrences(reader, gradient):
            return []
        found += uses
    return found


def _additions(call: fx.Node, gradient: fx.Node, momentum: bool) -> list[Use]:
    """The uses of a gradient by a call that leaves a parameter as it is where the gradient is 0."""
    if call.users or len(call.args) < 2:
        return []
    targets, gradients = call.args[:2]
    if call.target is aten.add_.Tensor:
        return [Use(gradient, call, None, targets)] if gradients is gradient and isinstance(targets, fx.Node) else []
    adds = call.target is aten._foreach_add_.List or (call.target in _SGD and _is_plain(call, momentum))
    if not adds or not isinstance(targets, Sequence) or not isinstance(gradients, Sequence):
        return []
    pairs = enumerate(zip(targets, gradients, strict=True))
    return [
        Use(gradient, call, place, target)
        for place, (target, given) in pairs
        if given is gradient and isinstance(target, fx.Node)
    ]


def _is_plain(call: fx.Node, momentum: bool) -> bool:
    """Whether a fused update of SGD only adds: ``momentum`` if it has one, else where it has no weight decay."""
    if call.kwargs.get("momentum"):
        return momentum
    return not call.kwargs.get("weight_decay")


def _occurrences(call: fx.Node, node: fx.Node) -> int:
    return sum(leaf is node for leaf in _torch.pytree.tree_leaves((call.args, call.kwargs)))


def _same_order(parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Whether the elements of a parameter lie in memory in the order in which its gradient's are counted."""
    return is_dense(parameter) and tuple(parameter.stride()) == tuple(memory_strides(gradient))


def update_entries(
    program: Program, entries: tuple[Any, ...], uses: Sequence[Sequence[Use]], due: fx.Node, origin: str
) -> None:
    """Update just the entries that have arrived.

    Args:
        program: is changed: the calls of the update read what is left of their lists, if anything.
        entries: the arguments of ``graphopt.sum_entries``: what was gathered, ranks, counts of the tensors, and so on.
        uses: of the gradient of each tensor.
        due: the first call that reads one of them.
        origin: whose nodes they are.
    """
    _, ranks, counts, *_ = entries
    early: dict[str, Any] = {"before": due, "phase": Phase.SYNC, "origin": origin}
    summed = program.insert(sum_entries, entries, hint="entries", **early)
    every = [program.insert(operator.getitem, (summed, number), **early) for number in (0, 1)]
    offset, arrived = 0, dict[Use, _Entries]()
    for of_one, count in zip(uses, counts, strict=True):
        layout, gradient = ([ranks * count], [1], offset), of_one[0].gradient
        indices, sums = (
            program.insert(aten.as_strided.default, (node, *layout), like=gradient, hint=hint, **early)
            for node, hint in zip(every, ("arrived", "mean"), strict=True)
        )
        arrived.update(dict.fromkeys(of_one, (indices, sums)))
        offset += ranks * count
    for call in dict.fromkeys(use.call for use in arrived):
        _update(program, call, {use: given for use, given in arrived.items() if use.call is call}, origin)


def _update(program: Program, call: fx.Node, uses: Mapping[Use, _Entries], origin: str) -> None:
    """Take tensors out of a call, and update their entries in front of it by the same op."""
    common: dict[str, Any] = {"before": call, "phase": Phase.UPDATE}
    flats, parts = [], []
    for use, (indices, _) in uses.items():
        own: dict[str, Any] = {"like": use.gradient, "origin": origin, **common}
        layout = (use.parameter, [value_of(use.parameter).numel()], [1])
        flats.append(program.insert(aten.as_strided.default, layout, **own))
        parts.append(program.insert(aten.index.Tensor, (flats[-1], [indices]), hint="part", **own))
    target: Any = call.target
    first: list[Any] = [parts, [sums for _, sums in uses.values()]]
    if target is aten.add_.Tensor:
        first = [items[0] for items in first]
    program.insert(target, [*first, *call.args[2:]], dict(call.kwargs), like=call, origin=info(call).origin, **common)
    for flat, part, (use, (indices, _)) in zip(flats, parts, uses.items(), strict=True):
        program.insert(aten.index_copy_.default, (flat, 0, indices, part), like=use.gradient, origin=origin, **common)
    left = _without([use.place for use in uses if use.place is not None], *call.args[:2])
    if all(left):
        call.args = (*left, *call.args[2:])
    else:
        program.graph.erase_node(call)


def _without(places: Sequence[int], *lists: Any) -> list[list[Any]]:
    """Lists without the items at some places; empty for what is no list, whose only item is taken."""
    return [
        [item for place, item in enumerate(items) if place not in places] if isinstance(items, Sequence) else []
        for items in lists
    ]


@dataclass(frozen=True, slots=True)
class Rampup:
    """Dense exchange first, then each sparsity for an equal part of the warm-up, the last one from there on.

    Attributes:
        sparsity: shares of the elements that are not exchanged, ascending.
        begin: number of the first step with the first sparsity.
        steps: length of the warm-up.
    """

    sparsity: tuple[float, ...]
    begin: int
    steps: int

    def at(self, step: int) -> float | None:
        """The sparsity of a step, counted from 0; None before ``begin``."""
        if step < self.begin:
            return None
        index = (step - self.begin) * len(self.sparsity) // self.steps
        return self.sparsity[min(index, len(self.sparsity) - 1)]

    def starts(self) -> list[tuple[int, float]]:
        """When each sparsity that is used begins: step and sparsity."""
        found: list[tuple[int, float]] = []
        for index, sparsity in enumerate(self.sparsity):
            start = self.begin + -(-index * self.steps // len(self.sparsity))
            if self.at(start) == sparsity:
                found.append((start, sparsity))
        return found
