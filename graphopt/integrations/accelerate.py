"""Accelerate: whole steps that accumulate, scale and save as its ``Accelerator`` says.

A drop-in model needs nothing of this: ``accelerator.prepare(graphopt.optimize(model, passes), ...)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import nn

from graphopt.capture.call.flatten import change_loss, loss_in
from graphopt.errors import ArgumentError, GraphoptError, public
from graphopt.rewriting.pass_ import Pass
from graphopt.rewriting.pipeline import Passes, Pipeline
from graphopt.rewriting.precision.scaling import GOOD, SCALE
from graphopt.rewriting.registry import find_pass
from graphopt.runtime.compile.backend import Backend
from graphopt.runtime.drop_in.requirements import required
from graphopt.runtime.step.optimize_step import optimize_step
from graphopt.runtime.step.train_step import TrainStep

__all__ = [
    "AcceleratedStep",
    "copy_scale",
    "hand_over_update",
    "make_pass",
    "prepare_step",
    "run_batch",
    "scaling_passes",
]

_accelerate = required("accelerate", "accelerate")


class AcceleratedStep:
    """A whole step inside of ``with accelerator.accumulate(model)``: the update comes where gradients are synchronized.

    Made by ``prepare_step``.

    Args:
        accelerator: of Accelerate.
        step: of a loss that is divided by the number of batches of an update.
    """

    def __init__(self, accelerator: Any, step: TrainStep) -> None:
        self._accelerator = accelerator
        self.step = step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one batch; returns its loss, detached and not divided, with what else the loss function returns."""
        result = run_batch(self.step, self._accelerator.sync_gradients, *args, **kwargs)
        batches = self._accelerator.gradient_accumulation_steps
        return change_loss(result, lambda loss: loss.mul(batches))

    def state_dict(self) -> dict[str, Any]:
        """What the step owns (``TrainStep.state_dict``); ``accelerator.save_state`` saves it."""
        return self.step.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken; ``accelerator.load_state`` does."""
        self.step.load_state_dict(state)


@public
def prepare_step(
    accelerator: Any,
    model: nn.Module,
    optimizer: Any,
    passes: Passes = (),
    *,
    loss: Callable[..., Any] | None = None,
    backend: Backend = "eager",
) -> AcceleratedStep:
    """A whole step of what ``accelerator.prepare`` has given: its autocast, loss scale and accumulation are in it.

    Call it in place of the model, ``accelerator.backward`` and ``optimizer.step``. ``accelerator.save_state`` and
    ``load_state`` take it along.

    Args:
        accelerator: of one process.
        model: prepared.
        optimizer: prepared. Its ``step`` does nothing from now on.
        passes: as for ``graphopt.optimize_step``.
        loss: as for ``graphopt.optimize_step``; None where the model returns the loss or an object with ``.loss``.
        backend: as for ``graphopt.optimize_step``.

    Raises:
        GraphoptError: for several processes, and for DeepSpeed and FSDP.

    Example:
        >>> accelerator = accelerate.Accelerator(gradient_accumulation_steps=2, cpu=True)
        >>> model, optimizer = accelerator.prepare(model, optimizer)
        >>> step = prepare_step(accelerator, model, optimizer, [Recompute("blocks.*")], loss=loss)
        >>> for batch in (x, x):
        ...     with accelerator.accumulate(model):
        ...         value = step(batch)
        >>> value.ndim
        0
    """
    _refuse_processes(accelerator)
    if not isinstance(optimizer, _accelerate.optimizer.AcceleratedOptimizer):
        raise ArgumentError("prepare_step takes what accelerator.prepare(model, optimizer) returns, prepare them first")
    batches = accelerator.gradient_accumulation_steps

    def divided(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = loss(model, *args, **kwargs) if loss is not None else _own_loss(model(*args, **kwargs))
        return result if loss_in(result) is None else change_loss(result, lambda value: value.div(batches))

    given = [*Pipeline(passes).passes, *scaling_passes(accelerator.scaler)]
    step = optimize_step(model, optimizer.optimizer, given, loss=divided, backend=backend)
    hand_over_update(optimizer, step)
    result = AcceleratedStep(accelerator, step)
    accelerator.register_for_checkpointing(result)
    return result


def _own_loss(result: Any) -> torch.Tensor:
    """The loss that a model returns, or that is in what it returns."""
    found = None if type(result) in (tuple, list) else loss_in(result)
    if found is None:
        raise GraphoptError(f"the model returns {type(result).__name__} without a loss: give loss=")
    return found


def _refuse_processes(accelerator: Any) -> None:
    kind = str(accelerator.distributed_type).removeprefix("DistributedType.")
    if accelerator.num_processes > 1 or kind != "NO":
        raise GraphoptError(
            f"a whole step under Accelerate runs in one process, and this is {kind} with {accelerator.num_processes}: "
            "keep the loop and prepare graphopt.optimize(model, passes), or start a plain loop of "
            "graphopt.optimize_step with DataParallel() by torchrun"
        )


def run_batch(step: TrainStep, last: bool, *args: Any, **kwargs: Any) -> Any:
    """Run one batch of a step that adds up the gradients of several, and updates behind the last one.

    Args:
        step: whose loss is divided already.
        last: whether the update follows.
        args: the batch.
        kwargs: those of its parts given by keyword.
    """
    step.accumulate(step.accumulated + (1 if last else 2), mean=False)
    return step(*args, **kwargs)


def scaling_passes(scaler: Any) -> list[Pass]:
    """The pass that scales losses as a ``GradScaler`` does; none without a scaler, or for one that is off."""
    if scaler is None or not scaler.is_enabled():
        return []
    return [
        make_pass(
            "scale-loss",
            init_scale=scaler.get_scale(),
            growth_factor=scaler.get_growth_factor(),
            backoff_factor=scaler.get_backoff_factor(),
            growth_interval=scaler.get_growth_interval(),
            max_skipped=None,
        )
    ]


def make_pass(name: str, *args: Any, **options: Any) -> Pass:
    """A pass of a registered name with its options."""
    cls: Any = find_pass(name)
    made: Pass = cls(*args, **options)
    return made


def hand_over_update(optimizer: Any, step: TrainStep) -> None:
    """Let ``step`` of an accelerated optimizer only tell schedulers, and whether loss scaling skipped the update.

    Args:
        optimizer: that Accelerate has wrapped.
        step: that runs the update.
    """

    def told(self: Any, closure: Any = None) -> None:
        self._opt_called = True  # by which torch's schedulers know that the optimizer came first
        self._is_overflow = step.skipped

    told._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedulers made later have nothing to add
    optimizer.step = MethodType(told, optimizer)


def copy_scale(step: TrainStep, scaler: Any) -> None:
    """Set a ``GradScaler`` to the loss scale of a step, so that it is saved as in a loop without one."""
    state = step.state_dict()["held"]
    if SCALE in state:
        tracked = {"scale": float(state[SCALE]), "_growth_tracker": int(state[GOOD])}
        scaler.load_state_dict({**scaler.state_dict(), **tracked})
