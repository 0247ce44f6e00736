"""graphopt: a PyTorch training step, captured as one program you can read, and rewritten with passes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from graphopt.ir.version import VERSION


def _prints_words_alone() -> bool:
    """Whether this process is the command ``graphopt`` asked for its version, help or completion: no torch for that."""
    program, *rest = sys.argv or [""]
    name = program.replace("\\", "/").rpartition("/")[2].removesuffix(".exe")
    as_module = program == "-m" and ("-m", "graphopt") in zip(sys.orig_argv, sys.orig_argv[1:], strict=False)
    asked = [word for word in rest if word in ("--version", "--help", "-h")]
    return (name == "graphopt" or as_module) and bool(asked or rest[:1] in (["help"], ["completion"]))


if TYPE_CHECKING or not _prints_words_alone():
    from graphopt import _torch
    from graphopt.analysis.measured_peak import MeasuredPeak, measure_peak
    from graphopt.capture import capture, without_data
    from graphopt.errors import (
        ArgumentError,
        CaptureError,
        GraphoptError,
        PassError,
        PipelineError,
        RankError,
        TorchVersionError,
        VerifyError,
    )
    from graphopt.ir import ops
    from graphopt.ir.formats import Format, available_formats, register_format
    from graphopt.ir.names import name
    from graphopt.ir.node import Phase, Policy
    from graphopt.ir.program import Program
    from graphopt.report.register import register
    from graphopt.rewriting import config_translation as configs
    from graphopt.rewriting.distributed import sharded_state
    from graphopt.rewriting.fx_pass import FxPass
    from graphopt.rewriting.pass_ import Changed, Pass
    from graphopt.rewriting.pipeline import Pipeline
    from graphopt.rewriting.precision.devices import fast_dtype
    from graphopt.rewriting.rewrite_pass import Rewrite
    from graphopt.rewriting.training_pass import TrainingPass
    from graphopt.runtime import checkpoint
    from graphopt.runtime.compile.inductor_partitioner import partitioner
    from graphopt.runtime.dynamo_backend import CompiledGraph, compiled_graphs
    from graphopt.runtime.largest_batch import largest_batch
    from graphopt.runtime.load_step import load_step
    from graphopt.runtime.materialize_shards import materialize_shards
    from graphopt.runtime.module import optimize
    from graphopt.runtime.optimize_step import optimize_step
    from graphopt.runtime.random_streams import RandomStreams
    from graphopt.runtime.scaler import scaler
    from graphopt.runtime.state_dict import redistribute
    from graphopt.runtime.train_step import TrainStep

    register()
    _torch.offer_backend("graphopt", "graphopt.runtime.dynamo_backend:backend")

__version__ = VERSION

__all__ = [
    "ArgumentError",
    "CaptureError",
    "Changed",
    "CompiledGraph",
    "Format",
    "FxPass",
    "GraphoptError",
    "MeasuredPeak",
    "Pass",
    "PassError",
    "Phase",
    "Pipeline",
    "PipelineError",
    "Policy",
    "Program",
    "RandomStreams",
    "RankError",
    "Rewrite",
    "TorchVersionError",
    "TrainStep",
    "TrainingPass",
    "VerifyError",
    "__version__",
    "available_formats",
    "capture",
    "checkpoint",
    "compiled_graphs",
    "configs",
    "fast_dtype",
    "largest_batch",
    "load_step",
    "materialize_shards",
    "measure_peak",
    "name",
    "ops",
    "optimize",
    "optimize_step",
    "partitioner",
    "redistribute",
    "register_format",
    "scaler",
    "sharded_state",
    "without_data",
]
