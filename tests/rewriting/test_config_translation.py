"""DeepSpeed's and Paddle's configurations: which passes come of them, and what is said of the rest."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphopt
from graphopt import GraphoptError, Pipeline
from graphopt.passes import (
    CheckpointBoundaries,
    ContiguousCheckpoints,
    Offload,
    PartitionCheckpoints,
    Recompute,
    RecomputeEvenly,
)
from graphopt.rewriting.config_translation import from_deepspeed, from_paddle
from tests.support.training import Net, assert_same_training, captured, mean_square

ALL = {
    "partition_activations": True,
    "cpu_checkpointing": True,
    "contiguous_memory_optimization": True,
    "number_checkpoints": 4,
    "synchronize_checkpoint_boundary": True,
    "profile": True,
}


def section(**fields: Any) -> dict[str, Any]:
    return {"train_batch_size": 8, "activation_checkpointing": fields}


@pytest.mark.parametrize(
    ("fields", "passes"),
    [
        ({}, [Recompute("auto")]),
        ({"partition_activations": True}, [Recompute("auto"), PartitionCheckpoints(min_bytes=0)]),
        ({"cpu_checkpointing": True}, [Recompute("auto"), Offload(min_bytes=0)]),
        ({"number_checkpoints": 4}, [RecomputeEvenly(4)]),
        ({"number_checkpoints": None, "profile": False}, [Recompute("auto")]),
        ({"profile": True}, [Recompute("auto"), CheckpointBoundaries(synchronize=False, profile=True)]),
        ({"synchronize_checkpoint_boundary": True}, [Recompute("auto"), CheckpointBoundaries()]),
    ],
)
def test_each_field_of_deepspeed(
    fields: dict[str, Any], passes: list[graphopt.Pass], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="graphopt"):
        assert from_deepspeed(section(**fields)) == passes == from_deepspeed(fields)
    assert not caplog.records
    Pipeline(passes)


def test_all_fields_of_deepspeed(caplog: pytest.LogCaptureFixture) -> None:
    """What is not honoured is named."""
    with caplog.at_level(logging.WARNING, logger="graphopt"):
        passes = from_deepspeed(section(**ALL), checkpoints="net.*", group="tensor")
    assert passes == [
        Recompute("net.*"),
        PartitionCheckpoints("tensor", 0),
        Offload(min_bytes=0),
        ContiguousCheckpoints(),
        CheckpointBoundaries(profile=True),
    ]
    said = [record.getMessage().split(":")[0] for record in caplog.records]
    assert said == ["number_checkpoints is not honoured"]
    names = [item.name for item in Pipeline(reversed(passes[:-1])).passes]
    assert names == ["recompute", "partition-checkpoints", "offload", "contiguous-checkpoints"]


def test_contiguous_memory_of_deepspeed(caplog: pytest.LogCaptureFixture) -> None:
    fields = {"partition_activations": True, "contiguous_memory_optimization": True, "number_checkpoints": 3}
    with caplog.at_level(logging.WARNING, logger="graphopt"):
        passes = from_deepspeed(section(**fields))
    assert passes == [RecomputeEvenly(3), PartitionCheckpoints(min_bytes=0), ContiguousCheckpoints()]
    assert not caplog.records


def test_deepspeed_from_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(section(cpu_checkpointing=True)))
    with caplog.at_level(logging.INFO, logger="graphopt"):
        assert from_deepspeed(path) == from_deepspeed(str(path)) == [Recompute("auto"), Offload(min_bytes=0)]
    (first, *_) = caplog.messages
    assert first == "of the DeepSpeed configuration only activation_checkpointing is read, not train_batch_size"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no file"),
        ("{", "is not JSON"),
        ("[]", "holds a list, and must hold an object"),
        ('{"activation_checkpointing": true}', "activation_checkpointing must hold an object, got True"),
    ],
)
def test_files_that_are_not_right(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(GraphoptError, match=message):
        from_deepspeed(path)


def test_problems_of_a_deepspeed_section_are_reported_at_once() -> None:
    fields = {
        "partition_activation": True,
        "contiguous_memory_optimization": True,
        "cpu_checkpointing": 1,
        "number_checkpoints": 0,
    }
    with pytest.raises(GraphoptError) as error:
        from_deepspeed(section(**fields))
    assert str(error.value).splitlines() == [
        "activation_checkpointing is not right:",
        "  there is no field 'partition_activation'; did you mean 'partition_activations'?",
        "  cpu_checkpointing is true or false, got 1",
        "  number_checkpoints is null or a number of at least 1, got 0",
        "  contiguous_memory_optimization needs partition_activations, as in DeepSpeed",
        "  contiguous_memory_optimization needs number_checkpoints, as in DeepSpeed",
    ]


def test_paddle(caplog: pytest.LogCaptureFixture) -> None:
    fields = {"checkpoints": ["net.0", "net.1"], "enable_offload": True, "checkpoint_shape": [8, 16]}
    with caplog.at_level(logging.WARNING, logger="graphopt"):
        passes = from_paddle({"recompute": True, "recompute_configs": fields})
    assert passes == [Recompute(("net.0", "net.1")), Offload(min_bytes=0)] == from_paddle(fields)
    assert caplog.messages[0].startswith("checkpoint_shape is not needed, and not read")
    assert from_paddle({"checkpoints": ["net.0"]}) == [Recompute("net.0")]


def test_paddle_without_recompute(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="graphopt"):
        assert from_paddle({"recompute": False, "recompute_configs": {"checkpoints": ["a"]}}) == []
    assert caplog.messages == ["recompute is false, so recompute_configs is not read, as in Paddle"]


def test_problems_of_a_paddle_section_are_reported_at_once() -> None:
    fields = {"checkpoints": "net.0", "offload": True, "enable_offload": "yes", "checkpoint_shape": [-1, 4]}
    with pytest.raises(GraphoptError) as error:
        from_paddle(fields)
    assert str(error.value).splitlines() == [
        "recompute_configs is not right:",
        "  there is no field 'offload'; did you mean 'enable_offload'?",
        "  checkpoints is a list of names of tensors, with at least one, got 'net.0'",
        "  enable_offload is true or false, got 'yes'",
        "  checkpoint_shape is a list of sizes of at least 1, got [-1, 4]",
    ]


# --- so many checkpoints, spread evenly ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def program() -> graphopt.Program:
    """Six equal modules, one after the other."""
    model = Net(*(nn.Sequential(nn.Linear(4, 9), nn.GELU(), nn.Linear(9, 4)) for _ in range(6)))
    return captured(model, torch.randn(3, 4))


@pytest.mark.parametrize("number", [1, 2, 3, 99])
def test_so_many_checkpoints(program: graphopt.Program, number: int) -> None:
    (record,) = Pipeline([RecomputeEvenly(number)]).run(program.copy())
    there = len(program.checkpoint_candidates()) - 1
    assert len(record.changed.tensors) == min(number, there)
    assert_even(program, record.changed.tensors)
    few = f"99 checkpoints were asked for, and {there} tensors separate the network in two"
    assert (few in record.changed.lines) == (number == 99)


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
