"""Facts about ops, read from their schemas: which results alias which arguments, which ops draw random numbers."""

from __future__ import annotations

import operator
from functools import cache
from typing import Any

import torch
from torch import fx

from graphopt import _torch

__all__ = [
    "aliased_inputs",
    "hands_on",
    "has_effect",
    "holds_elsewhere",
    "is_collective",
    "is_gather",
    "is_own_tensor",
    "is_random",
    "is_view",
    "maker",
    "mutated_inputs",
    "named_arguments",
    "nodes_in",
    "op_name",
    "readers",
    "resides_elsewhere",
    "starts_exchange",
    "storage_root",
]

_UNDECLARED_VIEWS = {
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten._reshape_alias.default,
    _torch.wait_tensor,
}
"""Ops that return their argument's storage although their schema does not say so."""

_MAKES_READY = ("offload_wait", "prefetch_wait", "swap_in_wait", "move_out_wait", "store")
"""Ops of graphopt behind which the data of the argument that they hand on is there."""

_MAKE_SEPARATE_TENSORS = (
    "native_",
    "_native_",
    "convolution_backward",
    "batch_norm",
    "cudnn_batch_norm",
    "_scaled_dot_product",
    "max_pool2d_with_indices",
)
"""How the names of ops begin whose results do not share memory with each other."""

_MOVE_AWAY = ("graphopt::offload", "graphopt::move_out")
_SWAPS = ("graphopt::swap_in", "graphopt::swap_in_wait", "graphopt::swap_out", "graphopt::swap_out_wait")

_COLLECTIVES = ("_c10d_functional", "c10d_functional", "_dtensor", "c10d")
_GATHER = "graphopt::gather_shards"
_OUR_COLLECTIVES = (
    "graphopt::all_gather_into_tensor",
    "graphopt::all_to_all",
    "graphopt::gather_into_",
    _GATHER,
    "graphopt::reduce_scatter_sum",
    "graphopt::same_on_all_ranks",
)


@cache
def _alias_arguments(op: _torch.OpOverload) -> tuple[tuple[int | str, ...], bool]:
    """(positions or keywords of arguments that results may alias, whether the aliasing is by writing)."""
    if op in _UNDECLARED_VIEWS:
        return (0,), False
    returned = {letter for result in op._schema.returns if result.alias_info for letter in result.alias_info.before_set}
    found: list[int | str] = []
    write = False
    for index, argument in enumerate(op._schema.arguments):
        if argument.alias_info is None:
            continue
        # ops that return lists of views (unbind, split) do not repeat the letter in what they return
        if not argument.alias_info.is_write or returned & set(argument.alias_info.before_set):
            found.append(argument.name if argument.kwarg_only else index)
            write = write or argument.alias_info.is_write
    return tuple(found), write


@cache
def _written_arguments(op: _torch.OpOverload) -> tuple[tuple[int, str], ...]:
    return tuple(
        (index, argument.name)
        for index, argument in enumerate(op._schema.arguments)
        if argument.alias_info and argument.alias_info.is_write
    )


def nodes_in(value: Any) -> list[fx.Node]:
    """The nodes in an argument, however deep in lists, in order."""
    found: list[fx.Node] = []
    _torch.map_aggregate(value, lambda item: found.append(item) if isinstance(item, fx.Node) else None)
    return found


def aliased_inputs(node: fx.Node) -> list[fx.Node]:
    """The argument nodes whose storage the result of ``node`` shares (empty where it owns new storage).

    An op that may or may not alias (``to``, ``contiguous``) counts as aliasing only in functional form never emitted
    by the joint capture; see ``is_view``.
    """
    if node.target is operator.getitem:
        return [node.args[0]]  # type: ignore[list-item]
    if not isinstance(node.target, _torch.OpOverload):
        return []
    keys, _ = _alias_arguments(node.target)
    found = []
    for key in keys:
        positional = node.args[key] if isinstance(key, int) and key < len(node.args) else None
        value = positional if isinstance(key, int) else node.kwargs.get(key)
        found += nodes_in(value)
    return found


def is_view(node: fx.Node) -> bool:
    """Whether the result is its argument's storage seen differently: free to make again.

    What waits for an argument's data, or writes it, hands the argument on as well and is no view.
    """
    return hands_on(node) and not is_collective(node) and op_name(node) not in _MAKES_READY


def hands_on(node: fx.Node) -> bool:
    """Whether the result is an argument's storage, to which the call does not write: views, and what waits."""
    if not isinstance(node.target, _torch.OpOverload):
        return False
    keys, writes = _alias_arguments(node.target)
    return bool(keys) and not writes


def maker(node: fx.Node) -> fx.Node:
    """The call that made a value: what stands behind an element of a tuple."""
    while node.target is operator.getitem:
        node = node.args[0]  # type: ignore[assignment]
    return node


def is_own_tensor(node: fx.Node) -> bool:
    """Whether a node is one of several tensors that a call makes, each with memory of its own, read by elements alone.

    Of other calls with several results (recurrent layers, for one) it is not known whether these share memory.
    """
    if node.target is not operator.getitem:
        return False
    call = node.args[0]
    assert isinstance(call, fx.Node)
    apart = op_name(call).startswith(_MAKE_SEPARATE_TENSORS) and not aliased_inputs(call)
    return apart and all(user.target is operator.getitem for user in call.users)


