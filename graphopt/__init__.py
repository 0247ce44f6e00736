"""graphopt: a PyTorch training step, captured as one program you can read, and rewritten with passes."""

from __future__ import annotations

import importlib
import sys
import types

from graphopt.ir import handed_down

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


class _Package(types.ModuleType):
    """Keeps the function ``graphopt.capture`` in front of the folder of that name, which an import would put there."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in __all__ and isinstance(value, types.ModuleType) and value.__name__ == f"{__name__}.{name}"):
            super().__setattr__(name, value)


def _load() -> None:
    """Import everything that users have, and hand down what the layers above add to those below."""
    from graphopt.report import interface

    globals().update({name: getattr(interface, name) for name in __all__})


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """A public name, or a folder of the package, imported now."""
        if name in __all__:
            _load()
            return globals()[name]
        if name in ("integrations", "passes", "planning"):
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


sys.modules[__name__].__class__ = _Package
handed_down.by(_load)
