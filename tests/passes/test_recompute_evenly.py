"""So many checkpoints, spread evenly: which ones, and training with them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graphopt
from graphopt import GraphoptError, Pipeline
from graphopt.passes import Recompute, RecomputeEvenly
from tests.support.training import Net, assert_same_training, captured, mean_square


@pytest.fixture(scope="module")
def program() -> graphopt.Program:
    """Six equal modules, one after the other."""
    model = Net(*(nn.Sequential(nn.Linear(4, 9), nn.GELU(), nn.Linear(9, 4)) for _ in range(6)))
    return captured(model, torch.randn(3, 4))


@pytest.mark.sweep(cases=("1", "2"))
@pytest.mark.parametrize("number", [1, 2, 3])
def test_so_many_checkpoints(program: graphopt.Program, number: int) -> None:
    (record,) = Pipeline([RecomputeEvenly(number)]).run(program.copy())
    assert len(record.changed.tensors) == number
    assert_even(program, record.changed.tensors)


def test_with_all_checkpoints_that_there_are_nothing_is_computed_again(program: graphopt.Program) -> None:
    (record,) = Pipeline([RecomputeEvenly(99)]).run(program.copy())
    assert not record.changed
    assert record.changed.reason == "backward reads nothing between these checkpoints that is not kept anyway"


def assert_even(program: graphopt.Program, names: tuple[str, ...]) -> None:
    """The bytes between two checkpoints are about the same: no more than a candidate's apart."""
    candidates = program.checkpoint_candidates()[:-1]
    whole = [item.saves + item.bytes for item in candidates]
    sums, passed = [], 0
    for item, count in zip(candidates, whole, strict=True):
        passed += count
        if item.name in names:
            sums.append(passed)
            passed = 0
    assert passed == 0
    assert max(sums) - min(sums) <= 2 * max(whole)


@pytest.mark.sweep
def test_so_many_checkpoints_in_training() -> None:
    model = Net(*(nn.Sequential(nn.Linear(4, 9), nn.Dropout(0.2), nn.Linear(9, 4)) for _ in range(4)))
    assert_same_training(model, "sgd", mean_square, [[torch.randn(3, 4)]], [RecomputeEvenly(2)], steps=2)


def test_a_second_time_and_no_checkpoints() -> None:
    program = captured(Net(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3))
    Pipeline([RecomputeEvenly(1)]).run(program)
    assert "already" in Pipeline([RecomputeEvenly(1)]).run(program)[0].changed.reason
    with pytest.raises(GraphoptError, match="number is a number of checkpoints of at least 1, got 0"):
        RecomputeEvenly(0)
    with pytest.raises(GraphoptError, match="cannot be used together"):
        Pipeline([RecomputeEvenly(1), Recompute("auto")])
