"""Parameters of which each rank keeps a shard: gathered around the calls that read them, updated where they are.

A shard is pass state that stands for its parameter: as many elements on every rank, the last ones filled up with zeros.
An all-gather of them begins in front of the calls of forward and backward that read a parameter, its memory is free
again behind them, and the update reads and writes the shard alone.

Source: Rajbhandari, Rasley, Ruwase and He, ZeRO, SC 2020 (arXiv 1910.02054), stage 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from graphopt.errors import GraphoptError
from graphopt.ir.node import Phase, info, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.communication.groups import Group
from graphopt.ir.ops.values import is_dense, storage_bytes
from graphopt.ir.program import Program
from graphopt.ir.state import PassState
from graphopt.rewriting.distributed.sharding.sharded_update import is_flat_view
from graphopt.rewriting.shards import piece_of, shard_of

__all__ = ["SHARDS", "cast_where_read", "keep_shards", "sharded_inputs", "sharing_inputs", "to_shard", "update_shards"]

aten = torch.ops.aten

SHARDS = "shard-parameters/"
"""How the names of shards begin; the parameter's name follows."""


def to_shard(program: Program, least: int) -> dict[str, fx.Node]:
    """The parameters of a program of which each rank may keep a shard, by name.

    Args:
        program: of stage joint or step.
        least: bytes below which a parameter stays whole.
    """
    sharing = sharing_inputs(program)
    return {
        spec.target: node
        for node, spec in program.inputs_of("parameter")
        if storage_bytes(value_of(node)) >= least
        and is_dense(value_of(node))
        and node not in sharing
        and not any(user.op == "output" for user in schema.readers(node) | set(node.users))
    }


def sharing_inputs(program: Program) -> set[fx.Node]:
    """The inputs of a program that share memory with another one."""
    found: dict[torch.UntypedStorage, list[fx.Node]] = {}
    for node in program.placeholders:
        value = value_of(node)
        if isinstance(value, torch.Tensor):
            found.setdefault(value.untyped_storage(), []).append(node)
    return {node for nodes in found.values() if len(nodes) > 1 for node in nodes}


def keep_shards(program: Program, parameters: Mapping[str, fx.Node], group: Group) -> dict[str, fx.Node]:
    """The shard of each parameter as an input, by the parameter's name.

    Args:
        program: of stage joint or step; gets inputs for shards that it does not have.
        parameters: by name.
        group: at least two ranks.
    """
    found = {}
    for name, node in parameters.items():
        value = value_of(node)
        piece = piece_of(value.numel(), group.size)
        state = PassState(
            (piece,), value.dtype, value.device, source=name, saved=False, local=True,
            shard=shard_of(value.numel(), group.rank, group.size), group=group.name,
        )  # fmt: skip
        found[name] = program.add_state(f"{SHARDS}{name}", state)
    return found


def sharded_inputs(program: Program) -> dict[fx.Node, tuple[str, fx.Node]]:
    """The parameters of which a program keeps a shard: their names, and the inputs that are the shards."""
    shards = {
        program.pass_state[spec.target].source: node
        for node, spec in program.inputs_of("pass_state")
        if program.pass_state[spec.target].shard is not None
    }
    return {
        node: (spec.target, shards[spec.target])
        for node, spec in program.inputs_of("parameter")
        if spec.target in shards
    }


def update_shards(program: Program, parameters: Mapping[str, fx.Node], shards: Mapping[str, fx.Node]) -> None:
    """Let the update read and write shards in place of slices of whole parameters.

    Args:
        program: of stage step, whose optimizer was traced for this rank's shards.
        parameters: by name.
        shards: their shards, by the same names.

    Raises:
        GraphoptError: where something else of the update reads a whole parameter.
    """
    for name, node in parameters.items():
        length = program.pass_state[f"{SHARDS}{name}"].shard[1]  # type: ignore[index]
        flats = [user for user in node.users if is_flat_view(user, node)]
        for taken in [user for flat in flats for user in list(flat.users)]:
            common: dict[str, Any] = {"before": taken, "phase": Phase.UPDATE, "origin": info(taken).origin}
            mine = program.insert(aten.slice.Tensor, (shards[name], 0, 0, length), like=taken, **common)
            taken.replace_all_uses_with(mine)
            program.graph.erase_node(taken)
        for flat in flats:
            program.graph.erase_node(flat)
        for reader in schema.readers(node):
            if info(reader).phase is Phase.UPDATE and not schema.is_view(reader):
                raise GraphoptError(
                    f"{reader.name} ({info(reader).origin}) reads the whole parameter {name!r} in the update, of which "
                    "each rank keeps a shard: leave that pass or shard-parameters out"
                )


def cast_where_read(program: Program, parameters: Iterable[str], origin: str) -> int:
    """Read casts of parameters in place of copies in low precision that are kept beside them; returns how many copies.

    Args:
        program: of stage step.
        parameters: of which each rank keeps a shard.
        origin: the pass that asks.
    """
    nodes = {spec.target: node for node, spec in program.inputs_of("parameter")}
    wanted = set(parameters)
    count = 0
    for copy, spec in list(program.inputs_of("pass_state")):
        state = program.pass_state[spec.target]
        if not state.follows or state.source not in wanted:
            continue
        for reader in list(copy.users):
            if reader.target is aten.copy_.default and reader.args[0] is copy:
                program.graph.erase_node(reader)
                continue
            common: dict[str, Any] = {"before": reader, "phase": _phase(reader), "origin": origin, "like": reader}
            cast = program.insert(
                aten._to_copy.default,
                (nodes[state.source],),
                {"dtype": state.dtype},
                hint=f"{copy.name}_cast",
                **common,
            )
            reader.replace_input_with(copy, cast)
        program.graph.erase_node(copy)
        program.inputs.remove(spec)
        del program.pass_state[spec.target]
        count += 1
    return count


def _phase(reader: fx.Node) -> Phase:
    return info(reader).phase if reader.op != "output" else Phase.BACKWARD
