"""A Trainer of transformers that runs whole steps: forward, loss, backward, clipping and update as one program.

A drop-in model needs nothing of this: ``transformers.Trainer(graphopt.optimize(model, passes), ...)``.
"""

from __future__ import annotations

import copy
import logging
import os
from typing import TYPE_CHECKING, Any

import torch

from graphopt.errors import GraphoptError
from graphopt.integrations.accelerate import copy_scale, hand_over_update, run_batch
from graphopt.integrations.trainer_batches import longest_rows
from graphopt.integrations.trainer_settings import is_scaled, passes_of, refuse_model, refuse_settings, tell_callbacks
from graphopt.rewriting.pipeline import Passes
from graphopt.runtime.compile.backend import Backend
from graphopt.runtime.drop_in.largest_batch import largest_batch
from graphopt.runtime.drop_in.requirements import required
from graphopt.runtime.programs.rewrite import Verify
from graphopt.runtime.step.optimize_step import optimize_step
from graphopt.runtime.step.train_step import TrainStep

if TYPE_CHECKING:
    from torch import nn

__all__ = ["STATE_FILE", "Trainer"]

logger = logging.getLogger("graphopt")
_transformers = required("transformers", "'transformers[torch]>=5'")

STATE_FILE = "graphopt.pt"
"""Where a checkpoint has what passes own (``TrainStep.state_dict``), beside the files of the Trainer."""

_Base: Any = _transformers.Trainer
_USED = ("_prepare_for_training", "_clip_grad_norm", "_get_grad_norm", "_save_optimizer_and_scheduler", "_save_scaler")


