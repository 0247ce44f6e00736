"""Buffers that forward replaces (``self.ema = ...``) or resizes: a program can write into a buffer, and do no more."""

from __future__ import annotations

import torch
from torch import nn

from graphopt.errors import CaptureError, GraphBreakError, shown
from graphopt.ir.node import value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.values import type_text
from graphopt.ir.program import Program
from graphopt.ir.region_effects import mutated_inputs

__all__ = ["IN_PARTS", "Buffers", "buffers_of", "refuse_empty", "write_assigned"]

Buffers = list[tuple[str, nn.Module, str, torch.Tensor]]
"""Path, module, name in the module, and tensor of each buffer."""

IN_PARTS = "; or keep your loop, where graphopt.optimize captures such a model in parts"
"""What else can be done about a model that is not one graph."""


def buffers_of(model: nn.Module) -> Buffers:
    """The buffers of a model as they are."""
    return [
        (f"{path}{path and '.'}{name}", module, name, buffer)
        for path, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]


def write_assigned(buffers: Buffers) -> None:
    """Write what forward assigned to a buffer (``self.ema = ...``) into the buffer, which is all a program can do.

    Args:
        buffers: as they were before forward.

    Raises:
        GraphBreakError: where what was assigned does not fit into the buffer.
    """
    for path, module, name, before in buffers:
        after = getattr(module, name)
        if after is before:
            continue
        if not isinstance(after, torch.Tensor) or (after.shape, after.dtype) != (before.shape, before.dtype):
            raise GraphBreakError(
                f"forward replaces the buffer {path} ({type_text(before)}) by "
                f"{type_text(after) if isinstance(after, torch.Tensor) else shown(after)}, and a program writes into a "
                "buffer: where forward does so once, call the model once before (under torch.no_grad()); otherwise "
                f"keep the buffer's shape and dtype{IN_PARTS}"
            )
        with torch.no_grad():
            before.copy_(after)
        setattr(module, name, before)


def refuse_empty(program: Program) -> None:
    """Refuse a program that writes into a buffer without elements, as observers of quantization do: kernels resize it.

    Raises:
        CaptureError: with the buffer, and what to do.
    """
    empty = {node: spec.target for node, spec in program.inputs_of("buffer") if value_of(node).numel() == 0}
    for node in program.nodes if empty else ():
        for written in mutated_inputs(node, program.attributes) if node.op == "call_function" else ():
            if written in empty:
                raise CaptureError(
                    f"forward writes into the buffer {empty[written]}, which has no elements yet: "
                    f"{schema.op_name(node)} gives it a size in its first call, and a program's buffers keep theirs\n"
                    "  what to do: call the model once before graphopt does, under torch.no_grad()"
                )
