"""Copies of graphs are what torch's own copies are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

import graphopt
from graphopt.ir.graphs.graph_copies import copy_graph
from tests.support.training import mean_square


def program() -> graphopt.Program:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return graphopt.capture(model, (torch.randn(3, 4),), loss=mean_square, optimizer=optimizer)


def torch_copy(graph: fx.Graph) -> fx.Graph:
    copy, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        copies[node] = copy.node_copy(node, lambda n: copies[n])
    return copy


def described(graph: fx.Graph) -> list[tuple[Any, ...]]:
    return [
        (
            node.op,
            node.name,
            node.target,
            str(node.args),
            str(node.kwargs),
            node.type,
            [user.name for user in node.users],
        )
        for node in graph.nodes
    ]


def test_a_copy_has_the_same_nodes_under_the_same_names_and_numbers_new_ones_alike() -> None:
    graph = program().graph
    copy, theirs = copy_graph(graph), torch_copy(graph)
    assert described(copy) == described(theirs) == described(graph)
    names = [
        [each.create_node("call_function", node.target, ()).name for node in graph.nodes if node.op == "call_function"]
        for each in (copy, theirs)
    ]
    assert names[0] == names[1]


@pytest.mark.sweep
def test_nodes_are_found_by_op_and_linked_in_order() -> None:
    graph = program().graph
    copy = copy_graph(graph)
    copy.lint()
    assert len(copy.nodes) == len(graph.nodes)
    for op in ("placeholder", "output"):
        assert [n.name for n in copy.find_nodes(op=op)] == [n.name for n in graph.find_nodes(op=op)]


def test_a_copy_is_changed_by_itself() -> None:
    original = program()
    before = described(original.graph)
    copy = copy_graph(original.graph)
    for node, other in zip(original.graph.nodes, copy.nodes, strict=True):
        assert node is not other
        assert node.meta == other.meta
        other.meta["mark"] = 1
        assert "mark" not in node.meta
    for node in reversed(copy.nodes):
        copy.erase_node(node)
    assert described(original.graph) == before
