"""Copies of inputs that reside elsewhere, taken out of a program so that plans are made as if they were not there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from graphopt.ir.node import Phase, info, value_of
from graphopt.ir.ops import swap
from graphopt.ir.ops.collectives import WAIT
from graphopt.ir.program import Program
from graphopt.rewriting.distributed.low_precision_gathers import cast_like
from graphopt.rewriting.distributed.sharded_parameters import sharded_inputs
from graphopt.rewriting.memory.state_swaps import RANKS

__all__ = ["Swaps", "lift_gathers", "lift_swaps", "nodes_of"]


@dataclass(frozen=True, slots=True)
class Swaps:
    """The copies of a program's inputs, taken out of it.

    Attributes:
        inputs: that reside elsewhere, by the names of their nodes, and what they are called.
        tier: where they reside.
        origin: the pass that had put the copies in.
    """

    inputs: Mapping[str, str]
    tier: str
    origin: str

    def nodes(self, program: Program) -> dict[fx.Node, str]:
        """The inputs in a program, and what they are called."""
        return {node: self.inputs[node.name] for node in program.placeholders if node.name in self.inputs}


def nodes_of(program: Program, lifted: Iterable[Swaps]) -> list[fx.Node]:
    """The inputs of a program whose copies were taken out."""
    return [node for swaps in lifted for node in swaps.nodes(program)]


def lift_swaps(program: Program) -> Swaps | None:
    """Take the copies of inputs out of a program, so that its calls read and write the inputs; None without any."""
    found: dict[str, str] = {}
    tier = origin = ""
    for node in list(program.graph.nodes):
        if node.target is swap.swap_in_wait:
            begun, at = node.args
            tier, (origin, _, named) = begun.args[1], info(node).origin.partition(": ")
            found[at.name] = named
            node.replace_all_uses_with(at)
            program.graph.erase_node(node)
            program.graph.erase_node(begun)
        elif node.target in (swap.swap_out, swap.swap_out_wait):
            program.graph.erase_node(node)
    return Swaps(found, tier, origin) if found else None


def lift_gathers(program: Program) -> Swaps | None:
    """Take the gathers of parameters out of a program, so that its calls read the parameters; None without any."""
    nodes = {name: node for node, (name, _) in sharded_inputs(program).items()}
    found: dict[str, str] = {}
    origin = ""
    for whole in list(program.graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided.default)):
        who, _, name = info(whole).origin.partition(": ")
        done = whole.args[0]
        if name in nodes and isinstance(done, fx.Node) and done.target is WAIT and info(whole).phase is Phase.SYNC:
            (begun,) = done.all_input_nodes
            (shard,) = begun.all_input_nodes
            found[nodes[name].name], origin = name, who
            reader = next(iter(whole.users))
            phase = info(reader).phase if reader.op != "output" else Phase.BACKWARD
            read = cast_like(program, nodes[name], value_of(whole), whole, phase=phase, origin=name)
            whole.replace_all_uses_with(read)
            for node in (whole, done, begun, *([shard] if shard.op == "call_function" else [])):
                program.graph.erase_node(node)
    return Swaps(found, RANKS, origin) if found else None
