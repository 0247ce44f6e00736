"""Gathers of several ranks: what they give, that many of them can be under way, and what compilers get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

import graphopt
from graphopt import Phase
from graphopt.ir.node import set_value, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.communication.collectives import ALL_GATHER, ALL_REDUCE, WAIT
from graphopt.runtime.compile.functional import gather_one_at_a_time
from tests.support.ranks import run_ranks
from tests.support.training import mean_square

SCRIPT = """
from graphopt.ir.ops.communication.collectives import ALL_GATHER, WAIT

group, wrong = dist.group.WORLD.group_name, 0
for step in range(150):
    started = [ALL_GATHER(torch.full((16,), 100.0 * rank + number + step), world, group) for number in range(32)]
    found = torch.stack([WAIT(gathered) for gathered in started])
    numbers, ranks = torch.arange(32.0).view(32, 1), torch.arange(world).repeat_interleave(16)
    wrong += not torch.equal(found, numbers + step + 100.0 * ranks)
rows = torch.arange(6.0).view(2, 3).t() + 10 * rank
say([wrong, WAIT(ALL_GATHER(rows, world, group)).tolist()])
"""


@pytest.mark.sweep
def test_several_gathers_may_be_under_way(tmp_path: Path) -> None:
    """Torch's own op corrupts the heap there: in two runs of three one of the ranks aborts within 800 steps."""
    rows = [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    for ((wrong, gathered),) in run_ranks(SCRIPT, 2, tmp_path / "store"):
        assert wrong == 0
        assert gathered == rows + [[number + 10 for number in row] for row in rows]


def test_an_example_run_knows_the_shape() -> None:
    with torch._subclasses.FakeTensorMode():
        found = ALL_GATHER(torch.empty(3, 5, dtype=torch.bfloat16), 4, "0")
    assert (tuple(found.shape), found.dtype, found.is_contiguous()) == ((12, 5), torch.bfloat16, True)


def gathering(*, device: str = "cpu") -> tuple[fx.Graph, list[fx.Node]]:
    """A graph that starts three gathers and a sum, and waits for them at its end: the starts."""
    program = graphopt.capture(nn.Linear(2, 2), (torch.randn(3, 2),), loss=mean_square)
    (loss,) = (node for node, spec in zip(program.output_values, program.outputs, strict=True) if spec.role == "loss")
    common: dict[str, Any] = {"before": program.output_node, "phase": Phase.SYNC, "origin": "test"}
    flat = program.insert(torch.ops.aten.view.default, (loss, [1]), **common)
    starts = [program.insert(ALL_GATHER, (flat, 2, "0"), **common) for _ in range(2)]
    own = program.insert(torch.ops.aten.clone.default, (loss,), **common)
    starts.append(program.insert(ALL_REDUCE, (own, "sum", "0"), **common))
    starts.append(program.insert(ALL_GATHER, (flat, 2, "0"), **common))
    for node in starts:
        set_value(node, torch.empty_like(value_of(node), device=device))
        program.insert(WAIT, (node,), **common)
    return program.graph, starts


def test_compilers_get_one_gather_at_a_time() -> None:
    """Each is waited for before the next begins; sums stay under way, and what was in order stays."""
    graph, (first, second, reduced, third) = gathering()
    assert gather_one_at_a_time(graph) == 2
    order = [node for node in graph.nodes if schema.is_collective(node)]
    one, two, three, summed = (next(iter(node.users)) for node in (first, second, third, reduced))
    assert order == [first, one, second, reduced, two, third, summed, three]
    graph.lint()
    assert gather_one_at_a_time(graph) == 0


def test_gathers_on_devices_stay_under_way() -> None:
    graph, _ = gathering(device="meta")
    before = list(graph.nodes)
    assert gather_one_at_a_time(graph) == 0
    assert list(graph.nodes) == before