class Trainer(_Base):  # type: ignore[misc]
    """``transformers.Trainer`` whose training step is one program, rewritten by passes.

    Everything else is the Trainer's: data, optimizer, schedule, evaluation, callbacks, logs, checkpoints. Losses and
    parameters are those of ``transformers.Trainer`` to the last bit, with passes marked ``bitwise`` and an optimizer
    that runs fused or foreach kernels (``optim="adamw_torch_fused"``). ``max_grad_norm`` becomes the pass
    ``ClipGradients``, a gradient scaler ``ScaleLoss``; autocast, label smoothing and ``compute_loss`` of a subclass are
    captured. With ``auto_find_batch_size=True`` the batch is the largest whose predicted peak fits.

    The loss must not look at values (``.item()``), and gradients stay inside of the program, so that ``.grad`` is None
    and ``on_pre_optimizer_step`` of callbacks comes behind the update.

    Args:
        *args: as for ``transformers.Trainer``.
        passes: as for ``graphopt.optimize_step``.
        budget: the pass ``FitMemory`` with this budget; with ``auto_find_batch_size`` what the batch has to fit into.
        backend: as for ``graphopt.optimize_step``.
        verify: as for ``graphopt.optimize_step``.
        **kwargs: as for ``transformers.Trainer``.

    Raises:
        GraphoptError: for settings whose work a step cannot take over (DeepSpeed, FSDP, ``torch_compile``, several
            processes), for quantized models, and where a pass is asked for twice.

    Example:
        >>> arguments = transformers.TrainingArguments(folder, max_steps=2, report_to=[], disable_tqdm=True)
        >>> trainer = Trainer(language_model, arguments, train_dataset=rows, passes=[Recompute("auto")])
        >>> result = trainer.train()
        {'train_runtime': ...}
        >>> result.global_step
        2
        >>> [record.name for record in trainer.step.records]
        ['recompute', 'clip-gradients']
    """

    def __init__(
        self,
        *args: Any,
        passes: Passes = (),
        budget: int | str | None = None,
        backend: Backend = "eager",
        verify: Verify = "structure",
        **kwargs: Any,
    ) -> None:
        lacking = [name for name in _USED if not hasattr(_Base, name)]
        if lacking:
            version = _transformers.__version__
            raise GraphoptError(f"transformers {version} has no Trainer.{lacking[0]}: install transformers 5 or newer")
        refuse_settings(kwargs.get("args", args[1] if len(args) > 1 else None))
        super().__init__(*args, **kwargs)
        refuse_model(self.model)
        self._passes = passes_of(self, passes, budget)
        self._without_fitting = [current for current in self._passes if budget is None or current.name != "fit-memory"]
        self._budget = budget
        self._backend: Backend = backend
        self._verify: Verify = verify
        self._step: TrainStep | None = None
        self._step_state: dict[str, Any] | None = None

    @property
    def step(self) -> TrainStep:
        """The step, once training has begun: ``step.program``, ``step.records``, ``step.show()``.

        Raises:
            GraphoptError: before that.
        """
        if self._step is None:
            raise GraphoptError("there is no step yet: call train() first")
        return self._step

    # --- training ----------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """``transformers.Trainer.train``, with the batch found first where ``auto_find_batch_size`` asks for it.

        A run that is resumed goes on with the batch of its checkpoint.
        """
        if self.args.auto_find_batch_size and not resume_from_checkpoint:
            self._train_batch_size = self._largest_batch()
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        self._step_state = None
        prepared = super()._prepare_for_training(*args, **kwargs)
        tell_callbacks(self, _transformers.TrainerCallback)
        self._step = self._make_step(self.optimizer.optimizer)
        hand_over_update(self.optimizer, self._step)
        return prepared

    def _make_step(self, optimizer: torch.optim.Optimizer) -> TrainStep:
        step = optimize_step(
            self.model, optimizer, self._passes, loss=self._loss, backend=self._backend, verify=self._verify
        )
        if self._step_state is not None:
            step.load_state_dict(self._step_state)
        return step

    def _loss(self, model: nn.Module, inputs: dict[str, Any], items: Any, batches: int | None) -> torch.Tensor:
        """What backward starts from: the loss of one batch as part of that of an update."""
        with self.compute_loss_context_manager():
            given = copy.copy(inputs)  # it takes labels out
            loss: torch.Tensor = self.compute_loss(model, given, num_items_in_batch=items)
        return loss if batches is None else loss / batches

    def _graphopt_compared_by(self) -> dict[str, Any] | None:
        """What ``_loss`` depends on, for captures that are kept; None where a subclass computes the loss itself."""
        own = ("compute_loss", "compute_loss_context_manager", "autocast_smart_context_manager")
        accelerator, owner = self.accelerator, type(self)
        overridden = any(getattr(owner, name) is not getattr(_Base, name) or name in vars(self) for name in own)
        if overridden or getattr(accelerator, "parallelism_config", None) is not None:
            return None
        return {
            **{name: getattr(_Base, name) for name in own},
            "label_smoother": self.label_smoother,
            "compute_loss_func": self.compute_loss_func,
            "model_accepts_loss_kwargs": self.model_accepts_loss_kwargs,
            "average_tokens_across_devices": getattr(self.args, "average_tokens_across_devices", None),
            "processes": accelerator.num_processes,
            "mixed_precision": str(accelerator.mixed_precision),
        }

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Run one batch through the step; the update happens in it, at the last batch of an accumulation."""
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        batches = None if is_scaled(self, num_items_in_batch) else self.current_gradient_accumulation_steps
        last = self.accelerator.gradient_state.sync_gradients
        loss: torch.Tensor = run_batch(self.step, last, self._prepare_inputs(inputs), num_items_in_batch, batches)
        return loss

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor | None:
        return self.step.gradient_norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self.step.gradient_norm if grad_norm is None else grad_norm

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self._step is not None:
            torch.save(self._step.state_dict(), os.path.join(output_dir, STATE_FILE))

    def _save_scaler(self, output_dir: str) -> None:
        if self._step is not None and self.accelerator.scaler is not None:
            copy_scale(self._step, self.accelerator.scaler)
        super()._save_scaler(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        path = os.path.join(checkpoint, STATE_FILE)
        if os.path.isfile(path):
            self._step_state = torch.load(path, weights_only=True, map_location="cpu")
        else:
            logger.warning("%s has no %s: what passes keep between steps starts anew", checkpoint, STATE_FILE)

    # --- the batch ---------------------------------------------------------------------------------------------------

    def _largest_batch(self) -> int:
        """The largest batch that fits, of rows like the longest one of the data."""
        loader = self.get_train_dataloader()
        rows = longest_rows(loader)
        items = self._get_num_items_in_batch([rows(1)], self.args.device)
        batches = None if is_scaled(self, items) else self.args.gradient_accumulation_steps
        self.model.train()
        with self.accelerator.autocast():
            return largest_batch(
                self.model,
                lambda count: (self._prepare_inputs(rows(count)), items, batches),
                self._without_fitting if self._budget is None else self._passes,
                budget="auto" if self._budget is None else self._budget,
                loss=self._loss,
                optimizer=self.create_optimizer(),
                most=len(loader.dataset),
            )
