"""Lightning: a callback that optimizes a module for the time of ``fit``.

Without it: ``self.model = graphopt.optimize(self.model, passes)`` in a LightningModule, and in Fabric
``fabric.setup(graphopt.optimize(model, passes), optimizer)``.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch import nn

from graphopt.errors import ArgumentError, GraphoptError, check_type, did_you_mean
from graphopt.rewriting.pipeline import Passes, Pipeline
from graphopt.runtime.compile.backend import Backend
from graphopt.runtime.drop_in.module import Optimized, optimize
from graphopt.runtime.drop_in.requirements import required

__all__ = ["Optimize"]

logger = logging.getLogger("graphopt")
_Callback: Any = required("lightning.pytorch", "lightning").Callback

_SHARDED = ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy")


class Optimize(_Callback):  # type: ignore[misc]
    """Lets submodules of a LightningModule run rewritten programs while ``Trainer.fit`` trains them.

    Parameters, ``state_dict`` keys, optimizers and checkpoints are as without it; validation runs the module as it is.
    Behind ``fit`` the LightningModule has its own submodules again.

    Args:
        passes: as for ``graphopt.optimize``.
        modules: the names of submodules that ``training_step`` calls; by default the one that has parameters.
        backend: as for ``graphopt.optimize``.

    Raises:
        PipelineError: where the passes do not fit together.
        GraphoptError: when fitting begins: for names that are no submodules, for several with parameters and no name,
            and for strategies that shard parameters.

    Example:
        >>> callback = Optimize([Recompute("auto")], modules=["net"])
        >>> trainer = lightning.Trainer(max_steps=2, callbacks=[callback], **quiet)
        >>> trainer.fit(lightning_model, batches)
        >>> callback.optimized["net"].records[0].name
        'recompute'
    """

    def __init__(
        self, passes: Passes = (), *, modules: Sequence[str] | None = None, backend: Backend = "eager"
    ) -> None:
        super().__init__()
        if isinstance(modules, str):
            modules = (modules,)
        self._pipeline = Pipeline(passes)
        self._names = None if modules is None else tuple(modules)
        self._backend: Backend = backend
        self._originals: dict[str, nn.Module] = {}
        self.optimized: dict[str, Optimized] = {}

    def setup(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        """Called by Lightning before it makes optimizers; optimizes the submodules where fitting begins."""
        if stage != "fit":
            return
        kind = type(trainer.strategy).__name__
        if kind in _SHARDED:
            raise GraphoptError(
                f"{kind} swaps parameters during the step, which a program cannot hold: use one device or DDP"
            )
        self.optimized.clear()
        for name in self._names or _only_one(pl_module):
            module = _submodule(pl_module, name)
            result = optimize(module, self._pipeline.passes, backend=self._backend)
            assert isinstance(result, Optimized)
            self._originals[name], self.optimized[name] = module, result
            _put(pl_module, name, result)

    def on_train_end(self, trainer: Any, pl_module: nn.Module) -> None:
        """Called by Lightning; warns of submodules that no training step has called."""
        for name, module in self.optimized.items():
            if not module._graphopt.used:
                logger.warning(
                    "the submodule %r was never called in training: no pass has acted on it; name in modules= what "
                    "training_step calls",
                    name,
                )

    def teardown(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        """Called by Lightning at the end, and behind errors; puts back the submodules as they were."""
        for name, module in self._originals.items():
            module.train(self.optimized[name].training)
            _put(pl_module, name, module)
        self._originals.clear()


def _only_one(model: nn.Module) -> list[str]:
    """The name of the one submodule that has parameters."""
    names = [name for name, child in model.named_children() if next(child.parameters(), None) is not None]
    if len(names) != 1:
        listed = ", ".join(map(repr, names)) or "none"
        raise GraphoptError(
            f"of the submodules of {type(model).__name__} these have parameters: {listed}; name in modules= those that "
            "training_step calls"
        )
    return names


def _submodule(model: nn.Module, name: str) -> nn.Module:
    check_type("a name in modules", name, str, "the path of a submodule")
    try:
        return model.get_submodule(name)
    except AttributeError:
        known = [path for path, _ in model.named_modules() if path]
        hint = did_you_mean(name, known) or f"there are {', '.join(map(repr, known[:5]))}"
        raise ArgumentError(f"{type(model).__name__} has no submodule {name!r}; {hint}") from None


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    path, _, last = name.rpartition(".")
    owner = model.get_submodule(path) if path else model
    owner._modules[last] = module
