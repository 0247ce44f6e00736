"""DeepSpeed's configurations: which passes come of them, and what is said of the rest."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

import graphopt
from graphopt import GraphoptError, Pipeline
from graphopt.passes import (
    CheckpointBoundaries,
    ClipGradients,
    CompressGradients,
    ContiguousCheckpoints,
    DataParallel,
    MixedPrecision,
    Offload,
    OffloadState,
    PartitionCheckpoints,
    Recompute,
    RecomputeEvenly,
    ShardOptimizer,
    ShardParameters,
)
from graphopt.rewriting.config_translation import from_deepspeed

HINT = (
    "  $.activation_checkpointing.partition_activation: there is no such field; did you mean 'partition_activations'?"
)
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
def test_each_field_of_activation_checkpointing(
    fields: dict[str, Any], passes: list[graphopt.Pass], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="graphopt"):
        assert from_deepspeed(section(**fields)) == passes == from_deepspeed(fields)
    assert not caplog.records
    Pipeline(passes)


def test_all_fields_of_activation_checkpointing(caplog: pytest.LogCaptureFixture) -> None:
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
    assert said == ["activation_checkpointing.number_checkpoints is not honoured"]
    names = [item.name for item in Pipeline(reversed(passes[:-1])).passes]
    assert names == ["recompute", "partition-checkpoints", "offload", "contiguous-checkpoints"]


def test_contiguous_memory(caplog: pytest.LogCaptureFixture) -> None:
    fields = {"partition_activations": True, "contiguous_memory_optimization": True, "number_checkpoints": 3}
    with caplog.at_level(logging.WARNING, logger="graphopt"):
        passes = from_deepspeed(section(**fields))
    assert passes == [RecomputeEvenly(3), PartitionCheckpoints(min_bytes=0), ContiguousCheckpoints()]
    assert not caplog.records


FP16 = MixedPrecision("float16", level="O2", init_scale=65536.0, growth_interval=1000, hysteresis=2, floor=1.0)
SLOW = {"consecutive_hysteresis": True}
"""Counts bad steps as the pass does."""


@pytest.mark.parametrize(
    ("config", "passes"),
    [
        ({"fp16": {"enabled": True, **SLOW}}, [FP16]),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, [
            MixedPrecision("float16", level="O2", init_scale=128.0, dynamic=False)
        ]),
        ({"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 5, "hysteresis": 1,
                   "min_loss_scale": 0.0}}, [
            MixedPrecision("float16", level="O2", init_scale=256.0, growth_interval=5, hysteresis=1)
        ]),
        ({"bf16": {"enabled": True}}, [MixedPrecision("bfloat16", level="O2")]),
        ({"bfloat16": {"enabled": True, "check_grad_overflow": True}}, [
            MixedPrecision("bfloat16", level="O2", scale_loss=True, init_scale=1.0, dynamic=False)
        ]),
        ({"amp": {"enabled": True, "opt_level": "O2", "loss_scale": 64}}, [
            MixedPrecision("float16", level="O2", init_scale=64.0, dynamic=False, ceiling=2.0**24)
        ]),
        ({"amp": {"enabled": True, "opt_level": "O0"}}, []),
        ({"torch_autocast": {"enabled": True, "dtype": "torch.float16"}}, [MixedPrecision("float16")]),
        ({"gradient_clipping": 0.5}, [ClipGradients(max_norm=0.5)]),
        ({"communication_data_type": "bf16"}, [DataParallel(), CompressGradients("bf16")]),
        ({"zero_optimization": {"stage": 0}}, [DataParallel()]),
        ({"zero_optimization": {"stage": 1, "reduce_bucket_size": 1e6}}, [
            DataParallel(bucket_mb=4e6 / 2**20), ShardOptimizer()
        ]),
        ({"zero_optimization": True}, [DataParallel(), ShardOptimizer()]),
        ({"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "nvme"}}}, [
            DataParallel(), OffloadState(tier="disk")
        ]),
        ({"zero_optimization": {"stage": 3}}, [DataParallel(), ShardParameters()]),
        ({"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1000}}, [
            DataParallel(), ShardParameters(min_bytes=4000)
        ]),
        ({"zero_optimization": {"stage": 1, "cpu_offload": True}}, [
            DataParallel(), ShardOptimizer(), OffloadState(tier="host")
        ]),
    ],
    ids=str,
)  # fmt: skip
def test_sections_become_passes(
    config: dict[str, Any], passes: list[graphopt.Pass], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="graphopt"):
        assert from_deepspeed(config) == passes
    assert not caplog.records, caplog.text


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"zero_optimization": {"stage": 2}}, "zero_optimization.stage is not honoured: gradients are scattered"),
        ({"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 10}},
         "zero_optimization.stage3_max_live_parameters is not honoured: shard-parameters gathers parameters"),
        ({"zero_optimization": {"stage": 1, "offload_param": {"device": "cpu"}}},
         "zero_optimization.offload_param.device is not honoured: offload-state moves parameters of models on a CPU"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/disk"}}},
         "offload_optimizer.nvme_path is not honoured: the environment variable GRAPHOPT_DISK names the folder"),
        ({"zero_optimization": {"stage": 1}, "communication_data_type": "fp16"},
         "communication_data_type is not honoured: compress-gradients does not go together with shard-optimizer"),
        ({"fp16": {"enabled": True}}, "fp16.consecutive_hysteresis is not honoured: bad steps count in a row"),
        ({"gradient_clipping": "auto"}, "gradient_clipping is not honoured: 'auto' is for the program that"),
        ({"fp16": {"enabled": False, "loss_scale": 8}}, "fp16.loss_scale is not honoured: fp16 is not enabled"),
        ({"optimizer": {"type": "Adam", "params": {"lr": 0.1, "betas": [0.8, 0.9], "eps": "auto", "torch_adam": True}}},
         "torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.8, 0.9)), with eps for 'auto'"),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, "torch.optim.Adam(model.parameters())"),
        ({"optimizer": {"type": "OneBitAdam", "params": {"lr": 1}}}, "torch.optim has no 'OneBitAdam'"),
        ({"scheduler": {"type": "WarmupLR", "params": {}}}, "scheduler is not honoured by passes: make 'WarmupLR'"),
        ({"sparse_attention": {"mode": "fixed"}}, "sparse_attention is not honoured: the model is taken as it is"),
        ({"steps_per_print": 10}, "steps_per_print is not honoured"),
    ],
)  # fmt: skip
def test_what_is_not_honoured_is_named(config: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="graphopt"):
        found = from_deepspeed(config)
    assert said in caplog.text
    assert any(said in note for note in found.notes)


@pytest.mark.parametrize(
    ("sizes", "ranks", "accumulate"),
    [
        ((None, 4, None), None, 1),
        ((None, None, 4), None, 4),
        ((32, 4, None), 2, 4),
        ((32, 4, None), None, 8),
        ((32, None, 4), 2, 4),
        ((32, 4, 4), 2, 4),
        ((32, 4, 4), None, 4),
        ((32, None, None), 2, 1),
    ],
)
def test_batch_sizes(sizes: tuple[int | None, ...], ranks: int | None, accumulate: int) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    found = from_deepspeed({name: size for name, size in zip(names, sizes, strict=True) if size}, ranks=ranks)
    assert found.accumulate == accumulate
    assert any(f"step.accumulate({accumulate})" in note for note in found.notes) == (accumulate > 1)
    assert [item.name for item in found] == (["data-parallel"] if ranks else [])


@pytest.mark.parametrize(
    ("sizes", "ranks"),
    [((32, 5, None), None), ((32, 4, 4), 4), ((32, 4, 2), 2), ((30, None, 4), 2), ((7, None, None), 2)],
)
def test_batch_sizes_that_do_not_fit(sizes: tuple[int | None, ...], ranks: int | None) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    with pytest.raises(GraphoptError, match=r"\$\.train_batch_size: expected"):
        from_deepspeed({name: size for name, size in zip(names, sizes, strict=True) if size}, ranks=ranks)


def test_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(section(cpu_checkpointing=True)))
    found = from_deepspeed(path)
    assert found == from_deepspeed(str(path)) == [Recompute("auto"), Offload(min_bytes=0)]
    assert [note.split(",")[0] for note in found.notes] == ["train_batch_size is for your data loader"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no file"),
        ("{", "is not JSON"),
        ("[]", "holds a list, and must hold an object"),
        ('{"fp16": {}, "fp16": {}}', "'fp16' stands twice"),
        ("[" * 100_000, "nested too deeply"),
        ('{"activation_checkpointing": true}', r"\$\.activation_checkpointing: expected an object, found True"),
    ],
    ids=str,
)
def test_files_that_are_not_right(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(GraphoptError, match=message):
        from_deepspeed(path)


def test_problems_are_reported_at_once() -> None:
    fields = {
        "partition_activation": True,
        "contiguous_memory_optimization": True,
        "cpu_checkpointing": 1,
        "number_checkpoints": 0,
    }
    both = {"fp16": {"enabled": True}, "bf16": {"enabled": True}, "zero_optimization": {"stage": 4}}
    with pytest.raises(GraphoptError) as error:
        from_deepspeed({**section(**fields), **both, "optimizer": {"params": {}}})
    assert str(error.value).splitlines() == [
        "DeepSpeed's configuration is not right:",
        HINT,
        "  $.activation_checkpointing.cpu_checkpointing: expected true or false, found 1",
        "  $.activation_checkpointing.number_checkpoints: expected a whole number of at least 1, found 0",
        "  $.activation_checkpointing.contiguous_memory_optimization: needs partition_activations, as in DeepSpeed",
        "  $.activation_checkpointing.contiguous_memory_optimization: needs number_checkpoints, as in DeepSpeed",
        "  $.fp16 and $.bf16 are both enabled: choose one of them",
        "  $.zero_optimization.stage: expected a stage from 0 to 3, found 4",
        "  $.optimizer: expected a type: the name of an optimizer",
    ]


@pytest.mark.parametrize("ranks", [0, -1, True, 2.0, "2"])
def test_what_is_no_number_of_ranks(ranks: Any) -> None:
    with pytest.raises(GraphoptError, match="ranks is a number of ranks of at least 1"):
        from_deepspeed({}, ranks=ranks)
