"""Gathers of parameters in the dtype in which they are read: casts of a parameter become casts of its shards.

Where everything that reads a sharded parameter casts it to one smaller dtype first, each rank casts its shard and that
is gathered: fewer bytes on the way, and the parameter is never there in its own dtype. The bits are the same, since a
cast looks at each element by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from graphopt.ir.node import InputSpec, value_of
from graphopt.ir.program import Program

__all__ = ["cast_like", "casts_as_inputs"]

aten = torch.ops.aten


@contextlib.contextmanager
def casts_as_inputs(program: Program, inputs: Mapping[fx.Node, str]) -> Iterator[dict[fx.Node, str]]:
    """While copies are planned, casts of parameters that are gathered are inputs of their own.

    Args:
        program: rewritten in place; when the context ends, nothing may read these inputs any more.
        inputs: the parameters that are gathered, and what they are called.

    Yields:
        what is to be gathered, and what it is called: a parameter, or the input that stands for its casts.
    """
    found: dict[fx.Node, str] = {}
    added: list[fx.Node] = []
    for node, name in inputs.items():
        casts = _casts(node)
        if not casts:
            found[node] = name
            continue
        value = value_of(casts[0])
        called = f"{node.name}_{str(value.dtype).removeprefix('torch.')}"
        stands = program.add_input(called, value, InputSpec("parameter", name))
        for cast in casts:
            cast.replace_all_uses_with(stands)
            program.graph.erase_node(cast)
        found[stands] = name
        added.append(stands)
    yield found
    places = {node: index for index, node in enumerate(program.placeholders)}
    for node in reversed(added):
        del program.inputs[places[node]]
        program.graph.erase_node(node)


def cast_like(program: Program, tensor: fx.Node, wanted: torch.Tensor, before: fx.Node, **common: Any) -> fx.Node:
    """A shard or a parameter in the dtype of another tensor; itself where it has that.

    Args:
        program: that gets a cast where one is needed.
        tensor: the shard or the parameter.
        wanted: has the dtype.
        before: where the cast is inserted.
        common: phase and origin of the cast.
    """
    if value_of(tensor).dtype == wanted.dtype:
        return tensor
    hint = f"{tensor.name}_cast"
    return program.insert(aten._to_copy.default, (tensor,), {"dtype": wanted.dtype}, before=before, hint=hint, **common)


def _casts(node: fx.Node) -> list[fx.Node]:
    """The casts that read a parameter, where nothing else does, and all are to one smaller dtype."""
    casts = [user for user in node.users if user.target is aten._to_copy.default and set(user.kwargs) == {"dtype"}]
    value = value_of(node)
    dtypes = {value_of(cast).dtype for cast in casts}
    returned = any(user.op == "output" for cast in casts for user in cast.users)
    if not casts or len(casts) < len(node.users) or len(dtypes) > 1 or returned:
        return []
    smaller = dtypes.pop().itemsize < value.dtype.itemsize
    same_layout = all(value_of(cast).stride() == value.stride() for cast in casts)
    return casts if smaller and same_layout else []
