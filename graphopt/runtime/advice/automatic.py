"""``passes="auto"``: the passes for the machine that training runs on."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from graphopt import _torch
from graphopt.analysis.costs.calibration import profile_of
from graphopt.capture.devices.for_device import without_data_for
from graphopt.capture.effects.side_effects import CAPTURE_LOCK
from graphopt.errors import ArgumentError
from graphopt.ir.ops.communication.groups import Group, find_group, talking
from graphopt.ir.ops.values import type_text
from graphopt.ir.words.written_units import format_bytes, format_seconds
from graphopt.rewriting.distributed.prediction.measured_link import largest_of_all, measure_link
from graphopt.rewriting.pipeline import AUTO
from graphopt.rewriting.progress import leave_line
from graphopt.runtime.advice.choose_passes import advise_session
from graphopt.runtime.advice.evaluation import SharedCapture
from graphopt.runtime.advice.machine import Machine, memory_left

__all__ = ["automatic_passes"]

T = TypeVar("T")


def automatic_passes(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[..., Any] | None,
    example_inputs: tuple[Any, ...] | None,
) -> str:
    """The passes of a whole step for the machine that is here, all of which leave results as they are.

    Where several ranks train, all of them have to call this: the link between them is measured, and each simulates
    every way to exchange gradients by the first one's device. What the first one predicts counts, so that all come to
    the same. For one rank that is ``auto`` as it is.

    Args:
        model: whose parameters are on the device.
        optimizer: of the step.
        loss: as for ``optimize_step``.
        example_inputs: the batch to choose by.

    Raises:
        ArgumentError: where several ranks train, without a batch, or with batches of several forms.
        BudgetError: where nothing fits.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return AUTO
    if example_inputs is None:
        raise ArgumentError(
            "passes='auto' weighs ways to exchange gradients by the step that they are for, and there is no batch yet: "
            "give example_inputs=, or the passes"
        )
    group = find_group("")
    device = next(model.parameters()).device
    form = ", ".join(map(type_text, filter(torch.is_tensor, _torch.pytree.tree_leaves(example_inputs))))
    with talking():
        (differs,) = largest_of_all([float(_of_first_rank(form, group) != form)], group, device)
    if differs:
        raise ArgumentError(
            f"passes='auto' weighs ways to exchange gradients by one form of batch for all ranks, and example_inputs= "
            f"differ between them (here {form}): give batches of equal sizes, or the passes"
        )
    machine = _machine_here(model, device, group)
    assert machine.profile is not None
    twins = without_data_for(machine.profile, model, optimizer, example_inputs, {})
    with CAPTURE_LOCK:
        session = SharedCapture(twins.model, twins.args, twins.kwargs, loss=loss, optimizer=twins.optimizer)
        advice = advise_session(session, machine, "bitwise", agreed=lambda found: _of_first_rank(found, group))
    other = advice.runner_up
    told = "" if other is None else f"; runner-up {other.candidate}, {format_seconds(other.seconds)}"
    pipeline = re.sub(r"\bbudget=\d+", "budget=auto", advice.pipeline)
    leave_line(
        f"passes='auto': {pipeline}: {format_bytes(advice.chosen.taken)} of {format_bytes(machine.budget)}, "
        f"{format_seconds(advice.step.seconds)} a step (predicted){told}"
    )
    return pipeline


def _of_first_rank(found: T, group: Group) -> T:
    """What the first rank of a group gives, on every rank of it."""
    told = [found]
    with talking():
        dist.broadcast_object_list(told, src=dist.get_global_rank(group.handle, 0), group=group.handle)
    return told[0]


def _machine_here(model: nn.Module, device: torch.device, group: Group) -> Machine:
    """The ranks that train: the first one's device, the link between all, and what the fullest one has left."""
    here = _of_first_rank(profile_of(device) if group.rank == 0 else None, group)
    assert here is not None
    with talking():
        link = measure_link(group, device)
        (least,) = largest_of_all([-memory_left(model)], group, device)
    profile = replace(
        here, devices_per_host=1, network_bandwidth=link.bandwidth, network_latency=link.latency
    )  # what is measured between all ranks holds for hosts too
    return Machine(group.size, profile, int(-least))
