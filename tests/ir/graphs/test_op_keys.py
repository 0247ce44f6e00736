"""Keys of an op are made once, and made again where the op is not what it was."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import fx, nn

import graphopt
from graphopt import Program, _torch
from graphopt.ir.graphs.graph_copies import copy_node, kept_key
from graphopt.ir.node import Phase, set_value, value_of
from tests.support.training import captured

ROWS = torch.randn(8, 4)
made: list[str] = []


def program() -> Program:
    made.clear()
    return captured(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)), ROWS)


def gelu(of: Program) -> fx.Node:
    return next(node for node in of.phase_nodes(Phase.FORWARD) if "gelu" in str(node.target))


def described(node: fx.Node) -> str:
    shapes = [[_torch.size_hint(size) for size in value_of(source).shape] for source in node.all_input_nodes]
    made.append(f"{node.target} {node.args[1:]} {node.kwargs} {shapes}")
    return made[-1]


def test_a_key_is_made_once_in_all_copies_of_a_program() -> None:
    one = program()
    key = kept_key(gelu(one), described)
    assert [kept_key(gelu(of), described) for of in (one, one.copy(), one.copy().copy())] == [key] * 3
    assert made == [key]


def test_a_call_with_another_argument_op_or_value_has_another_key() -> None:
    one = program()
    first = kept_key(gelu(one), described)
    copy = one.copy()
    gelu(copy).kwargs = {"approximate": "tanh"}
    gelu(one).target = torch.ops.aten.relu.default
    again = one.copy()
    (source,) = gelu_of(again).all_input_nodes
    set_value(source, value_of(source).new_empty(3, 8))
    keys = [kept_key(call, described) for call in (gelu(copy), gelu_of(one), gelu_of(again))]
    assert keys == made[1:]
    assert len({first, *keys}) == 4


def gelu_of(of: Program) -> fx.Node:
    return next(node for node in of.phase_nodes(Phase.FORWARD) if "relu" in str(node.target))


def test_where_sizes_vary_it_is_that_of_the_sizes_that_are_taken() -> None:
    made.clear()
    rows = torch.export.Dim("rows", min=2, max=64)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    one = graphopt.capture(model, (ROWS,), dynamic_shapes=({0: rows},))
    (symbol,) = one.symbols
    found = []
    for count in (5, 7):
        with _torch.sizes_taken_as({symbol: count}):
            found += [kept_key(gelu(one), described), kept_key(gelu(one.copy()), described)]
    assert [text[-8:] for text in found] == ["[[5, 8]]", "[[5, 8]]", "[[7, 8]]", "[[7, 8]]"]
    assert len(made) == 2


def test_a_copy_in_another_graph_does_not_keep_the_first_one_alive() -> None:
    one = program()
    node = gelu(one)
    kept_key(node, described)
    graph = fx.Graph()
    source = graph.placeholder("source")
    copy = copy_node(graph, node, lambda item: source if isinstance(item, fx.Node) else item)
    alive = weakref.ref(one.graph)
    del one, node
    gc.collect()
    assert alive() is None
    assert kept_key(copy, lambda call: call.name) == copy.name


class Parts(nn.Module):
    """Copies all of the storage behind a part, whose shape is the same at every size."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.select_scatter((x * self.weight)[:2], x[0], 0, 1).sum() * x


def test_bytes_are_those_of_a_fixed_program_at_each_size() -> None:
    rows = torch.export.Dim("rows", min=3, max=64)
    one = graphopt.capture(Parts(), (ROWS,), dynamic_shapes=({0: rows},))
    (symbol,) = one.symbols
    for count in (5, 60):
        fixed = graphopt.capture(Parts(), (torch.zeros(count, 4),))
        assert one.memory(sizes={symbol: count}).peak_bytes == fixed.memory().peak_bytes
