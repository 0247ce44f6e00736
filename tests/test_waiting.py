"""Exchanges are waited for in the order in which they begin, whatever passes made them."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import graphopt
from graphopt import Pass, Phase, Program
from graphopt.exchange.waiting import wait_in_order
from graphopt.ops.collectives import ALL_REDUCE, WAIT
from graphopt.ops.schema import is_collective
from graphopt.passes import (
    CompressGradients,
    DataParallel,
    DeepGradientCompression,
    FuseUpdate,
    LocalSGD,
    MixedPrecision,
    PartitionCheckpoints,
    Recompute,
    ShardOptimizer,
)
from tests.support import mean_square

SMALL = DataParallel(bucket_mb=0.01, first_bucket_mb=0.001)

PASSES: dict[str, list[Pass]] = {
    "dense": [SMALL],
    "fused updates": [SMALL, FuseUpdate()],
    "sparse": [SMALL, DeepGradientCompression(min_elements=1000, rampup_step=1)],
    "scaled": [SMALL, MixedPrecision("float16"), DeepGradientCompression(min_elements=1000, rampup_step=1)],
    "feedback": [SMALL, DeepGradientCompression(min_elements=1000, rampup_step=1, correction="feedback")],
    "low rank": [SMALL, CompressGradients("powersgd", start_step=0)],
    "bfloat16": [SMALL, CompressGradients("bf16")],
    "sharded": [SMALL, ShardOptimizer()],
    "local": [SMALL, LocalSGD(k_steps=1)],
    "partitioned": [Recompute(("0", "2")), PartitionCheckpoints(), SMALL],
}


@pytest.fixture(scope="module", autouse=True)
def four_ranks() -> Iterator[None]:
    """A process group of four ranks of which only this one exists; its exchanges do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def stack() -> nn.Module:
    return nn.Sequential(
        nn.Linear(32, 64),
        nn.Tanh(),
        nn.BatchNorm1d(64),
        nn.Linear(64, 64),
        nn.Tanh(),
        nn.Linear(64, 64),
        nn.Linear(64, 4),
    )


def begun_and_waited_for(program: Program) -> tuple[list[fx.Node], list[fx.Node]]:
    """Exchanges in the order in which they begin, and in that in which they are waited for."""
    waits = [node for node in program.nodes if node.target is WAIT]
    waited_for = [node.args[0] for node in waits]
    begun = [node for node in program.nodes if is_collective(node) and node in waited_for]
    return begun, waited_for


@pytest.mark.parametrize("name", PASSES)
def test_exchanges_are_waited_for_in_the_order_in_which_they_begin(name: str) -> None:
    model = stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program = graphopt.capture(model, (torch.randn(8, 32),), loss=mean_square, optimizer=optimizer)
    step = graphopt.optimize_step(model, optimizer, PASSES[name], loss=mean_square).prepare(torch.randn(8, 32))
    for found in step.programs.values():
        begun, waited_for = begun_and_waited_for(found)
        assert len(begun) > 1
        assert begun == waited_for
    assert begun_and_waited_for(program) == ([], [])


@given(st.permutations(range(5)), st.lists(st.integers(0, 5), min_size=5, max_size=5))
def test_waits_move_forward_only_as_far_as_they_have_to(order: list[int], begun_before: list[int]) -> None:
    """Any order of waits, each wait behind some of the beginnings: in order then, none later, results the same."""
    model = nn.Linear(2, 2)
    program = graphopt.capture(model, (torch.randn(3, 2),), loss=mean_square)
    (loss,) = (node for node, spec in zip(program.output_values, program.outputs, strict=True) if spec.role == "loss")
    starts, waits = list[fx.Node](), dict[int, fx.Node]()
    common: dict[str, Any] = {"before": program.output_node, "phase": Phase.SYNC, "origin": "test"}

    def begin(count: int) -> None:
        while len(starts) < count:
            own = program.insert(torch.ops.aten.clone.default, (loss,), **common)
            starts.append(program.insert(ALL_REDUCE, (own, "sum", "0"), **common))

    for number, before in zip(order, begun_before, strict=True):
        begin(max(number + 1, before))
        waits[number] = program.insert(WAIT, (starts[number],), **common)
    begin(5)
    places = {node: place for place, node in enumerate(program.nodes)}
    late = {wait for wait in waits.values() if any(
        places[other] < places[wait] and places[other.args[0]] > places[wait.args[0]] for other in waits.values()
    )}  # fmt: skip
    assert wait_in_order(program) == len(late)
    begun, waited_for = begun_and_waited_for(program)
    assert begun == waited_for
    stayed = [node for node in places if node not in late]
    assert [node for node in program.nodes if node not in late] == stayed
    assert wait_in_order(program) == 0


def test_an_exchange_of_several_tensors_is_waited_for_in_turn() -> None:
    """What a model may have of its own: one call, a wait for each of its results."""
    program = graphopt.capture(nn.Linear(2, 2), (torch.randn(3, 2),), loss=mean_square)
    (loss,) = (node for node, spec in zip(program.output_values, program.outputs, strict=True) if spec.role == "loss")
    common: dict[str, Any] = {"before": program.output_node, "phase": Phase.SYNC, "origin": "test"}
    own = [program.insert(torch.ops.aten.clone.default, (loss,), **common) for _ in range(3)]
    several = torch.ops._c10d_functional.all_reduce_coalesced.default
    begun = program.insert(several, (own[:2], "sum", "0"), **common)
    parts = [program.insert(operator.getitem, (begun, place), **common) for place in range(2)]
    last = program.insert(WAIT, (program.insert(ALL_REDUCE, (own[2], "sum", "0"), **common),), **common)
    first = [program.insert(WAIT, (part,), **common) for part in parts]
    assert wait_in_order(program) == 2
    assert [node for node in program.nodes if node.target is WAIT] == [*first, last]
