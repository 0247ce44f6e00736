"""Casts: inserted in forward programs, merged and cancelled in joint programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from graphopt.ir.node import Phase, info, set_info, value_of
from graphopt.ir.ops import schema
from graphopt.ir.program import Program
from graphopt.rewriting.memory.recompute.rematerialize import rematerialize
from graphopt.rewriting.precision.autocast_rules import LOW_DTYPES

__all__ = [
    "ORIGIN",
    "cancel_casts",
    "cast_of",
    "insert_cast",
    "is_cast",
    "merge_casts",
    "parameter_casts",
    "repeat_casts",
]

ORIGIN = "mixed-precision"
"""How the provenance of what mixed precision inserts begins."""

_CAST = torch.ops.aten._to_copy.default


def is_cast(node: fx.Node) -> bool:
    """Whether a call changes the dtype of a tensor and nothing else."""
    return node.target is _CAST and set(node.kwargs) == {"dtype"}


def cast_of(node: fx.Node, dtype: torch.dtype) -> fx.Node | None:
    """The first cast of a value to a dtype that is there already."""
    return next((user for user in node.users if is_cast(user) and user.kwargs["dtype"] == dtype), None)


def insert_cast(
    program: Program, source: fx.Node, dtype: torch.dtype, *, before: fx.Node, like: fx.Node, why: str
) -> fx.Node:
    """Add a cast to a forward program.

    Args:
        program: of stage ``forward``, or the body of a region in one.
        source: what is cast.
        dtype: what to.
        before: the node that the cast is put in front of.
        like: the node whose module, source line and ``torch.utils.checkpoint`` region the cast belongs to.
        why: what for, for people.
    """
    origin = f"{ORIGIN}: {why}"
    kwargs = {"dtype": dtype}
    cast = program.insert(_CAST, (source,), kwargs, before=before, like=like, phase=Phase.FORWARD, origin=origin)
    set_info(cast, replace(info(cast), region=info(like).region if before is like else None))
    return cast


def parameter_casts(program: Program) -> dict[str, fx.Node]:
    """The casts of parameters to a low dtype in forward, by the parameter's name, in a program of any stage.

    Level O2 puts one for each parameter at the beginning; level O1 one in front of its first use.
    """
    found: dict[str, fx.Node] = {}
    for node, spec in program.inputs_of("parameter"):
        for user in node.users:
            if is_cast(user) and info(user).phase is Phase.FORWARD and user.kwargs["dtype"] in LOW_DTYPES.values():
                found.setdefault(spec.target, user)
    return found


def merge_casts(program: Program) -> int:
    """Let each tensor be cast once to each dtype in the forward of a joint program; returns how many casts go.

    Gradients still arrive through each cast of their own and are summed in the wide dtype, as differentiation has it.
    Casts of tensors that are written, and casts that are outputs themselves, stay.
    """
    written = {schema.storage_root(target) for node in program.graph.nodes for target in schema.mutated_inputs(node)}
    first: dict[tuple[Any, ...], fx.Node] = {}
    merged = 0
    for node in _casts(program):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        if info(node).phase is not Phase.FORWARD or schema.storage_root(source) in written or _returned(node):
            continue
        kept = first.setdefault((source, node.kwargs["dtype"]), node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            _keep_names(kept, node)
            program.graph.erase_node(node)
            merged += 1
    return merged


def cancel_casts(program: Program) -> int:
    """Drop casts up to a wider dtype and back down, which give the value they began with; returns how many.

    A cast down and back up is not the identity, and stays.
    """
    written = {schema.storage_root(target) for node in program.graph.nodes for target in schema.mutated_inputs(node)}
    cancelled = 0
    for node in _casts(program):
        wide = node.args[0]
        if not isinstance(wide, fx.Node) or not is_cast(wide) or _returned(node):
            continue
        source = wide.args[0]
        assert isinstance(source, fx.Node)
        dtype, between = value_of(source).dtype, value_of(wide).dtype
        same = value_of(node).dtype == dtype and dtype in LOW_DTYPES.values() and between == torch.float32
        if same and schema.storage_root(source) not in written and _as_before(node, source):
            node.replace_all_uses_with(source)
            program.graph.erase_node(node)
            cancelled += 1
    return cancelled


def repeat_casts(program: Program, *, parameters: bool) -> int:
    """Make casts of forward that backward reads again in backward; returns how many.

    What is cast up is kept in low precision instead, half of the bytes, and what is cast from a parameter is not kept
    at all. The same cast of the same value gives the same bits.

    Args:
        program: of stage ``joint``.
        parameters: whether to do so with the casts of parameters too.
    """
    owned = {node for node, _ in program.inputs_of("parameter")} if parameters else set()
    again = [node for node in _casts(program) if not _returned(node) and (node.args[0] in owned or _is_upcast(node))]
    views = [reader for node in again for reader in schema.readers(node) if schema.is_view(reader)]
    done = rematerialize(program, [*again, *views], origin=f"{ORIGIN}: the same cast again")
    return sum(1 for node in done.clones if is_cast(node))


def _is_upcast(node: fx.Node) -> bool:
    source = node.args[0]
    low = isinstance(source, fx.Node) and value_of(source).dtype in LOW_DTYPES.values()
    return low and bool(node.kwargs["dtype"] == torch.float32)


def _casts(program: Program) -> Iterator[fx.Node]:
    yield from [node for node in program.graph.nodes if is_cast(node)]


def _returned(node: fx.Node) -> bool:
    return any(user.op == "output" for reader in (node, *schema.readers(node)) for user in reader.users)


def _as_before(node: fx.Node, source: fx.Node) -> bool:
    """Whether a cast's result lies in memory as its source does, so that readers take the same paths."""
    one, other = value_of(node), value_of(source)
    return tuple(map(str, one.stride())) == tuple(map(str, other.stride()))


def _keep_names(kept: fx.Node, gone: fx.Node) -> None:
    more = tuple(name for name in info(gone).names if "::" not in name)
    set_info(kept, replace(info(kept), names=(*info(kept).names, *more)))
