"""Gathers of parameters in the dtype in which they are read: casts of a parameter become casts of its shards.

Where everything that reads a sharded parameter casts it to one smaller dtype first, each rank casts its shard and that
is gathered: fewer bytes on the way, and the parameter is never there in its own dtype. The bits are the same, since a
cast looks at each element by itself. A cast to 8 bits takes the scale of the whole parameter, which is the smallest of
its shards' scales: ranks agree on those of all parameters at once, at the beginning of a program.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from graphopt.ir.node import InputSpec, Phase, info, set_info, value_of
from graphopt.ir.ops.communication.groups import Group
from graphopt.ir.ops.storage.scaled_float8 import float8_scale, to_float8
from graphopt.ir.program import Program
from graphopt.rewriting.distributed.flat_exchange import read_parts, start_exchange

__all__ = ["cast_like", "casts_as_inputs", "scale_shards"]

aten = torch.ops.aten

_SCALE = "~scale"
"""What follows the name of a parameter in the name of its scale."""


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


def scale_shards(
    program: Program, parameters: Mapping[str, fx.Node], shards: Mapping[str, fx.Node], group: Group, origin: str
) -> int:
    """Find the scales of parameters that are read in 8 bits alone from shards; returns how many parameters are.

    Args:
        program: with casts to 8 bits, each by one scale for the whole parameter.
        parameters: by name.
        shards: their shards, by the same names.
        group: the ranks that have them.
        origin: the pass that asks.
    """
    scales = {name: found for name, node in parameters.items() if (found := _scales(node))}
    if not scales:
        return 0
    place = next(node for node in program.graph.nodes if node.op != "placeholder")
    common: dict[str, Any] = {"before": place, "phase": Phase.SYNC, "origin": f"{origin}: scales"}
    own = [
        program.insert(float8_scale, (shards[name], *found[0].args[1:]), hint="scale", **common)
        for name, found in scales.items()
    ]
    start = start_exchange(program, own, place, group, "min", common["origin"])
    agreed = read_parts(program, start, own, place, common["origin"])
    for (name, found), scale in zip(scales.items(), agreed, strict=True):
        set_info(scale, replace(info(scale), names=(f"{name}{_SCALE}",)))
        for node in found:
            node.replace_all_uses_with(scale)
            program.graph.erase_node(node)
    return len(scales)


def _scales(node: fx.Node) -> list[fx.Node]:
    """The scales of a parameter, where everything that reads it is one cast to 8 bits, each by one scale for all."""
    readers = [user for user in node.users if user.op != "output" and info(user).phase is not Phase.UPDATE]
    scales = [user for user in readers if user.target is float8_scale]
    casts = [user for user in readers if user.target is to_float8 and user.args[1] in scales]
    alike = len({str(scale.args[1:]) for scale in scales}) == 1 and not scales[0].args[1]
    return scales if alike and len(scales) + len(casts) == len(readers) else []


def cast_like(
    program: Program, tensor: fx.Node, wanted: torch.Tensor, before: fx.Node, parameter: str, **common: Any
) -> fx.Node:
    """A shard or a parameter in the dtype of another tensor; itself where it has that.

    Args:
        program: that gets a cast where one is needed.
        tensor: the shard or the parameter.
        wanted: has the dtype.
        before: where the cast is inserted.
        parameter: whose it is.
        common: phase and origin of the cast.
    """
    if value_of(tensor).dtype == wanted.dtype:
        return tensor
    hint = f"{tensor.name}_cast"
    if wanted.dtype.itemsize == 1:
        given = (tensor, program.names()[f"{parameter}{_SCALE}"], wanted.dtype)
        return program.insert(to_float8, given, before=before, hint=hint, **common)
    return program.insert(aten._to_copy.default, (tensor,), {"dtype": wanted.dtype}, before=before, hint=hint, **common)


def _casts(node: fx.Node) -> list[fx.Node]:
    """The casts that read a parameter, where nothing else does, and all are to one smaller dtype."""
    if node.users and all(user.target is to_float8 for user in node.users):
        casts = list(node.users)
        return casts if len({(user.args[1], value_of(user).dtype) for user in casts}) == 1 else []
    casts = [user for user in node.users if user.target is aten._to_copy.default and set(user.kwargs) == {"dtype"}]
    value = value_of(node)
    dtypes = {value_of(cast).dtype for cast in casts}
    returned = any(user.op == "output" for cast in casts for user in cast.users)
    if not casts or len(casts) < len(node.users) or len(dtypes) > 1 or returned:
        return []
    smaller = dtypes.pop().itemsize < value.dtype.itemsize
    same_layout = all(value_of(cast).stride() == value.stride() for cast in casts)
    return casts if smaller and same_layout else []