def storage_root(node: fx.Node) -> fx.Node:
    """The node that allocated the storage behind a view, or behind an element of a tuple of views (else the node)."""
    while True:
        if node.target is operator.getitem and is_view(node.args[0]):  # type: ignore[arg-type]
            node = node.args[0]  # type: ignore[assignment]
        if not is_view(node):
            return node
        node = aliased_inputs(node)[0]


def readers(node: fx.Node) -> set[fx.Node]:
    """Every call that reads a value, directly or through views of it (the views among them).

    Elements of a tuple, and what a wait hands on, are the value as well.
    """
    found: set[fx.Node] = set()
    pending = [node]
    while pending:
        value = pending.pop()
        for user in value.users:
            if user.op != "output" and user not in found:
                found.add(user)
                if user.target is operator.getitem or (hands_on(user) and value in aliased_inputs(user)):
                    pending.append(user)
    return found


def mutated_inputs(node: fx.Node) -> list[fx.Node]:
    """The argument nodes that an in-place op writes to."""
    if not isinstance(node.target, _torch.OpOverload):
        return []
    found = []
    for index, name in _written_arguments(node.target):
        found += nodes_in(node.args[index] if index < len(node.args) else node.kwargs.get(name))
    return found


def holds_elsewhere(node: fx.Node) -> bool:
    """Whether the result is a tensor that was offloaded, or its handle: it takes nothing on the device."""
    return isinstance(node.target, _torch.OpOverload) and node.target._schema.name in _MOVE_AWAY


def resides_elsewhere(node: fx.Node) -> bool:
    """Whether an input is one of those on the host or a disk, which are copied in where they are needed."""
    return node.op == "placeholder" and bool(node.users) and all(map(_swaps, node.users))


def _swaps(node: fx.Node) -> bool:
    return isinstance(node.target, _torch.OpOverload) and node.target._schema.name in _SWAPS


def is_recurrent(node: fx.Node) -> bool:
    """Whether a call is one of a whole recurrent layer."""
    return isinstance(node.target, _torch.OpOverload) and op_name(node) in _RECURRENT


def is_random(node: fx.Node) -> bool:
    """Whether the op advances a random-number generator."""
    if node.target is _torch.run_and_save_rng_state:
        return True
    if not isinstance(node.target, _torch.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    return not _drops_nothing(node)


_DROPOUT_ARGUMENT = {"dropout_p", "p", "dropout"}
_DROPOUTS = {"dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"}
_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}


def _drops_nothing(node: fx.Node) -> bool:
    """Whether a random op is one whose dropout probability is zero here, so that it draws nothing.

    Attention kernels and recurrent layers are tagged random because they can drop out; otherwise they are plain
    functions. Recurrent layers drop out between two layers, and in training only.
    """
    name = op_name(node)
    if name in _RECURRENT:
        given = named_arguments(node)
        return given["dropout"] == 0 or given["train"] is False or given["num_layers"] == 1
    if name in _DROPOUTS:
        given = named_arguments(node)
        return given["p"] == 0 or given["train"] is False
    if "attention" not in name:
        return False
    dropout = next((value for key, value in named_arguments(node).items() if key in _DROPOUT_ARGUMENT), None)
    return isinstance(dropout, (int, float)) and dropout == 0


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call by name, with the defaults of those that are not given; none of what is no single op."""
    if not isinstance(node.target, _torch.OpOverload):
        return {}
    return {
        argument.name: node.args[index]
        if index < len(node.args)
        else node.kwargs.get(argument.name, argument.default_value)
        for index, argument in enumerate(node.target._schema.arguments)
    }


def is_collective(node: fx.Node) -> bool:
    """Whether the op talks to other ranks."""
    if not isinstance(node.target, _torch.OpOverload):
        return False
    return node.target.namespace in _COLLECTIVES or node.target._schema.name in _OUR_COLLECTIVES


def is_gather(node: fx.Node) -> bool:
    """Whether the op gathers sharded parameters and waits for them, which all ranks may do again."""
    return isinstance(node.target, _torch.OpOverload) and node.target._schema.name == _GATHER


def starts_exchange(node: fx.Node) -> bool:
    """Whether a call begins an exchange with other ranks whose result is another tensor than what it is given."""
    return is_collective(node) and not aliased_inputs(node)


def has_effect(node: fx.Node) -> bool:
    """Whether removing or repeating the call would change more than its result."""
    if node.op in ("placeholder", "output"):
        return True
    if node.target is _torch.run_with_rng_state:
        return False
    if isinstance(node.target, _torch.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags:
        return is_random(node)
    return bool(mutated_inputs(node)) or is_random(node) or is_collective(node) or node.is_impure()


def op_name(node: fx.Node) -> str:
    """The short name of what a node calls: ``mm``, ``native_layer_norm``, ``getitem``."""
    target = node.target
    if isinstance(target, _torch.OpOverload):
        return target._schema.name.split("::")[-1]
    if isinstance(target, str):
        return target
    return getattr(target, "__name__", None) or str(target)
