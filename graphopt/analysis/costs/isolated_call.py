"""Running one call of a program by itself: what it calls, when two calls are the same, and arguments made up for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from graphopt import _torch
from graphopt.ir.graphs.graph_copies import kept_key
from graphopt.ir.node import Phase, info, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.values import storage_bytes, tensors_of

__all__ = ["LARGEST_CALL", "Fill", "call_bytes", "call_key", "call_tensors", "prepare", "real_call", "refusal", "sizes"]

LARGEST_CALL = 2 * 1024**3
"""Calls whose arguments and results take more bytes are not run."""

Fill = Callable[[int, torch.dtype, torch.device], torch.Tensor]
"""Makes a flat tensor of so many elements."""


_COPY_STORAGE = {"copy", "slice_scatter", "select_scatter", "diagonal_scatter", "as_strided_scatter"}
"""Ops that copy all of the storage behind an argument that has gaps, not only what it shows of it."""


def real_call(node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The op that really runs, with its arguments: ops that save or replay a generator's state carry another one."""
    if node.target is _torch.run_and_save_rng_state:
        return node.args[0], tuple(node.args[1:]), dict(node.kwargs)
    if node.target is _torch.run_with_rng_state:
        return node.args[1], tuple(node.args[2:]), dict(node.kwargs)
    return node.target, tuple(node.args), dict(node.kwargs)


def refusal(node: fx.Node) -> str:
    """Why a call must not be run by itself; empty where it may be."""
    target, _, _ = real_call(node)
    if not isinstance(target, _torch.OpOverload):
        return "it is not a single op"
    if schema.is_view(node):
        return "it is a view"
    if schema.is_collective(node):
        return "it is a collective"
    if schema.mutated_inputs(node):
        return "it writes to its arguments"
    if info(node).phase is Phase.TRANSFER:
        return "it starts or awaits a transfer"
    return ""


def call_key(node: fx.Node) -> str:
    """Equal for calls that run alike: op, shapes, strides, dtypes, devices, other arguments and number of threads.

    Empty for calls that must not be run by themselves.
    """
    if info(node).phase is Phase.TRANSFER:
        return ""
    key = kept_key(node, _call_key)
    return key and f"{key}{torch.get_num_threads()}"


def _call_key(node: fx.Node) -> str:
    if refusal(node):
        return ""
    target, args, kwargs = real_call(node)
    described = _torch.map_aggregate((args, kwargs), lambda a: _describe(value_of(a)) if isinstance(a, fx.Node) else a)
    behind = [_behind(value_of(source)) for source in node.all_input_nodes] if _copies_storage(node) else ""
    return f"{target}{described}{behind}"


def _copies_storage(node: fx.Node) -> bool:
    return isinstance(node.target, _torch.OpOverload) and schema.op_name(node) in _COPY_STORAGE


def _behind(value: Any) -> tuple[int, int]:
    """Bytes of the storage behind a tensor, and where in it the tensor begins, in elements."""
    if not isinstance(value, torch.Tensor):
        return 0, 0
    return _torch.size_hint(value.untyped_storage().nbytes()), _torch.size_hint(value.storage_offset())


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"<{sizes(value.shape)} {sizes(value.stride())} {value.dtype} {value.device}>"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(_describe(item) for item in value)}]"
    return repr(_number(value))


def sizes(values: Iterable[Any]) -> tuple[int, ...]:
    """Sizes or strides as plain integers; symbolic ones by their example."""
    return tuple(_torch.size_hint(value) for value in values)


def _number(value: Any) -> Any:
    """A symbolic number's example; anything else as it is."""
    if isinstance(value, torch.SymInt):
        return _torch.size_hint(value)
    return _torch.number_hint(value) if isinstance(value, torch.SymFloat) else value


def call_tensors(node: fx.Node) -> list[torch.Tensor]:
    """The example values of what a call returns and of what it is given."""
    return [t for n in (node, *node.all_input_nodes) for t in tensors_of(value_of(n))]


def call_bytes(node: fx.Node) -> int:
    """Bytes that the results and the arguments of a call take."""
    return sum(storage_bytes(tensor) for tensor in call_tensors(node))


def prepare(node: fx.Node, fill: Fill) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The op that really runs, with real arguments of the shapes, strides, dtypes and devices of the example values.

    Args:
        node: a call for which ``refusal`` is empty.
        fill: makes the data of each tensor.
    """
    whole = _copies_storage(node)

    def real(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            size, offset = _behind(value) if whole else (0, 0)
            size = max(size // value.element_size(), offset + storage_bytes(value) // value.element_size())
            return fill(size, value.dtype, value.device).as_strided(sizes(value.shape), sizes(value.stride()), offset)
        return _number(value)

    target, args, kwargs = real_call(node)
    made = {source: _torch.pytree.tree_map(real, value_of(source)) for source in node.all_input_nodes}
    args, kwargs = _torch.map_aggregate((args, kwargs), lambda a: made[a] if isinstance(a, fx.Node) else a)
    return target, args, kwargs
