"""Sharded updates that take whole matrices in between (Muon): those of DataParallel alone, work divided among ranks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import graphopt
from graphopt.ir.node import value_of
from graphopt.ir.ops.communication.collectives import ALL_TO_ALL
from graphopt.ir.ops.values import storage_bytes
from graphopt.passes import DataParallel
from graphopt.passes.shard_optimizer import ShardOptimizer
from tests.support.matrix_optimizers import CASES, muon
from tests.support.ranks import run_ranks

ALWAYS = ("Muon, a step skipped", "by the number of dimensions")
SCRIPT = """
from tests.support.matrix_optimizers import *
from tests.passes.test_whole_updates import ALWAYS
"""


def test_training_is_that_of_whole_updates_in_a_rank_s_share_of_state_and_products(tmp_path: Path) -> None:
    script = SCRIPT + "say(beside_whole(ALWAYS)); say(counted()); say(after_fully_shard(muon))"
    elements = 12 * 25 + 3 * 25 * 25 + 25 * 5
    found = run_ranks(script, 2, tmp_path / "store")
    assert sum(counted[0] for _, counted, _ in found) == elements
    for off, (_, products, predicted, measured), trained in found:
        assert off == {name: [0.0, 0.0] for name in ALWAYS}
        assert products == (1 + 2 + 1) * 5 * 3, "a tall matrix, two of three square ones, a wide one; five steps each"
        assert measured == predicted
        assert trained == [True, True, True], "after fully_shard, as one process"


@pytest.mark.sweep
def test_beside_other_passes_and_from_saved_shards(tmp_path: Path) -> None:
    script = SCRIPT + "say(beside_whole([name for name in CASES if name not in ALWAYS])); say(resumed())"
    script += "; say(after_fully_shard(Orthogonal))"
    for off, continued, trained in run_ranks(script, 2, tmp_path / "store"):
        assert off == {name: [0.0, 0.0] for name in CASES if name not in ALWAYS}
        assert continued == [True, True]
        assert trained == [True, True, True]


@pytest.mark.sweep
def test_every_optimizer_of_torch_is_sharded_or_says_why_not(tmp_path: Path) -> None:
    first, second = run_ranks(SCRIPT + "say(of_torch())", 2, tmp_path / "store")
    assert first == second
    (found,) = first
    works = {name for name, ways in found.items() if ways == ["equal", "equal"]}
    assert works == {"Adadelta", "Adagrad", "Adam", "AdamW", "Muon", "RMSprop", "SGD"}
    for name in found.keys() - works:
        assert all(way.startswith(f"{name} cannot be sharded, since its update") for way in found[name])


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[None]:
    """A process group of four ranks of which only the last one exists; its exchanges do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("four_ranks")
@settings(max_examples=8)
@given(st.lists(st.sampled_from([(3, 7), (7, 3), (5, 5), (1, 2)]), min_size=1, max_size=7))
def test_a_rank_works_on_a_quarter_of_the_matrices_and_sends_shards_of_all(shapes: list[tuple[int, int]]) -> None:
    matrices = nn.ParameterList([torch.randn(shape) for shape in shapes])

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(parameter * x).square().sum() for parameter in model.parameters()]).sum()

    step = graphopt.optimize_step(matrices, muon(matrices.parameters()), [DataParallel(), ShardOptimizer()], loss=loss)
    step.prepare(torch.tensor(2.0))
    rounds = {shape: math.ceil(count / 4) for shape, count in Counter(shapes).items()}
    found = list(step.program.graph.find_nodes(op="call_function", target=ALL_TO_ALL))
    assert len(found) == 2 * sum(rounds.values())
    sent = sum(2 * 2 * 4 * math.ceil(math.prod(shape) / 4) * count for shape, count in rounds.items())  # bfloat16
    assert sum(storage_bytes(value_of(node)) for node in found) == sent
    assert step.records[-1].changed.counts["parameters whole for the update"] == len(shapes)
    products = [node for node in step.program.phase_nodes(graphopt.Phase.UPDATE) if "mm" in str(node.target)]
    assert len(products) == 15 * sum(rounds.values())
