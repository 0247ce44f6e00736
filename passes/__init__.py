"""The passes that come with graphopt, one file each; import them from ``graphopt.passes``.

The file of a pass is imported when the pass is asked for: its name in snake case.
"""

from __future__ import annotations

import importlib
import re
import sys
from typing import TYPE_CHECKING

from graphopt.ir.provided import handed_down

if __name__ == "passes":
    raise ImportError("import graphopt.passes, not passes: the folder is the package graphopt.passes")

if TYPE_CHECKING:
    from graphopt.passes.adaptive_local_sgd import AdaptiveLocalSGD as AdaptiveLocalSGD
    from graphopt.passes.checkpoint_boundaries import CheckpointBoundaries as CheckpointBoundaries
    from graphopt.passes.chunk import Chunk as Chunk
    from graphopt.passes.chunk_loss import ChunkLoss as ChunkLoss
    from graphopt.passes.clip_gradients import ClipGradients as ClipGradients
    from graphopt.passes.compress_activations import CompressActivations as CompressActivations
    from graphopt.passes.compress_gradients import CompressGradients as CompressGradients
    from graphopt.passes.contiguous_checkpoints import ContiguousCheckpoints as ContiguousCheckpoints
    from graphopt.passes.data_parallel import DataParallel as DataParallel
    from graphopt.passes.deep_gradient_compression import DeepGradientCompression as DeepGradientCompression
    from graphopt.passes.diloco import DiLoCo as DiLoCo
    from graphopt.passes.fit_memory import FitMemory as FitMemory
    from graphopt.passes.float8 import Float8 as Float8
    from graphopt.passes.fuse_update import FuseUpdate as FuseUpdate
    from graphopt.passes.local_sgd import LocalSGD as LocalSGD
    from graphopt.passes.microbatch import Microbatch as Microbatch
    from graphopt.passes.mixed_precision import MixedPrecision as MixedPrecision
    from graphopt.passes.offload import Offload as Offload
    from graphopt.passes.offload_state import OffloadState as OffloadState
    from graphopt.passes.partition_checkpoints import PartitionCheckpoints as PartitionCheckpoints
    from graphopt.passes.recompute import Recompute as Recompute
    from graphopt.passes.recompute_evenly import RecomputeEvenly as RecomputeEvenly
    from graphopt.passes.scale_loss import ScaleLoss as ScaleLoss
    from graphopt.passes.shard_optimizer import ShardOptimizer as ShardOptimizer
    from graphopt.passes.shard_parameters import ShardParameters as ShardParameters

__all__ = [
    "AdaptiveLocalSGD",
    "CheckpointBoundaries",
    "Chunk",
    "ChunkLoss",
    "ClipGradients",
    "CompressActivations",
    "CompressGradients",
    "ContiguousCheckpoints",
    "DataParallel",
    "DeepGradientCompression",
    "DiLoCo",
    "FitMemory",
    "Float8",
    "FuseUpdate",
    "LocalSGD",
    "Microbatch",
    "MixedPrecision",
    "Offload",
    "OffloadState",
    "PartitionCheckpoints",
    "Recompute",
    "RecomputeEvenly",
    "ScaleLoss",
    "ShardOptimizer",
    "ShardParameters",
]


_FILES = {"DiLoCo": "diloco"}  # whose name is one word

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """A pass, imported now."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])
        file = _FILES.get(name) or re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
        with handed_down.importing:
            globals()[name] = getattr(importlib.import_module(f"{__name__}.{file}"), name)
        return globals()[name]


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
