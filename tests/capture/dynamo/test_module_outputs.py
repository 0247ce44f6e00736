"""Outputs of modules in graphs that Dynamo has made: the names that hooks would give them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import graphopt
from graphopt import _torch
from graphopt.capture.dynamo.graph_part import module_outputs

pytestmark = pytest.mark.filterwarnings("ignore")


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).relu()) + x


class Outer(nn.Module):
    """Calls a block twice, one that returns two tensors, and one that does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.pair, self.nothing, self.head = Inner(), Pair(), nn.Identity(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block(x) * 2
        a, b = self.pair(self.block(x))
        return self.head(self.nothing(a) * b)


class Pair(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sin(), x.cos()


def test_names_are_those_of_modules_and_of_their_calls() -> None:
    found: dict[str, list[str]] = {}

    def look(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        del inputs
        _torch.with_paths(graph, lambda path: path)
        found.update({node.name: names for node, names in module_outputs(graph.graph).items()})
        return graph

    torch._dynamo.reset()
    torch.compile(Outer(), backend=look)(torch.ones(2, 4))
    assert sorted(name for names in found.values() for name in names) == [
        "block", "block.first", "block.first@1", "block.last", "block.last@1", "block@1", "head",
    ]  # fmt: skip


def test_a_program_has_the_names_that_optimize_gives() -> None:
    torch._dynamo.reset()
    model, x = Outer(), torch.ones(2, 4)
    compiled = torch.compile(model, backend="graphopt")
    optimized = graphopt.optimize(model)
    for call in (compiled, optimized):
        call(x).sum().backward()
    (graph,) = graphopt.compiled_graphs(compiled)
    assert graph.program is not None
    wanted = {name for name in optimized.program.names() if name.startswith(("block", "head")) and "::" not in name}
    assert wanted <= {*graph.program.names()}
    assert {"block@1", "block.first@1", "head"} <= wanted
