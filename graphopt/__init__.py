"""graphopt: a PyTorch training step, captured as one program you can read, and rewritten with passes."""

from __future__ import annotations

import importlib
import sys
import types

from graphopt.ir.provided import handed_down

TYPE_CHECKING = False  # that of typing, whose import takes longer than all of this

if TYPE_CHECKING:
    from graphopt.report.interface import *

    __version__: str

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
    "advise",
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


_HOMES = {
    "ArgumentError": "errors",
    "CaptureError": "errors",
    "Changed": "rewriting.pass_",
    "CompiledGraph": "runtime.graph_breaks.dynamo_backend",
    "Format": "ir.provided.formats",
    "FxPass": "rewriting.patterns.fx_pass",
    "GraphoptError": "errors",
    "MeasuredPeak": "analysis.measured_peak",
    "Pass": "rewriting.pass_",
    "PassError": "errors",
    "Phase": "ir.node",
    "Pipeline": "rewriting.pipeline",
    "PipelineError": "errors",
    "Policy": "ir.node",
    "Program": "ir.program",
    "RandomStreams": "runtime.state.random_streams",
    "RankError": "errors",
    "Rewrite": "rewriting.patterns.rewrite_pass",
    "TorchVersionError": "errors",
    "TrainStep": "runtime.step.train_step",
    "TrainingPass": "rewriting.training_pass",
    "VerifyError": "errors",
    "__version__": "ir.version:VERSION",
    "advise": "runtime.advice.choose_passes",
    "available_formats": "ir.provided.formats",
    "capture": "capture",
    "checkpoint": "runtime.checkpoints.checkpoint:",
    "compiled_graphs": "runtime.graph_breaks.dynamo_backend",
    "configs": "rewriting.config_translation:",
    "fast_dtype": "rewriting.precision.devices",
    "largest_batch": "runtime.drop_in.largest_batch",
    "load_step": "runtime.step.load_step",
    "materialize_shards": "runtime.state.materialize_shards",
    "measure_peak": "analysis.measured_peak",
    "name": "ir.names",
    "ops": "ir.ops:",
    "optimize": "runtime.drop_in.module",
    "optimize_step": "runtime.step.optimize_step",
    "partitioner": "runtime.compile.inductor_partitioner",
    "redistribute": "runtime.state.state_dict",
    "register_format": "ir.provided.formats",
    "scaler": "runtime.step.scaler",
    "sharded_state": "rewriting.distributed.sharding.sharded_state:",
    "without_data": "capture",
}
"""The module of each name, and behind a colon its name there where it is another one; a bare colon: the module."""


class _Package(types.ModuleType):
    """Keeps the function ``graphopt.capture`` in front of the folder of that name, which an import would put there."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in __all__ and isinstance(value, types.ModuleType) and value.__name__ == f"{__name__}.{name}"):
            super().__setattr__(name, value)


def _load() -> None:
    """Hand down what the layers above add to those below."""
    from graphopt.report.register import register

    register()


def _found(name: str) -> object:
    """A public name, whose module is imported now, with what that needs and no more."""
    home, colon, other = _HOMES[name].partition(":")
    module = importlib.import_module(f"{__name__}.{home}")
    return module if colon and not other else getattr(module, other or name)


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """A public name, or a folder of the package, imported now."""
        if name in __all__:
            with handed_down.importing:
                globals()[name] = _found(name)
            return globals()[name]
        if name in ("integrations", "passes", "planning"):
            with handed_down.importing:
                return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


sys.modules[__name__].__class__ = _Package
handed_down.by(_load)
