"""Joint programs made whole and by equal blocks, compared node by node."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from graphopt import Program, _torch
from graphopt.capture import CaptureSession
from graphopt.capture.effects.side_effects import capturing
from graphopt.capture.joint.differentiation import capture_joint
from graphopt.capture.joint.stamped_joint import stamp_joint
from graphopt.ir.graphs.autocast import plain_precision
from graphopt.ir.node import info, value_of
from graphopt.rewriting.precision.written_casts import write_casts
from tests.support.paths import ROOT

__all__ = ["compared", "described"]

TRACED = ("stack_trace", "nn_module_stack", "fwd_nn_module_stack", "partitioner_tag", "original_aten")
"""What torch notes of a call and something reads."""


def compared(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    loss: Any = None,
    dynamic_shapes: Any = None,
) -> tuple[Program, Program] | None:
    """The joint programs of a call by equal blocks and traced whole; None where it is traced whole in any case."""
    session = CaptureSession(model, args, kwargs, loss=loss, dynamic_shapes=dynamic_shapes)
    forward = write_casts(session.forward())
    given = forward, session.tensors(), session.captured.example_tensors
    with plain_precision(), capturing(model):
        stamped = stamp_joint(*given)
        if stamped is None:
            return None
        whole = capture_joint(*given)
    assert stamped.inputs == whole.inputs
    if loss is None:
        assert stamped.trace.backward_layout() == whole.trace.backward_layout()
        assert stamped.trace.gradient_routes() == whole.trace.gradient_routes()
    return stamped.program, whole.program


def described(program: Program) -> list[Any]:
    """Everything that a program is: nodes with names, targets, arguments, values and metadata, inputs, outputs."""
    places = {node: place for place, node in enumerate(program.graph.nodes)}
    memory: dict[int, int] = {}

    def value(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            strides = item.stride() if item.layout is torch.strided else ()
            storage = item.untyped_storage()
            place = item.storage_offset(), storage.nbytes(), memory.setdefault(_torch.storage_key(item), len(memory))
            return type(item), tuple(item.shape), strides, item.dtype, item.device, item.requires_grad, place
        return tuple(map(value, item)) if isinstance(item, (tuple, list)) else repr(item)

    def argument(item: Any) -> Any:
        return f"node {places[item]}" if isinstance(item, fx.Node) else (type(item).__name__, repr(item))

    found: list[Any] = []
    for node in program.graph.nodes:
        read = _torch.map_aggregate((node.args, node.kwargs), argument)
        traced = {key: _trace(node.meta.get(key)) for key in TRACED}
        known = info(node) if node.op != "output" else None
        found.append([node.op, node.name, str(node.target), read, value(value_of(node)), known, traced])
    return [*found, program.inputs, program.outputs, list(program.constants), program.title]


def _trace(said: object) -> str:
    """What a trace says of a call; nothing where torch took the stack of the capture itself, for want of a user's."""
    return "" if f"{ROOT}/graphopt/capture/" in str(said) else str(said)
