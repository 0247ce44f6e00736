"""``passes="auto"``: the passes for the machine that training runs on."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from graphopt.analysis.costs.calibration import profile_of
from graphopt.capture.devices.for_device import without_data_for
from graphopt.capture.effects.side_effects import CAPTURE_LOCK
from graphopt.errors import ArgumentError
from graphopt.ir.ops.communication.groups import find_group, talking
from graphopt.ir.words.written_units import format_bytes, format_seconds
from graphopt.rewriting.distributed.prediction.measured_link import largest_of_all, measure_link
from graphopt.rewriting.progress import leave_line
from graphopt.runtime.advice.choose_passes import Machine, advise_session, memory_left
from graphopt.runtime.advice.evaluation import SharedCapture

__all__ = ["AUTO", "automatic_passes"]

AUTO = "auto"
"""What stands for the passes that the machine needs."""

WITHIN_MEMORY = "fit-memory{budget=auto}"
"""The passes of one device: none where the program fits into what is free."""


def automatic_passes(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[..., Any] | None,
    example_inputs: tuple[Any, ...] | None,
) -> str:
    """The passes of a whole step for the machine that is here, all of which leave results as they are.

    Where several ranks train, all of them have to call this: the link between them is measured, and each simulates
    every way to exchange gradients by the first one's device, so that all come to the same.

    Args:
        model: whose parameters are on the device.
        optimizer: of the step.
        loss: as for ``optimize_step``.
        example_inputs: the batch to choose by.

    Raises:
        ArgumentError: where several ranks train, without a batch.
        BudgetError: where nothing fits.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return WITHIN_MEMORY
    if example_inputs is None:
        raise ArgumentError(
            "passes='auto' weighs ways to exchange gradients by the step that they are for, and there is no batch yet: "
            "give example_inputs=, or the passes"
        )
    device = next(model.parameters()).device
    machine = _machine_here(model, device)
    assert machine.profile is not None
    twins = without_data_for(machine.profile, model, optimizer, example_inputs, {})
    with CAPTURE_LOCK:
        session = SharedCapture(twins.model, twins.args, twins.kwargs, loss=loss, optimizer=twins.optimizer)
        advice = advise_session(session, machine, "bitwise")
    other = advice.runner_up
    told = "" if other is None else f"; runner-up {other.candidate}, {format_seconds(other.seconds)}"
    pipeline = re.sub(r"\bbudget=\d+", "budget=auto", advice.pipeline)
    leave_line(
        f"passes='auto': {pipeline}: {format_bytes(advice.chosen.taken)} of {format_bytes(machine.budget)}, "
        f"{format_seconds(advice.step.seconds)} a step (predicted){told}"
    )
    return pipeline


def _machine_here(model: nn.Module, device: torch.device) -> Machine:
    """The ranks that train: the first one's device, the link between all, and what the fullest one has left."""
    group = find_group("")
    with talking():
        told: list[Any] = [profile_of(device) if group.rank == 0 else None]
        dist.broadcast_object_list(told, src=dist.get_global_rank(group.handle, 0), group=group.handle)
        link = measure_link(group, device)
        (least,) = largest_of_all([-memory_left(model)], group, device)
    profile = replace(
        told[0], devices_per_host=1, network_bandwidth=link.bandwidth, network_latency=link.latency
    )  # what is measured between all ranks holds for hosts too
    return Machine(group.size, profile, int(-least))
