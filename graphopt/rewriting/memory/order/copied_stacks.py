"""Gradients that are stacked and then copied in another order: stacked in that order, they are copied once.

The backward of ``qkv.permute(...).unbind(0)``, as attention has it, stacks three gradients, permutes the result and
makes it contiguous: two tensors of the size of all three, one after the other, where one is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from graphopt.ir.node import Phase, info, own_phase, set_info, slice_number, value_of
from graphopt.ir.ops.values import storage_bytes
from graphopt.ir.program import Program
from graphopt.ir.words.written_units import format_bytes

__all__ = ["stacks_as_copied"]

_aten = torch.ops.aten
_JOINED = (_aten.stack.default, _aten.cat.default)


def stacks_as_copied(program: Program, origin: str) -> tuple[Program, str] | None:
    """A program that stacks or concatenates gradients in the order in which it copies them.

    The copy's elements are the same, and so are its strides. It is there from when the stack was, which nothing else
    read, so that no call has more bytes beside it.

    Args:
        program: is only read.
        origin: who does it, for people.

    Returns:
        a copy in that form, with what a user should read; None where there is no such stack, or where a compiler makes
        the code.
    """
    if program.context.compiled or not any(_copied(program)):
        return None
    trial = program.copy()
    sizes = [_rewrite(trial, *found, origin) for found in list(_copied(trial))]
    trial.erase_dead()
    saved = [size for size in sizes if size]
    if not saved:
        return None
    made = "stack of gradients is made in the order in which it is copied"
    if len(saved) > 1:
        made = "stacks of gradients are made in the order in which they are copied"
    return trial, f"{len(saved)} {made}: saves {format_bytes(max(saved))}"


def _copied(program: Program) -> Iterator[tuple[fx.Node, fx.Node, fx.Node]]:
    """The stacks of backward that only a copy in another order reads, each with the permutation and the copy."""
    for copy in program.phase_nodes(Phase.BACKWARD):
        if copy.target is not _aten.clone.default or copy.kwargs.get("memory_format") is not torch.contiguous_format:
            continue
        order = copy.args[0]
        if not isinstance(order, fx.Node) or order.target not in (_aten.permute.default, _aten.transpose.int):
            continue
        joined = order.args[0]
        if isinstance(joined, fx.Node) and joined.target in _JOINED and _is_only_for(joined, order, copy):
            yield joined, order, copy


def _is_only_for(joined: fx.Node, order: fx.Node, copy: fx.Node) -> bool:
    """Whether all three are of backward, in one slice of the batch, and nothing else reads the first two."""
    alone = list(joined.users) == [order] and list(order.users) == [copy]
    of_backward = info(joined).phase is own_phase(joined) is own_phase(copy) is Phase.BACKWARD
    axes = value_of(joined).dim() - (joined.target is _aten.stack.default)
    plain = all(value_of(item).dim() == axes for item in joined.all_input_nodes)  # cat takes empty ones of one axis
    return alone and of_backward and plain and slice_number(joined) == slice_number(copy)


def _rewrite(program: Program, joined: fx.Node, order: fx.Node, copy: fx.Node, origin: str) -> int:
    """Stack in the order of the copy; the bytes that are not needed any more, 0 where strides would be others."""
    count = value_of(joined).dim()
    dims = _permutation(order, count)
    arguments: tuple[Any, ...] = joined.args
    given, dim = list(arguments[0]), (arguments[1] if len(arguments) > 1 else 0) % count
    target: Any = joined.target
    is_stack = target is _aten.stack.default
    inner = [d - (is_stack and d > dim) for d in dims if not (is_stack and d == dim)]

    def call(target: Callable[..., Any], args: Sequence[Any], hint: str) -> fx.Node:
        made = program.insert(target, args, before=joined, phase=Phase.BACKWARD, origin=origin, like=joined, hint=hint)
        set_info(made, replace(info(made), batch_slice=info(joined).batch_slice))
        return made

    turned = {item: call(_aten.permute.default, (item, inner), f"{item.name}_turned") for item in dict.fromkeys(given)}
    made = call(target, ([turned[item] for item in given], dims.index(dim)), f"{copy.name}_stacked")
    if value_of(made).stride() != value_of(copy).stride():
        for node in (made, *turned.values()):
            program.graph.erase_node(node)
        return 0
    set_info(made, replace(info(made), names=info(copy).names, module=info(copy).module))
    set_info(copy, replace(info(copy), names=()))
    copy.replace_all_uses_with(made)
    for node in (copy, order, joined):
        program.graph.erase_node(node)
    return storage_bytes(value_of(made))


def _permutation(order: fx.Node, count: int) -> list[int]:
    """Which dimension of its argument each dimension of a permuted value is."""
    given: tuple[Any, ...] = order.args
    if order.target is _aten.permute.default:
        return [dim % count for dim in given[1]]
    dims = list(range(count))
    first, second = given[1] % count, given[2] % count
    dims[first], dims[second] = dims[second], dims[first]
    return dims
