"""Paddle's strategies: which passes come of them, and what is said of the rest."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

import graphopt
from graphopt import GraphoptError, Pipeline
from graphopt.passes import (
    AdaptiveLocalSGD,
    CompressGradients,
    DataParallel,
    DeepGradientCompression,
    LocalSGD,
    MixedPrecision,
    Offload,
    Recompute,
    ShardOptimizer,
)
from graphopt.rewriting.config_translation import from_paddle

SCALING: dict[str, Any] = {
    "init_loss_scaling": 32768.0,
    "incr_every_n_steps": 1000,
    "decr_every_n_nan_or_inf": 2,
    "incr_ratio": 2.0,
    "decr_ratio": 0.8,
    "use_dynamic_loss_scaling": True,
}
"""Paddle's own defaults, which are others than torch's."""


def test_recompute(caplog: pytest.LogCaptureFixture) -> None:
    fields = {"checkpoints": ["net.0", "net.1"], "enable_offload": True, "checkpoint_shape": [8, 16]}
    with caplog.at_level(logging.WARNING, logger="graphopt"):
        passes = from_paddle({"recompute": True, "recompute_configs": fields})
    assert passes == [Recompute(("net.0", "net.1")), Offload(min_bytes=0)] == from_paddle(fields)
    assert caplog.messages[0].startswith("recompute_configs.checkpoint_shape is not honoured: it is not needed")
    assert from_paddle({"checkpoints": ["net.0"]}) == [Recompute("net.0")]
    assert from_paddle({"recompute_configs": {"checkpoints": ("net.0",)}}) == [Recompute("net.0")]


@pytest.mark.parametrize(
    ("strategy", "passes"),
    [
        ({"amp": True}, [MixedPrecision("float16", **SCALING)]),
        ({"amp": True, "amp_configs": {"use_pure_fp16": True, "use_fp16_guard": False, "incr_ratio": 3}},
         [MixedPrecision("float16", level="O2", **{**SCALING, "incr_ratio": 3.0})]),
        ({"amp": True, "amp_configs": {"use_bf16": True}}, [MixedPrecision("bfloat16")]),
        ({"amp": True, "amp_configs": {"use_pure_bf16": True, "use_fp16_guard": False}},
         [MixedPrecision("bfloat16", level="O2")]),
        ({"amp": True, "amp_configs": {"custom_white_list": ["softmax", "matmul_v2"], "custom_black_list": ["gelu"],
                                       "custom_black_varnames": ["blocks.0"]}},
         [MixedPrecision("float16", allow=("softmax", "matmul"), deny=("gelu", "blocks.0"), **SCALING)]),
        ({"dgc": True}, [DataParallel(), DeepGradientCompression(sparsity=(0.999,), rampup_step=1)]),
        ({"dgc": True, "dgc_configs": {"rampup_begin_step": 5, "rampup_step": 10, "sparsity": [0.75, 0.9]}},
         [DataParallel(), DeepGradientCompression(sparsity=(0.75, 0.9), rampup_begin_step=5, rampup_step=10)]),
        ({"localsgd": True, "localsgd_configs": {"k_steps": 4, "begin_step": 30}},
         [DataParallel(), LocalSGD(k_steps=4, begin_step=30)]),
        ({"adaptive_localsgd": True}, [DataParallel(), AdaptiveLocalSGD(init_k_steps=1, begin_step=1)]),
        ({"sharding": True, "sharding_configs": {"stage": 1}}, [DataParallel(), ShardOptimizer()]),
        ({"fp16_allreduce": True}, [DataParallel(), CompressGradients("fp16")]),
        ({"fuse_all_reduce_ops": True}, [DataParallel()]),
        ({"fuse_all_reduce_ops": True, "fuse_grad_size_in_MB": 16}, [DataParallel(bucket_mb=16.0)]),
        ({"fuse_all_reduce_ops": False}, [DataParallel(bucket_mb=0.0)]),
        ({"amp": False, "recompute": False, "gradient_merge": False}, []),
    ],
    ids=str,
)  # fmt: skip
def test_switches_become_passes(
    strategy: dict[str, Any], passes: list[graphopt.Pass], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="graphopt"):
        assert from_paddle(strategy) == passes
    assert not caplog.records, caplog.text
    Pipeline(passes)


def test_several_ranks_exchange_gradients() -> None:
    assert from_paddle({"amp": True}, ranks=1) == [MixedPrecision("float16", **SCALING)]
    assert from_paddle({"amp": True}, ranks=2) == [MixedPrecision("float16", **SCALING), DataParallel()]


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        ({"recompute": False, "recompute_configs": {"checkpoints": ["a"]}}, "recompute is not true"),
        ({"amp_configs": {"init_loss_scaling": 8.0}}, "amp_configs is not honoured: amp is not true"),
        ({"amp": True, "amp_configs": {"use_pure_fp16": True}}, "amp_configs.use_fp16_guard is not honoured"),
        ({"amp": True, "amp_configs": {"use_bf16": True, "incr_ratio": 2.0}}, "the loss is not scaled in bfloat16"),
        ({"gradient_merge": True, "gradient_merge_configs": {"k_steps": 4}}, "call step.accumulate(4)"),
        ({"gradient_merge": True, "gradient_merge_configs": {"k_steps": 4, "avg": False}}, "for the sum"),
        ({"sharding": True, "sharding_configs": {"stage": 2}}, "sharding_configs.stage is not honoured"),
        ({"sharding": True, "sharding_configs": {"optimize_offload": True}}, "optimizer state stays on the device"),
        ({"dgc": True, "fp16_allreduce": True}, "fp16_allreduce is not honoured: compress-gradients does not go"),
        ({"lamb": True, "lamb_configs": {"lamb_weight_decay": 0.1}}, "lamb is not honoured: it is an optimizer"),
        ({"mode": "PS"}, "mode is not honoured: there are no parameter servers here"),
        ({"hybrid_configs": {"mp_degree": 2}}, "hybrid_configs.mp_degree is not honoured"),
        ({"gradient_scale_configs": {"scale_strategy": "sum"}}, "data-parallel takes the mean"),
        ({"build_strategy": {"fuse_bn_act_ops": True}}, "build_strategy is not honoured"),
    ],
    ids=str,
)
def test_what_is_not_honoured_is_named(strategy: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="graphopt"):
        found = from_paddle(strategy)
    assert said in caplog.text
    assert any(said in note for note in found.notes)


def test_batches_are_accumulated() -> None:
    found = from_paddle({"gradient_merge": True, "gradient_merge_configs": {"k_steps": 4}})
    assert (found, found.accumulate) == ([], 4)
    sharded = {"sharding": True, "sharding_configs": {"gradient_merge_acc_step": 2}}
    assert from_paddle(sharded).accumulate == 2
    with pytest.raises(GraphoptError, match="expected the same number of batches"):
        from_paddle({**sharded, "gradient_merge": True, "gradient_merge_configs": {"k_steps": 4}})


def test_methods_that_exclude_each_other() -> None:
    with pytest.raises(GraphoptError, match="'deep-gradient-compression' and 'local-sgd' cannot be used together"):
        from_paddle({"dgc": True, "localsgd": True})


def test_problems_are_reported_at_once() -> None:
    fields = {"checkpoints": "net.0", "offload": True, "enable_offload": "yes", "checkpoint_shape": [-1, 4]}
    strategy = {"recompute": True, "recompute_configs": fields, "amp_config": {}, "dgc": True}
    with pytest.raises(GraphoptError) as error:
        from_paddle({**strategy, "dgc_configs": {"sparsity": [1.5]}, "amp": 1, "amp_configs": {"nothing": 1}})
    lines = str(error.value).splitlines()
    assert lines[0] == "Paddle's strategy is not right:"
    for line in (
        "  $.amp: expected true or false, found 1",
        "  $.recompute_configs.checkpoints: expected a list, found 'net.0'",
        "  $.recompute_configs.offload: there is no such field; did you mean 'enable_offload'?",
        "  $.recompute_configs.enable_offload: expected true or false, found 'yes'",
        "  $.recompute_configs.checkpoint_shape[0]: expected a whole number of at least 1, found -1",
    ):
        assert line in lines
    assert any("$.amp_config: there is no such field; did you mean 'amp_configs'" in line for line in lines)
    assert any("$.amp_configs.nothing: there is no such field" in line for line in lines)
    assert any("$.dgc_configs: " in line and "1.5" in line for line in lines)


def test_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "strategy.yaml"
    path.write_text("localsgd: true\nlocalsgd_configs: {k_steps: 2}\n")
    assert from_paddle(path) == [DataParallel(), LocalSGD(k_steps=2, begin_step=1)]
    with pytest.raises(GraphoptError, match="config is a mapping, or the path of a file, got 3"):
        from_paddle(3)  # type: ignore[arg-type]
