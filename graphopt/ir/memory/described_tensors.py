"""Every named tensor of a program with what is known of it: what ``Program.tensors`` gives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from graphopt.ir.node import InputSpec, Phase, TensorInfo, info, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.values import storage_bytes

__all__ = ["described_tensors"]


def described_tensors(graph: fx.Graph, inputs: Sequence[InputSpec]) -> list[TensorInfo]:
    """The tensors in program order; one with several names comes once for each.

    Args:
        graph: of a program.
        inputs: what each of its placeholders is.
    """
    placeholders = graph.find_nodes(op="placeholder")
    roles = {node.name: spec.role for node, spec in zip(placeholders, inputs, strict=True)}
    found: list[TensorInfo] = []
    for node in graph.nodes:
        value = value_of(node)
        if node.op == "output" or not isinstance(value, torch.Tensor):
            continue
        known = info(node)
        size = 0 if schema.aliased_inputs(schema.maker(node)) else storage_bytes(value)
        saved = known.phase is Phase.FORWARD and any(
            user.op != "output" and info(user).phase is not Phase.FORWARD for user in node.users
        )
        role = roles.get(node.name, "activation" if known.phase is Phase.FORWARD else known.phase.value)
        place = (known.phase, known.module, known.source, role, saved)
        found += [
            TensorInfo(name, node.name, tuple(value.shape), value.dtype, size, *place)
            for name in known.names or (node.name,)
        ]
    return found
