"""``capture``: one training step as a program, to look at and to plan, without running it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast, get_args

import torch
from torch import nn

from graphopt.analysis.costs.profiles import DeviceProfile, device_profile
from graphopt.capture.call.garbage_collection import no_collection
from graphopt.capture.call.sharded_form import FullySharded, is_fully_sharded
from graphopt.capture.call.tensor_parallel_form import TensorParallel, has_distributed_tensors
from graphopt.capture.devices.for_device import without_data_for
from graphopt.capture.effects.checks import refuse_wrapped
from graphopt.capture.session import CaptureSession, Loss
from graphopt.errors import CaptureError, choice, public, wrong_argument
from graphopt.ir.node import Stage
from graphopt.ir.program import Program

__all__ = ["capture"]


@public
@no_collection()
def capture(
    model: nn.Module,
    args: tuple[Any, ...] | torch.Tensor = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Loss | bool | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    dynamic_shapes: Any = None,
    stage: Stage | None = None,
    device: str | DeviceProfile | None = None,
) -> Program:
    """Capture one training step of a model as a program, without running it and without changing anything.

    Args:
        model: the bare ``nn.Module``; its parameters, of any shape, are referred to and never copied.
        args: positional example inputs; only shapes, dtypes and devices of tensors matter.
        kwargs: keyword example inputs.
        loss: ``loss(model, *batch)`` returning a scalar tensor, or a tuple or dict with more beside it (see
            ``graphopt.optimize_step``); ``True`` where the model returns the loss or an object with ``.loss``; None to
            leave the loss outside of the program (the default without an optimizer).
        optimizer: a ``torch.optim`` object over the model's parameters; its update becomes part of the program.
        dynamic_shapes: sizes that may vary, as for ``torch.export.export``.
        stage: ``forward``, ``joint`` or ``step``; the last one that the arguments allow by default.
        device: capture what this device would run, without data and without running anything: the name of a device
            whose figures are published (``"h100-80gb"``), a ``.toml`` file with a profile, or a ``DeviceProfile``.
            Where the tensors are does not matter then; they may be on ``meta``, as models made under
            ``graphopt.without_data()`` are. Such a program is planned, printed, drawn and saved, and is not run.

    Returns:
        The program; ``program.lower(program)`` gives the next stage where there is one.

    Raises:
        ArgumentError: for an argument of another form, or a call that does not fit the model or the loss.
        CaptureError: where the model, the loss or the optimizer cannot be captured: what, where, and what to do.

    Example:
        >>> program = graphopt.capture(model, (x,), loss=loss, optimizer=optimizer)
        >>> program.stage
        'step'
        >>> graphopt.capture(model, (x,), stage="forward").stage
        'forward'
        >>> graphopt.capture(model, (x,), loss=loss, device="h100-80gb").context.device.name
        'h100-80gb'
    """
    if is_fully_sharded(model) and device is None:
        refuse_wrapped(model, fully_sharded=True)
        with FullySharded(model).as_shards(optimizer):
            return _captured(model, args, kwargs, loss, optimizer, dynamic_shapes, stage, device)
    if has_distributed_tensors(model) and device is None:
        refuse_wrapped(model, distributed=True)
        form = TensorParallel(model)
        args, kwargs = form.inputs.local(_positional(args, kwargs), kwargs or {})
        with form.as_shards(optimizer):
            return _captured(model, args, kwargs, loss, optimizer, dynamic_shapes, stage, device)
    return _captured(model, args, kwargs, loss, optimizer, dynamic_shapes, stage, device)


def _captured(
    model: nn.Module,
    args: tuple[Any, ...] | torch.Tensor,
    kwargs: Mapping[str, Any] | None,
    loss: Loss | bool | None,
    optimizer: torch.optim.Optimizer | None,
    dynamic_shapes: Any,
    stage: Stage | None,
    device: str | DeviceProfile | None,
) -> Program:
    """See ``capture``; of a model after ``fully_shard`` it gets this rank's shards."""
    refuse_wrapped(model)
    positional = _positional(args, kwargs)
    wanted = _stage(stage, optimizer)
    profile = None if device is None else device_profile(device)
    if profile is not None:
        twins = without_data_for(profile, model, optimizer, positional, kwargs or {}, dynamic_shapes)
        model, optimizer, positional, kwargs = twins.model, twins.optimizer, twins.args, twins.kwargs
    session = CaptureSession(model, positional, kwargs, loss=loss, optimizer=optimizer, dynamic_shapes=dynamic_shapes)
    program = session.forward()
    program.context = replace(program.context, device=profile)
    while program.stage != wanted:
        assert program.lower is not None
        program = program.lower(program)
    return program


def _positional(args: object, kwargs: object) -> tuple[Any, ...]:
    """The positional example inputs, also where a tensor stands alone."""
    if isinstance(args, torch.Tensor):
        return (args,)
    if isinstance(args, Mapping):
        raise wrong_argument("args", args, "a tuple of the positional example inputs", "give names in kwargs={...}")
    if not isinstance(args, (tuple, list)):
        raise wrong_argument("args", args, "a tuple of the positional example inputs", "capture(model, (x,))")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise wrong_argument("kwargs", kwargs, "a dict of the keyword example inputs")
    return tuple(args)


def _stage(stage: object, optimizer: object) -> Stage:
    """The stage that is wanted: the last one that there is, where none is named."""
    if stage is None:
        return "joint" if optimizer is None else "step"
    wanted = choice("stage", stage, get_args(Stage))
    if wanted == "step" and optimizer is None:
        raise CaptureError("the step stage holds the optimizer's update: give optimizer=")
    return cast(Stage, wanted)
