"""The program as a graph in the mathematician's sense: dependencies, and the tensors that cut it in two."""

from __future__ import annotations

import torch
from torch import fx

from graphopt.analysis.liveness import storages_of
from graphopt.ir.memory.timeline import Storage
from graphopt.ir.node import Candidate, Phase, info, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.values import storage_bytes
from graphopt.ir.program import Program

__all__ = ["checkpoint_candidates", "trained_forward"]


def trained_forward(program: Program) -> set[fx.Node]:
    """The forward calls on the data's way: they depend on an input and on something that gets a gradient.

    Masks and positions do not (no gradient), nor do transposed or cast weights (no data).
    """
    data = {node for node, _ in program.inputs_of("input")}
    trained = {node for node, _ in program.inputs_of("parameter")}
    trained |= {
        n for n, s in program.inputs_of("input") if s.target in {o.target for _, o in program.outputs_of("gradient")}
    }
    for node in program.phase_nodes(Phase.FORWARD):
        for found in (data, trained):
            if found.intersection(node.all_input_nodes):
                found.add(node)
    return {node for node in data & trained if node.op != "placeholder"}


def checkpoint_candidates(program: Program) -> list[Candidate]:
    """The dominators of forward's result: tensors that every path from the inputs passes, in program order."""
    import networkx as nx

    trained = trained_forward(program)
    graph: nx.DiGraph[object] = nx.DiGraph()
    for node in program.phase_nodes(Phase.FORWARD):
        if node not in trained:
            continue
        sources = [source for source in node.all_input_nodes if source in trained]
        graph.add_edges_from((source, node) for source in sources)
        if not sources:
            graph.add_edge("source", node)
        if any(user.op == "output" for user in node.users):
            graph.add_edge(node, "sink")
    if "sink" not in graph:
        return []
    above = nx.immediate_dominators(graph, "source")
    chain, current = [], above.get("sink")
    while isinstance(current, fx.Node):
        chain.append(current)
        current = above[current]
    return _describe(program, [node for node in reversed(chain) if isinstance(value_of(node), torch.Tensor)])


def _unawaited(node: fx.Node) -> bool:
    """Whether a collective has only started when a node has run: its data is there behind the wait."""
    return schema.is_collective(node) and not schema.aliased_inputs(node) and not schema.is_gather(node)


def _outliving_forward(program: Program, position: dict[fx.Node, int]) -> list[Storage]:
    """The storages that forward makes and that are alive behind it."""
    forward = list(program.phase_nodes(Phase.FORWARD))
    end = max((position[node] for node in forward), default=0)
    _, refers = storages_of(program, forward_in_place=False)
    made = {id(storage): storage for node in forward for storage in refers[node]}
    return [storage for storage in made.values() if not storage.is_input and storage.last > end]


def _describe(program: Program, chain: list[fx.Node]) -> list[Candidate]:
    """One candidate per storage, with the bytes that live from forward into backward between it and the last one."""
    calls = [n for n in program.graph.nodes if n.op not in ("placeholder", "output")]
    position = {node: index for index, node in enumerate(calls)}
    kept = _outliving_forward(program, position)
    found: list[Candidate] = []
    start, seen = -1, set[fx.Node]()
    for node in chain:
        root = schema.storage_root(node)
        if root in seen or root.op == "placeholder" or _unawaited(root):
            continue
        seen.add(root)
        inside = sum(storage.bytes for storage in kept if start < storage.first < position[root])
        size = storage_bytes(value_of(root)) if isinstance(value_of(root), torch.Tensor) else 0
        names = info(node).names
        found.append(Candidate(names[0] if names else node.name, node.name, size, inside, info(node).source))
        start = position[root]
    return found
