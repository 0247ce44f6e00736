"""What a capture for another device starts from: model, optimizer and batch without data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn

from graphopt import _torch
from graphopt.analysis.costs.profiles import DeviceProfile
from graphopt.capture.call.call_checks import check_model, check_optimizer
from graphopt.capture.devices.example_copies import Twins, twins_without_data
from graphopt.errors import CaptureError
from graphopt.ir.node import set_value, value_of
from graphopt.ir.program import Program

__all__ = ["stand_in", "without_data_for"]


def without_data_for(
    profile: DeviceProfile,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Any = None,
) -> Twins:
    """What is captured in place of a model, its optimizer and a batch: copies without data that stand for a device's.

    Args:
        profile: of the device.
        model: of which nothing is changed.
        optimizer: over its parameters; None for none.
        args: positional example inputs.
        kwargs: keyword example inputs.
        dynamic_shapes: has to be None.

    Raises:
        ArgumentError: for an optimizer of another form.
        CaptureError: for sizes that vary, and for what cannot be copied without data.
    """
    check_model(model)
    if optimizer is not None:
        check_optimizer(optimizer, model)
    if dynamic_shapes is not None:
        raise CaptureError(
            "device= plans for fixed sizes, and dynamic_shapes= leaves them open\n"
            "  what to do: leave dynamic_shapes out, and capture once for the largest batch"
        )
    return twins_without_data(model, optimizer, args, kwargs, _torch.stand_in_mode(profile))


def stand_in(program: Program, tensors: Iterable[torch.Tensor]) -> None:
    """Let the values of a program just exported stand for a device, as those that it was exported with do.

    ``torch.export`` computes in a mode of its own.

    Args:
        program: whose values are replaced; nothing is done to one of tensors with data.
        tensors: the parameters and buffers that it was exported with.
    """
    known = next((tensor for tensor in tensors if _torch.stand_in_of(tensor) is not None), None)
    if known is None:
        return
    mode = _torch.mode_of([known])
    nodes = [node for node in _all_nodes(program.graph, program.attributes) if node.op != "output"]
    flat, structure = _torch.pytree.tree_flatten([value_of(node) for node in nodes])
    values = _torch.pytree.tree_unflatten(_torch.example_twins(flat, mode), structure)
    for node, value in zip(nodes, values, strict=True):
        set_value(node, value)


def _all_nodes(graph: fx.Graph, attributes: Mapping[str, Any]) -> Iterator[fx.Node]:
    yield from graph.nodes
    for body in attributes.values():
        if isinstance(body, fx.GraphModule):
            yield from _all_nodes(body.graph, dict(body.named_children()))
