"""Where a whole step keeps the tensors of model, optimizer and passes: memory, the host, a disk, a folder of steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from graphopt.errors import GraphoptError
from graphopt.ir.node import InputSpec, Phase
from graphopt.ir.ops import schema
from graphopt.ir.ops.transfers import PagedFile, Tier, checked_tier, residents
from graphopt.ir.program import Program
from graphopt.rewriting.pipeline import Pipeline
from graphopt.runtime.ranks.places import reached
from graphopt.runtime.state.lasting_folder import LastingFolder
from graphopt.runtime.state.packed_state import pack
from graphopt.runtime.state.sharded_model import ShardedModel
from graphopt.runtime.state.state_dict import place
from graphopt.runtime.state.state_store import StateStore
from graphopt.runtime.step.step_progress import StepProgress

__all__ = ["KeptState", "resident_inputs"]


def resident_inputs(program: Program) -> list[tuple[InputSpec, Tier]]:
    """The inputs that a program expects on the host or a disk, and on which of the two."""
    pairs = zip(program.placeholders, program.inputs, strict=True)
    return [(spec, _tier(node)) for node, spec in pairs if schema.resides_elsewhere(node)]


def _tier(node: fx.Node) -> Tier:
    return checked_tier(str(next(user.args[1] for user in node.users if schema.op_name(user) == "swap_in")))


class KeptState:
    """Keeps tensors where a step's programs expect them and, where a pass asks for a folder, finished steps there.

    Args:
        model: whose parameters may reside elsewhere.
        optimizer: whose state may.
        store: what passes keep.
        progress: how far training is.
        pipeline: the passes.

    Attributes:
        sharded: the parameters of which each rank keeps a shard.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        store: StateStore,
        progress: StepProgress,
        pipeline: Pipeline,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._store = store
        self._progress = progress
        self.sharded = ShardedModel(model, store)
        self._wanted = next((found for each in pipeline.training if (found := each.lasting_folder())), "")
        self._lasting: LastingFolder | None = None
        self._cut_short = False
        self._settled: tuple[object, Hashable] = (None, None)

    # --- where tensors are -------------------------------------------------------------------------------------------

    def settle(self, program: Program, wanted: Sequence[tuple[InputSpec, Tier]], version: Hashable) -> None:
        """Move what is not where a program expects it.

        Args:
            program: that runs next.
            wanted: of ``resident_inputs``.
            version: of model and optimizer; for the same one nothing was replaced. None looks in any case.

        Raises:
            GraphoptError: where there is no room, or the folder cannot be used.
        """
        lasting = self._folder()
        if self.sharded.waits or any(state.shard is not None for state in program.pass_state.values()):
            self.sharded.take(program.pass_state)
        if not wanted or (version is not None and self._settled[0] == wanted and self._settled[1] == version):
            return
        with torch.no_grad():
            for spec, tier in wanted:
                self._move(spec, tier, lasting.file if lasting is not None else None)
        self._settled = (wanted, version)

    def _move(self, spec: InputSpec, tier: Tier, file: PagedFile | None) -> None:
        tensor = self._tensor(spec)
        if residents().tier_of(tensor, file if tier == "disk" else None) == tier:
            return
        moved = residents().settle(tensor.detach(), tier, file)
        if spec.role == "parameter":
            tensor.data = moved
        elif spec.role == "state":
            name, key = spec.target.rsplit("/", 1)
            self._optimizer.state[self._model.get_parameter(name)][key] = moved
        else:
            self._store.replace(spec.target, moved)

    def _tensor(self, spec: InputSpec) -> torch.Tensor:
        if spec.role == "parameter":
            return self._model.get_parameter(spec.target)
        if spec.role == "state":
            name, key = spec.target.rsplit("/", 1)
            found: torch.Tensor = self._optimizer.state[self._model.get_parameter(name)][key]
            return found
        return self._store[spec.target]

    def _tensors(self) -> list[torch.Tensor]:
        """Everything that may reside elsewhere."""
        values = [value for kept in self._optimizer.state.values() for value in kept.values()]
        return [*self._model.parameters(), *(v for v in values if isinstance(v, torch.Tensor)), *self._store.tensors()]

    # --- finished steps ----------------------------------------------------------------------------------------------

    def _folder(self) -> LastingFolder | None:
        if self._wanted and self._lasting is None:
            if place()[1] > 1:
                raise GraphoptError(
                    "offload-state keeps finished steps in a folder for one process only: several ranks, killed "
                    "together, would leave different steps; leave folder= out, and save with graphopt.checkpoint.save"
                )
            self._lasting = LastingFolder(Path(self._wanted), resumed=self._progress.clock.steps > 0)
        return self._lasting

    @contextlib.contextmanager
    def whole_step(self, module: fx.GraphModule, state: Callable[[], Any]) -> Iterator[None]:
        """Around a step: it counts in the folder when it is done, and one that is cut short in its update is noted.

        Args:
            module: that runs.
            state: everything that is needed to go on from the step.

        Raises:
            GraphoptError: where the step before was cut short, and where the folder cannot be written.
        """
        lasting = self._folder()
        if lasting is None:
            yield
            return
        if self._cut_short:
            raise GraphoptError(
                "the last step was cut short in the middle of its update, so that parameters and the optimizer's state "
                f"are of two steps: graphopt.checkpoint.load({self._wanted!r}, step) goes back to the last whole one"
            )
        lasting.complete(self._tensors())
        steps = self._progress.clock.steps
        try:
            yield
        except BaseException as error:
            under_way = self._progress.clock.steps == steps
            self._cut_short = under_way and reached(error, module, Phase.UPDATE) is not False
            raise
        if self._progress.clock.steps > steps:
            lasting.finish(pack(state(), digests=False), self._tensors(), self._progress.clock.steps)

    def loaded(self) -> None:
        """Note that all of the state was replaced by a whole one."""
        self._cut_short = False
        if self._lasting is not None:
            self._lasting.complete(self._tensors())
            residents().roll_back(self._tensors())
