"""List ops, as optimizers use them: one call for many tensors that equals one call for each of them.

These ops qualify:

* ``aten._foreach_*``: an elementwise op, or a reduction of each tensor, applied to every element of its lists;
* ``aten._fused_{adam,adamw,sgd,adagrad}[_]``: an optimizer's update of every element of its lists.

Their kernels handle each element by itself: on a CPU in a loop over the list, on CUDA in pieces of one element each.
The i-th results depend on the i-th elements and on what is not a list, and a list of one gives the same bits. The
schema and the call have to say so too:

* everything that is written is an element of a list (``_amp_foreach_non_finite_check_and_unscale_`` writes a flag that
  all elements share, and does not qualify);
* all lists are of one length, or empty (the buffers that an option switches off);
* what is returned, if anything, is one list;
* all elements of a list have one dtype and device and, except on a CPU, a dense layout that is the same in all lists:
  CUDA's list kernels take the whole list or leave all of it to other kernels.

``_foreach_mm`` does not qualify, since matrix products of a list may be one grouped product.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import fx

from graphopt import _torch
from graphopt.ir.node import value_of

__all__ = ["element_call", "element_value", "elements"]

_FUSED = frozenset(f"_fused_{kind}{suffix}" for kind in ("adam", "adamw", "sgd", "adagrad") for suffix in ("", "_"))
_GROUPED = frozenset({"_foreach_mm"})


@cache
def _list_arguments(op: _torch.OpOverload) -> tuple[tuple[int, str], ...]:
    """Positions and names of the list arguments of an op that works element by element; empty for any other op."""
    name = op._schema.name.split("::")[-1]
    if op.namespace != "aten" or name in _GROUPED or not (name.startswith("_foreach_") or name in _FUSED):
        return ()
    arguments, returns = op._schema.arguments, op._schema.returns
    shares = any(a.alias_info and a.alias_info.is_write for a in arguments if not _is_list(a))
    if shares or len(returns) > 1 or not all(_is_list(r) for r in returns):
        return ()
    return tuple((index, argument.name) for index, argument in enumerate(arguments) if _is_list(argument))


def _is_list(argument: Any) -> bool:
    return str(argument.type).startswith("List[")


def elements(node: fx.Node) -> int:
    """How many calls on one element each a call equals to the last bit; 0 where it is not such a call."""
    if not isinstance(node.target, _torch.OpOverload) or any(u.target is not operator.getitem for u in node.users):
        return 0
    given = [_given(node, index, name) for index, name in _list_arguments(node.target)]
    lists = [items for items in given if isinstance(items, Sequence) and len(items)]
    lengths = {len(items) for items in lists}
    if len(lengths) != 1 or not all(isinstance(items, Sequence) for items in given) or not _uniform(lists):
        return 0
    return lengths.pop()


def element_call(node: fx.Node, index: int) -> tuple[_torch.OpOverload, tuple[Any, ...], dict[str, Any]]:
    """The op and arguments of the call on one element of a list op: each list that is not empty holds that element."""
    assert isinstance(node.target, _torch.OpOverload)
    args, kwargs = list(node.args), dict(node.kwargs)
    for position, name in _list_arguments(node.target):
        one = list(_given(node, position, name))[index : index + 1]
        if position < len(args):
            args[position] = one
        elif name in kwargs:
            kwargs[name] = one
    return node.target, tuple(args), kwargs


def element_value(node: fx.Node, index: int) -> Any:
    """The value of the call on one element of a list op (``element_call``): its part of the op's own."""

    def part(value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            return value
        lists = any(isinstance(item, (list, tuple)) for item in value)
        return type(value)(map(part, value)) if lists else value[index : index + 1]

    return part(value_of(node))


def _given(node: fx.Node, position: int, name: str) -> Any:
    return node.args[position] if position < len(node.args) else node.kwargs.get(name)


def _uniform(lists: Sequence[Sequence[Any]]) -> bool:
    """Whether the same kernel handles the whole lists and any of their elements."""
    tensors = [values for values in map(_tensors, lists) if values]
    if any(_is_mixed(values) for values in tensors):
        return False
    if all(_torch.device_kind(value) == "cpu" for values in tensors for value in values):
        return True
    return all(_same_layout([value for value in row if value.dim()]) for row in zip(*tensors, strict=True))


def _tensors(items: Sequence[Any]) -> list[torch.Tensor]:
    """The values of a list of calls that all give tensors; empty for any other list."""
    values = [value_of(item) for item in items if isinstance(item, fx.Node)]
    return values if all(isinstance(value, torch.Tensor) for value in values) else []


def _is_mixed(values: Sequence[torch.Tensor]) -> bool:
    return len({(value.dtype, value.device) for value in values}) > 1


def _same_layout(row: Sequence[torch.Tensor]) -> bool:
    """Whether tensors have the same strides, without gaps or overlaps (an empty copy of them keeps such strides)."""
    return len({value.stride() for value in row}) <= 1 and all(
        torch.empty_like(value, memory_format=torch.preserve_format).stride() == value.stride() for value in row[:1]
    )
